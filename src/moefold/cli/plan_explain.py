"""`moefold plan --explain`: one mapping by itself, or why it cannot be."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from moefold.cli.plan_words import read_axes
from moefold.config.checks import check_config
from moefold.errors import ConfigError
from moefold.plan.legality import AXES, Legality
from moefold.plan.planner import Planner, Question, name_of
from moefold.plan.restriction import Restriction
from moefold.plan.search import Plan

EXIT_NO = 1
GIB = 2**30


def explain(question: Question, args: argparse.Namespace) -> int:
    """Price the mapping that the words name, with the best of what they leave open; 1 if it is illegal or does not fit.

    Raises:
        ConfigError: a word is wrong.
    """
    given = read_axes(args.explain, "--explain")
    question = replace(question, restriction=Restriction({**question.restriction.fixed, **given}, args.method))
    from moefold.cli.plan import plan_as_dict, planner_of

    planner = planner_of(question, args)
    reason = _why_illegal(question, planner)
    if reason:
        _tell(args, {"legal": False, "reason": reason}, f"illegal: {reason}")
        return EXIT_NO
    plan = planner.first(1)[0]
    ranking = _ranking(question, plan, args)
    record = {"legal": True, **plan_as_dict(plan), **ranking}
    if not plan.memory.fits:
        record["reason"] = why_too_large(plan)
    if args.json:
        print(json.dumps(record))
    else:
        _print(plan, record)
    return 0 if plan.memory.fits else EXIT_NO


def why_too_large(plan: Plan) -> str:
    """What is too much, in one sentence."""
    lacking = (plan.memory.total - plan.memory.capacity) / GIB
    part, size = max(plan.memory_parts.items(), key=lambda item: item[1])
    return (
        f"does not fit: {plan.memory.total / GIB:.1f} GiB of {plan.memory.capacity / GIB:.1f} GiB, {lacking:.1f} GiB "
        f"too much even with {name_of(plan)}; most of it is {part}, {size / GIB:.1f} GiB"
    )


def _why_illegal(question: Question, planner: Planner) -> str:
    """What the runtime says against it; empty if some mapping is legal."""
    if planner.space.folds and planner.space.count():
        return ""
    values: dict[str, Any] = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "mbs"), 1)
    values |= {axis: value for axis, value in question.restriction.fixed.items() if axis in AXES}
    if values.get("vpp", 1) > 1 and "schedule" not in values:
        values["schedule"] = "interleaved"
    cfg = Legality(question.base).config_of(values)
    try:
        check_config(cfg)
    except ConfigError as error:
        return str(error)
    p = cfg.parallel
    derived = {"dp": p.dp, "edp": p.edp}
    wrong = [axis for axis in ("dp", "edp") if question.restriction.fixed.get(axis, derived[axis]) != derived[axis]]
    if wrong:
        return "; ".join(
            f"{axis}={derived[axis]} follows from the other degrees on {p.world_size} GPUs" for axis in wrong
        )
    return f"no such mapping is of method {question.restriction.method!r}, or it needs other axes than those given"


def _ranking(question: Question, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Where it would stand among the best mappings of all folds."""
    from moefold.cli.plan import planner_of

    everything = planner_of(replace(question, restriction=Restriction({}, args.method)), args)
    best = everything.first(1)[0]
    fits = plan.memory.fits
    return {
        "rank": 1 + everything.num_faster(plan.time.total_s) if fits else None,
        "num_folds": everything.num_folds,
        "best": name_of(best),
        "best_step_time_s": best.time.total_s if best.memory.fits else None,
    }


def _tell(args: argparse.Namespace, record: dict[str, Any], text: str) -> None:
    print(json.dumps(record) if args.json else text)


def _print(plan: Plan, record: dict[str, Any]) -> None:
    from rich.console import Console

    from moefold.cli.plan_table import print_plan

    console = Console(width=None if sys.stdout.isatty() else 200)
    print_plan(console, plan)
    if not plan.memory.fits:
        console.print(record["reason"])
        return
    slower = plan.time.total_s / record["best_step_time_s"] - 1
    console.print(
        f"rank {record['rank']} among the best mappings of {record['num_folds']:,} folds; "
        + (f"{slower:.1%} slower than {record['best']}" if slower > 0 else "none is faster")
    )
