"""The tables of `moefold plan`."""

from collections.abc import Sequence

from rich.console import Console

from moefold.cli.screen import Column, print_columns
from moefold.plan.mapping import ParallelMapping
from moefold.plan.memory import MEMORY_PARTS
from moefold.plan.planner import PlanRequest
from moefold.plan.restriction import FOLDED
from moefold.plan.search import PlannedMapping
from moefold.plan.step_time import TIME_PARTS
from moefold.plan.wording import format_compact_degrees, format_seconds

GIB = 2**30
DEGREES = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs", "zero")


def print_question(console: Console, request: PlanRequest) -> None:
    """Print the model, the GPUs and the batch in one line."""
    q, w = request, request.workload
    method = "" if q.restriction.method == FOLDED else f", method {q.restriction.method}"
    console.print(
        f"{q.model_spec.name} on {q.num_gpus} x {q.device.name}: {w.global_batch_size} x {w.seq_len} tokens a step, "
        f"{w.gemm_precision}{method}",
        style="bold",
    )


def print_ranking(console: Console, plans: Sequence[PlannedMapping], *, wide: bool) -> None:
    """Print a row for each mapping: its degrees in one word each, step time, MFU, memory and what takes most time."""
    times = [plan.time for plan in plans]
    console.print()
    rank = Column(name="#", cells=[str(place) for place in range(1, len(plans) + 1)], justify="right")
    step = _numbers("step, s", [format_seconds(time.total_s) for time in times])
    mfu = _numbers("MFU, %", [f"{100 * time.mfu:.0f}" for time in times])
    gib = _numbers("GiB", [f"{plan.memory.total / GIB:.1f}" for plan in plans])
    bound = Column(name="bound by", cells=[plan.bottleneck for plan in plans], wraps=True)
    if wide:
        rates = (
            _numbers("TFLOP/s", [f"{time.tflops_per_gpu:.0f}" for time in times]),
            _numbers("tokens/s/GPU", [f"{time.tokens_per_s_per_gpu:.0f}" for time in times]),
        )
        print_columns(console, [rank, *_mapping_columns(plans), step, mfu, *rates, gib, bound])
        return
    mapping = Column(name="mapping", cells=[format_compact_degrees(plan.mapping) for plan in plans], wraps=True)
    print_columns(console, [rank, mapping, step, mfu, gib, bound])


def print_breakdown(console: Console, plans: Sequence[PlannedMapping]) -> None:
    """Print time and memory by part: a row for each part that some mapping has, a column for each mapping."""
    times = [{part: plan.time.parts[part] for part in TIME_PARTS} for plan in plans]
    memory = [{part: plan.memory_parts[part] / GIB for part in MEMORY_PARTS} for plan in plans]
    for title, unit, amounts, digits in (
        ("time of a step, on the busiest pipeline rank", "seconds", times, 3),
        ("memory of the fullest GPU", "GiB", memory, 1),
    ):
        names = [name for name in amounts[0] if any(amount[name] >= 0.5 * 10**-digits for amount in amounts)]
        console.print(f"\n{title}", style="bold")
        labels = Column(name=unit, cells=[*(name.replace("_", " ") for name in names), "total"])
        totals = [sum(amount.values()) for amount in amounts]
        columns = [
            _numbers(f"#{place}", [*(f"{amount[name]:.{digits}f}" for name in names), f"{total:.{digits}f}"])
            for place, (amount, total) in enumerate(zip(amounts, totals, strict=True), 1)
        ]
        print_columns(console, [labels, *columns])


def _mapping_columns(plans: Sequence[PlannedMapping]) -> list[Column]:
    mappings = [plan.mapping for plan in plans]
    return [
        *(_numbers(name, [str(getattr(m, name)) for m in mappings]) for name in DEGREES),
        Column(name="schedule", cells=[m.schedule if m.pp > 1 else "-" for m in mappings]),
        Column(name="dispatcher", cells=[_dispatcher(m) for m in mappings], wraps=True),
        Column(name="recompute", cells=[", ".join(m.recompute) or "-" for m in mappings], wraps=True),
        Column(name="offload", cells=[", ".join(m.offload) or "-" for m in mappings], wraps=True),
    ]


def _numbers(name: str, cells: Sequence[str]) -> Column:
    return Column(name=name, cells=cells, justify="right")


def _dispatcher(mapping: ParallelMapping) -> str:
    if mapping.ep * mapping.etp == 1:
        return "-"
    return f"{mapping.dispatcher}, overlapped" if mapping.overlap else mapping.dispatcher
