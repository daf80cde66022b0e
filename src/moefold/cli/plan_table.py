"""The tables of `moefold plan`."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moefold.plan.mapping import Mapping
from moefold.plan.memory import MEMORY_PARTS
from moefold.plan.planner import Planner
from moefold.plan.restriction import FOLDED
from moefold.plan.search import Plan
from moefold.plan.step_time import PARTS

GIB = 2**30
DEGREES = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs")


def print_plans(console: Console, planner: Planner, count: int, started: float) -> None:
    """The best mappings, their time and their memory by part."""
    q = planner.question
    w = q.workload
    method = "" if q.restriction.method == FOLDED else f", method {q.restriction.method}"
    console.print(
        f"{q.shape.name} on {q.num_gpus} x {q.device.name} ({q.device.memory_gib:.0f} GiB), {w.seq_len} tokens x "
        f"{w.global_batch_size} samples a step, {w.product_words}, imbalance {w.imbalance:g}{method}"
    )
    shown = planner.first(count)
    console.print(_ranking(shown))
    _print_parts(console, shown)
    seconds = time.perf_counter() - started
    console.print(
        f"{planner.space.count():,} legal mappings in {planner.num_folds:,} folds, of which the best is ranked "
        f"({seconds:.1f} s). MFU counts {w.flop_words}, against the bfloat16 peak."
    )
    if any(plan.mapping.dispatcher == "deepep" for plan in shown):
        console.print(
            "deepep is a package of its own, priced as if it were installed where the run is; a recipe says "
            "dispatcher=auto, which takes alltoall without it. --fix dispatcher=alltoall ranks without it."
        )


def print_plan(console: Console, plan: Plan) -> None:
    """One mapping."""
    console.print(_ranking([plan]))
    _print_parts(console, [plan])


def _print_parts(console: Console, plans: Sequence[Plan]) -> None:
    # A title of the table would be broken to its width.
    console.print("seconds of a step, on the busiest pipeline rank")
    console.print(_parts(plans, _times(plans), 3))
    console.print("GiB on the fullest GPU")
    console.print(_parts(plans, [_memory(plan) for plan in plans], 1))


def _ranking(plans: Sequence[Plan]) -> Table:
    table = Table(pad_edge=False)
    for name in ("#", *DEGREES):
        table.add_column(name, justify="right")
    for name in ("schedule", "zero", "dispatcher", "recompute", "offload"):
        table.add_column(name)
    for name in ("step s", "MFU %", "TFLOP/s", "tokens/s/GPU", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for place, plan in enumerate(plans, 1):
        m, t = plan.mapping, plan.time
        table.add_row(
            str(place),
            *(str(getattr(m, name)) for name in DEGREES),
            m.schedule if m.pp > 1 else "-",
            str(m.zero),
            _dispatcher(m),
            ", ".join(m.recompute) or "-",
            ", ".join(m.offload) or "-",
            f"{t.total_s:.3f}",
            f"{100 * t.mfu:.1f}",
            f"{t.tflops_per_gpu:.0f}",
            f"{t.tokens_per_s_per_gpu:.0f}",
            f"{plan.memory.total / GIB:.1f}",
            plan.binding,
        )
    return table


def _parts(plans: Sequence[Plan], rows: Sequence[dict[str, float]], digits: int) -> Table:
    """One row a plan, one column for each part that some plan has."""
    table = Table(pad_edge=False)
    table.add_column("#", justify="right")
    least = 0.5 * 10**-digits
    names = [name for name in rows[0] if any(row[name] >= least for row in rows)] if rows else []
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for place, row in enumerate(rows[: len(plans)], 1):
        table.add_row(str(place), *(f"{row[name]:.{digits}f}" for name in names))
    return table


def _times(plans: Sequence[Plan]) -> list[dict[str, float]]:
    return [{part: plan.time.parts[part] for part in PARTS} for plan in plans]


def _memory(plan: Plan) -> dict[str, float]:
    return {part: plan.memory_parts[part] / GIB for part in MEMORY_PARTS}


def _dispatcher(m: Mapping) -> str:
    if m.ep * m.etp == 1:
        return "-"
    return f"{m.dispatcher}, overlapped" if m.overlap else m.dispatcher
