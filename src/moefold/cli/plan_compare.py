"""`moefold plan --compare-folding`: the best mapping with folding beside the best without it."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from moefold.errors import ConfigError
from moefold.plan.compare import Comparison, compare
from moefold.plan.planner import Question, name_of, word_of
from moefold.plan.restriction import COUPLED, FOLDED, UNFOLDED
from moefold.plan.search import Plan
from moefold.printable import print_escaped

WIDTH = 80
NOT_COMPARED = ("explain", "recipe", "report", "top")
NOTES = (
    "Predicted by the cost model (docs/cost-model.md); we have measured none of it on GPUs. gain: tokens a second of "
    "the folded mapping over the other one, less one.",
    f"coupled: etp = tp, and ep divides dp*cp (method {UNFOLDED}). ep in dp: etp = tp, and ep divides dp (method "
    f"{COUPLED}). Everything else is searched alike; --fix restricts all three.",
)


def compare_folding(question: Question, args: argparse.Namespace) -> int:
    """Print the comparison for each length that the option names.

    Raises:
        ConfigError: an option does not go with it, a length is wrong, or nothing fits.
    """
    from moefold.cli.plan import planner_of

    _check_options(args)
    lengths = args.compare_folding or [question.workload.seq_len]
    found = compare(question, lengths, lambda asked: planner_of(asked, args))
    print_escaped(json.dumps(_as_dict(question, found)) if args.json else "\n".join(_lines(question, found)))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    given = [option for option in NOT_COMPARED if getattr(args, option) is not None]
    given += ["timeline"] if args.timeline else []
    if given:
        raise ConfigError(f"--{given[0]} is of one ranking, and --compare-folding makes several; leave one of them out")
    if args.method != FOLDED:
        raise ConfigError(f"--method {args.method} with --compare-folding: it compares the methods; leave --method out")
    for number, length in enumerate(args.compare_folding):
        if length in args.compare_folding[:number]:
            raise ConfigError(f"--compare-folding {length} is given twice; leave one of them out")


def _lines(question: Question, found: Sequence[Comparison]) -> Iterator[str]:
    q = question
    fixed = " ".join(f"{axis}={word_of(value)}" for axis, value in q.restriction.fixed.items())
    tokens = q.workload.seq_len * q.workload.global_batch_size
    head = f"{q.shape.name} on {q.num_gpus} x {q.device.name}, {tokens:,} tokens a step, {q.workload.product_words}"
    yield from _wrapped(f"{head}{', with ' if fixed else ''}{fixed}; seconds a step")
    yield ""
    yield " seq len   batch    folded   coupled      gain  ep in dp      gain"
    for one in found:
        yield (
            f"{one.seq_len:8d}{one.global_batch_size:8d}{_seconds(one.folded)}{_seconds(one.coupled)}{_gain(one.gain)}"
            f"{_seconds(one.within_dp)}{_gain(one.gain_within_dp)}"
        )
    for one in found:
        yield ""
        yield from _wrapped(f"{one.seq_len}: {one.reason}", "    ")
        for label, plan in _shown(one):
            yield from _wrapped(f"  {label:9} {name_of(plan)}", " " * 12)
    yield ""
    for note in NOTES:
        yield from _wrapped(note)


def _shown(one: Comparison) -> Iterator[tuple[str, Plan]]:
    """The mappings of a length, each once."""
    if one.folded is not None:
        yield "folded" if not one.is_same else "both", one.folded
    if one.coupled is not None and not one.is_same:
        yield "coupled", one.coupled
    others = [plan.mapping for plan in (one.folded, one.coupled) if plan is not None]
    if one.within_dp is not None and one.within_dp.mapping not in others:
        yield "ep in dp", one.within_dp


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True)


def _seconds(plan: Plan | None) -> str:
    return f"{'-':>10}" if plan is None else f"{plan.time.total_s:10.3f}"


def _gain(gain: float | None) -> str:
    return f"{'-':>10}" if gain is None else f"{100 * gain:+8.1f} %"


def _as_dict(question: Question, found: Sequence[Comparison]) -> dict[str, Any]:
    from moefold.cli.plan import plan_as_dict

    def plan(one: Plan | None) -> dict[str, Any] | None:
        return None if one is None else plan_as_dict(one)

    q = question
    return {
        "model": q.shape.name,
        "gpu": q.device.name,
        "num_gpus": q.num_gpus,
        "precision": q.workload.product_words,
        "imbalance": q.workload.imbalance,
        "fixed": {axis: word_of(value) for axis, value in q.restriction.fixed.items()},
        "is_measured": False,
        "comparisons": [
            {
                "seq_len": one.seq_len,
                "global_batch_size": one.global_batch_size,
                "gain": one.gain,
                "gain_within_dp": one.gain_within_dp,
                "same_mapping": one.is_same,
                "reason": one.reason,
                "saved_s": one.saved_s,
                "folded": plan(one.folded),
                "coupled": plan(one.coupled),
                "within_dp": plan(one.within_dp),
            }
            for one in found
        ],
    }
