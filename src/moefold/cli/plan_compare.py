"""`moefold plan --compare-folding`: compare the best mapping with folding to the best mapping without it."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from moefold.errors import ConfigError
from moefold.planner.compare_folding import FoldingComparison, compare_by_seq_len
from moefold.planner.mapping_families import STATED_ERROR
from moefold.planner.planner import PlanRequest, format_axis_value, format_mapping
from moefold.planner.search.constraints import COUPLED, COUPLED_WITH_CP, FOLDED
from moefold.planner.search.search import PlannedMapping
from moefold.terminal import print_escaped

TEXT_WIDTH = 80
INCOMPATIBLE_OPTIONS = ("explain", "recipe", "top")
NOTES = (
    f"Predicted by the cost model; none of it is measured on GPUs: {STATED_ERROR}",
    "gain: tokens per second of the folded mapping over the other one, minus one.",
    f"coupled: etp = tp, and ep divides dp*cp (method {COUPLED_WITH_CP}). ep in dp: etp = tp, and ep divides dp "
    f"(method {COUPLED}). The rest of the search is the same; --fix restricts all three.",
)


def compare_folding(request: PlanRequest, args: argparse.Namespace) -> int:
    """Print the comparison for each sequence length of the option."""
    _check_options(args)
    lengths = args.compare_folding or [request.workload.seq_len]
    rows = compare_by_seq_len(request, lengths)
    print_escaped(json.dumps(_as_dict(request, rows)) if args.json else "\n".join(_lines(request, rows)))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    names = [option for option in INCOMPATIBLE_OPTIONS if getattr(args, option) is not None]
    names += ["timeline"] if args.timeline else []
    if names:
        raise ConfigError(f"--{names[0]} needs one ranking, and --compare-folding makes several; leave one of them out")
    if args.method != FOLDED:
        raise ConfigError(f"--method {args.method} with --compare-folding: it compares the methods; leave --method out")
    for number, length in enumerate(args.compare_folding):
        if length in args.compare_folding[:number]:
            raise ConfigError(f"--compare-folding {length} is given twice; leave one of them out")


def _lines(request: PlanRequest, comparisons: Sequence[FoldingComparison]) -> Iterator[str]:
    q = request
    fixed = " ".join(f"{axis}={format_axis_value(value)}" for axis, value in q.restriction.fixed.items())
    tokens = q.workload.seq_len * q.workload.global_batch_size
    head = (
        f"{q.model_spec.name} on {q.num_gpus} x {q.device.name}, {tokens:,} tokens a step, {q.workload.gemm_precision}"
    )
    yield from _wrap(f"{head}{', with ' if fixed else ''}{fixed}; seconds a step")
    yield ""
    yield " seq len   batch    folded   coupled      gain  ep in dp      gain"
    for row in comparisons:
        coupled = f"{_format_seconds(row.coupled)}{_format_gain(row.gain)}"
        within_dp = f"{_format_seconds(row.within_dp)}{_format_gain(row.gain_within_dp)}"
        yield f"{row.seq_len:8d}{row.global_batch_size:8d}{_format_seconds(row.folded)}{coupled}{within_dp}"
    for row in comparisons:
        yield ""
        yield from _wrap(f"{row.seq_len}: {row.reason}", "    ")
        for label, plan in _distinct_plans(row):
            yield from _wrap(f"  {label:9} {format_mapping(plan)}", " " * 12)
    yield ""
    for note in NOTES:
        yield from _wrap(note)


def _distinct_plans(comparison: FoldingComparison) -> Iterator[tuple[str, PlannedMapping]]:
    """Yield the mappings of one sequence length without duplicates."""
    if comparison.folded is not None:
        yield "folded" if not comparison.is_same_mapping else "both", comparison.folded
    if comparison.coupled is not None and not comparison.is_same_mapping:
        yield "coupled", comparison.coupled
    other_mappings = [plan.mapping for plan in (comparison.folded, comparison.coupled) if plan is not None]
    if comparison.within_dp is not None and comparison.within_dp.mapping not in other_mappings:
        yield "ep in dp", comparison.within_dp


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, TEXT_WIDTH, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True)


def _format_seconds(plan: PlannedMapping | None) -> str:
    return f"{'-':>10}" if plan is None else f"{plan.time.total_s:10.3f}"


def _format_gain(gain: float | None) -> str:
    return f"{'-':>10}" if gain is None else f"{100 * gain:+8.1f} %"


def _as_dict(request: PlanRequest, comparisons: Sequence[FoldingComparison]) -> dict[str, Any]:
    from moefold.planner.plan_json import plan_as_dict

    q = request
    return {
        "model": q.model_spec.name,
        "gpu": q.device.name,
        "num_gpus": q.num_gpus,
        "precision": q.workload.gemm_precision,
        "imbalance": q.workload.imbalance,
        "fixed": {axis: format_axis_value(value) for axis, value in q.restriction.fixed.items()},
        "is_measured": False,
        "comparisons": [
            {key: getattr(row, key) for key in ("seq_len", "global_batch_size", "gain", "gain_within_dp", "reason")}
            | {"same_mapping": row.is_same_mapping, "saved_s": row.saved_s}
            | {
                name: None if plan is None else plan_as_dict(plan)
                for name, plan in (("folded", row.folded), ("coupled", row.coupled), ("within_dp", row.within_dp))
            }
            for row in comparisons
        ],
    }
