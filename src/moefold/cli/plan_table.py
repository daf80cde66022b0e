"""Tables of `moefold plan`."""

from collections.abc import Sequence

from rich.console import Console

from moefold.cli.screen import Column, numbers, print_columns, print_prose
from moefold.cost.hardware import DECIDING_CONSTANTS, Device
from moefold.planner.axis_words import NUMBERS
from moefold.planner.cost_model.step import TIME_CATEGORIES
from moefold.planner.mapping import (
    ParallelMapping,
    describe_strategy,
    format_compact_degrees,
    format_rate,
    format_seconds,
)
from moefold.planner.mapping_families import FAMILIES, FamilyBest
from moefold.planner.memory.budget import MEMORY_PARTS
from moefold.planner.planner import PlanRequest
from moefold.planner.search.constraints import FOLDED
from moefold.planner.search.search import PlannedMapping
from moefold.topology.schedules import schedule_named
from moefold.units import GIB


def print_request(console: Console, request: PlanRequest) -> None:
    """Print the model, the GPUs and the batch in one line."""
    q = request
    w = request.workload
    method = "" if q.restriction.method == FOLDED else f", method {q.restriction.method}"
    console.print(
        f"{q.model_spec.name} on {q.num_gpus} x {q.device.name}: {w.global_batch_size} x {w.seq_len} tokens a step, "
        f"{w.gemm_precision}{method}",
        style="bold",
    )
    if q.assumed:
        assumed = " ".join(f"{option} {value}" for option, value in q.assumed.items())
        console.print(f"assumed: {assumed}; give yours")


def print_families(console: Console, families: Sequence[FamilyBest], chosen_family: FamilyBest, device: Device) -> None:
    """Print the best mapping of each family, its distance from a measured mapping, and what is unmeasured."""
    distinct = [row for i, row in enumerate(families) if row.plan.mapping not in [o.plan.mapping for o in families[:i]]]
    times = [row.plan.time for row in distinct]
    marks = ["#1" if row.plan.mapping == chosen_family.plan.mapping else "=" * row.is_tie for row in distinct]
    names = [
        " and ".join(FAMILIES[other.name].title for other in families if other.plan.mapping == row.plan.mapping)
        for row in distinct
    ]
    console.print()
    print_columns(
        console,
        [
            Column(name="", cells=marks),
            Column(name="family", cells=names, wraps=True),
            Column(name="mapping", cells=[format_compact_degrees(row.plan.mapping) for row in distinct], wraps=True),
            numbers("step, s", [format_seconds(time.total_s) for time in times]),
            numbers("TFLOP/s", [f"{time.tflops_per_gpu:.0f}" for time in times]),
            numbers("tokens/s", [format_rate(time.tokens_per_s_per_gpu) for time in times]),
            numbers("GiB", [f"{row.plan.memory.total / GIB:.0f}" for row in distinct]),
        ],
        num_keys=2,
    )
    console.print()
    for row in distinct:
        print_prose(console, row.name, _describe_distance(row))
    if device.unmeasured:
        constants = ", ".join(DECIDING_CONSTANTS[key] for key in device.unmeasured)
        text = f"unmeasured on {device.name}: {constants}; make gpu measures them (docs/gpu.md)."
        print_prose(console, "constants", text)


def _describe_distance(row: FamilyBest) -> str:
    """Describe the distance of a mapping from a measured mapping."""
    near = row.nearest
    count = len(near.differences)
    axes = f"{count} {'axis' if count == 1 else 'axes'} from " if count else "measured: "
    unmeasured = "".join(f"; unmeasured: {constant}" for constant in row.unmeasured)
    strategy = describe_strategy(row.plan.mapping)
    changes = f": {', '.join(near.differences)}" if count else ""
    return f"{strategy + '; ' if strategy else ''}{axes}{near.case}{changes}{unmeasured}{_describe_faster(row)}"


def _describe_faster(row: FamilyBest) -> str:
    """Describe the fastest mapping of a family if the table has a mapping that is nearer to a measurement."""
    fastest = row.fastest
    if fastest.mapping == row.plan.mapping:
        return ""
    less = 1 - fastest.time.total_s / row.plan.time.total_s
    return f"; {format_compact_degrees(fastest.mapping)} takes {less:.1%} less, within the error, but is less measured"


def print_ranking(console: Console, plans: Sequence[PlannedMapping], *, wide: bool) -> None:
    """Print a row for each mapping: its degrees, step time, MFU, memory and bottleneck."""
    times = [plan.time for plan in plans]
    console.print()
    rank = Column(name="#", cells=[str(place) for place in range(1, len(plans) + 1)], justify="right")
    step = numbers("step, s", [format_seconds(time.total_s) for time in times])
    mfu = numbers("MFU, %", [f"{100 * time.mfu:.0f}" for time in times])
    gib = numbers("GiB", [f"{plan.memory.total / GIB:.1f}" for plan in plans])
    bound = Column(name="bound by", cells=[plan.bottleneck for plan in plans], wraps=True)
    if wide:
        rates = (
            numbers("TFLOP/s", [f"{time.tflops_per_gpu:.0f}" for time in times]),
            numbers("tokens/s/GPU", [f"{time.tokens_per_s_per_gpu:.0f}" for time in times]),
        )
        print_columns(console, [rank, *_mapping_columns(plans), step, mfu, *rates, gib, bound])
        return
    mapping = Column(name="mapping", cells=[format_compact_degrees(plan.mapping) for plan in plans], wraps=True)
    print_columns(console, [rank, mapping, step, mfu, gib, bound])


def print_breakdown(console: Console, plans: Sequence[PlannedMapping]) -> None:
    """Print time and memory by part: a row for each part that any mapping has, a column for each mapping."""
    times = [{part: plan.time.parts[part] for part in TIME_CATEGORIES} for plan in plans]
    memory = [{part: plan.memory.parts[part] / GIB for part in MEMORY_PARTS} for plan in plans]
    for title, unit, amounts, digits in (
        ("time of a step, on the busiest pipeline rank", "seconds", times, 3),
        ("memory of the fullest GPU", "GiB", memory, 1),
    ):
        names = [name for name in amounts[0] if any(amount[name] >= 0.5 * 10**-digits for amount in amounts)]
        console.print(f"\n{title}", style="bold")
        labels = Column(name=unit, cells=[*(name.replace("_", " ") for name in names), "total"])
        totals = [sum(amount.values()) for amount in amounts]
        columns = [
            numbers(f"#{place}", [*(f"{amount[name]:.{digits}f}" for name in names), f"{total:.{digits}f}"])
            for place, (amount, total) in enumerate(zip(amounts, totals, strict=True), 1)
        ]
        print_columns(console, [labels, *columns])


def _mapping_columns(plans: Sequence[PlannedMapping]) -> list[Column]:
    mappings = [plan.mapping for plan in plans]
    return [
        *(numbers(name, [str(getattr(m, name)) for m in mappings]) for name in NUMBERS),
        Column(name="schedule", cells=[schedule_named(m.schedule).kind if m.pp > 1 else "-" for m in mappings]),
        Column(name="dispatcher", cells=[_dispatcher(m) for m in mappings], wraps=True),
        Column(name="recompute", cells=[", ".join(m.recompute) or "-" for m in mappings], wraps=True),
        Column(name="offload", cells=[", ".join(m.offload) or "-" for m in mappings], wraps=True),
    ]


def _dispatcher(mapping: ParallelMapping) -> str:
    if mapping.ep * mapping.etp == 1:
        return "-"
    return mapping.dispatcher.kind + ", overlapped" * mapping.overlap
