"""`moefold plan --explain`: one mapping by itself, or why it cannot be."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.cli.plan_files import tell_unwritten, write_files
from moefold.cli.plan_words import read_axes
from moefold.errors import ConfigError
from moefold.plan.planner import Question, name_of
from moefold.plan.reason import why_illegal
from moefold.plan.restriction import Restriction
from moefold.plan.search import Plan
from moefold.printable import print_escaped

EXIT_NO = 1
GIB = 2**30
ROUNDING = 1e-9
"""A search adds the parts of a step in another order; what is no faster than by this is as fast."""


def explain(question: Question, args: argparse.Namespace, argv: list[str]) -> int:
    """Price the mapping that the words name, with the best of what they leave open; 1 if it is illegal or does not fit.

    The files that the other options name are of this mapping.

    Raises:
        ConfigError: a word is wrong, or an option does not go with one mapping.
    """
    given = read_axes(args.explain, "--explain")
    _check_options(question, given, args)
    question = replace(question, restriction=Restriction({**question.restriction.fixed, **given}, args.method))
    from moefold.cli.plan import plan_as_dict, planner_of

    planner = planner_of(question, args)
    if not planner.space.folds:
        reason = why_illegal(planner.space.legality, question.restriction)
        _tell(args, {"legal": False, "reason": reason}, f"illegal: {reason}")
        tell_unwritten(args, "the mapping is illegal")
        return EXIT_NO
    plan = planner.first(1)[0]
    ranking = _ranking(question, plan, args)
    record = {"legal": True, **plan_as_dict(plan), **ranking}
    if plan.memory.fits:
        write_files(planner, plan, args, argv)
    else:
        record["reason"] = why_too_large(plan, question)
        tell_unwritten(args, "the mapping does not fit")
    if args.json:
        print(json.dumps(record))
    else:
        _print(question, plan, record, wide=args.wide)
    return 0 if plan.memory.fits else EXIT_NO


def _check_options(question: Question, given: Mapping[str, Any], args: argparse.Namespace) -> None:
    if args.top is not None:
        raise ConfigError("--top counts mappings, and --explain shows one; leave one of them out")
    for axis, value in question.restriction.fixed.items():
        if given.get(axis, value) != value:
            raise ConfigError(f"--explain {axis}={given[axis]} and --fix {axis}={value} differ; leave one of them out")


def why_too_large(plan: Plan, question: Question) -> str:
    """What is too much, in one sentence."""
    lacking = (plan.memory.total - plan.memory.capacity) / GIB
    part, size = max(plan.memory_parts.items(), key=lambda item: item[1])
    reserve = question.reserve_gib
    kept = f" with {reserve:.1f} GiB kept free (--memory-reserve)" if reserve else ""
    return (
        f"does not fit: {plan.memory.total / GIB:.1f} GiB of {plan.memory.capacity / GIB:.1f} GiB{kept}, {lacking:.1f} "
        f"GiB too much even with {name_of(plan)}; most of it is {part}, {size / GIB:.1f} GiB"
    )


def _ranking(question: Question, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Where it would stand among the best mappings of all folds."""
    from moefold.cli.plan import planner_of

    everything = planner_of(replace(question, restriction=Restriction({}, args.method)), args)
    best = everything.first(1)[0]
    fits = plan.memory.fits
    return {
        "rank": 1 + everything.num_faster(plan.time.total_s * (1 - ROUNDING)) if fits else None,
        "num_folds": everything.num_folds,
        "best": name_of(best),
        "best_step_time_s": best.time.total_s if best.memory.fits else None,
    }


def _tell(args: argparse.Namespace, record: dict[str, Any], text: str) -> None:
    print_escaped(json.dumps(record) if args.json else text)


def _print(question: Question, plan: Plan, record: dict[str, Any], *, wide: bool) -> None:
    from moefold.cli.plan_footer import DOUBT, assumptions
    from moefold.cli.plan_table import print_breakdown, print_question, print_ranking
    from moefold.cli.screen import open_console, print_prose

    console = open_console()
    print_question(console, question)
    print_ranking(console, [plan], wide=wide)
    print_breakdown(console, [plan])
    console.print()
    print_prose(console, "#1", name_of(plan))
    if not plan.memory.fits:
        print_prose(console, "memory", record["reason"])
        return
    slower = plan.time.total_s / record["best_step_time_s"] - 1
    print_prose(
        console,
        "rank",
        f"{record['rank']:,} among the best mappings of {record['num_folds']:,} folds; "
        + (f"{slower:.1%} slower than {record['best']}" if slower > 0 else "none is faster"),
    )
    print_prose(console, "assumed", f"{'; '.join(assumptions(question, [plan]))}.")
    print_prose(console, "predicted", DOUBT)
