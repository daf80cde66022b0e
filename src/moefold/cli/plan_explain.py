"""`moefold plan --explain`: predict one mapping, or explain why it is illegal."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.cli.plan_outputs import (
    ACCURACY_STATEMENT,
    list_assumptions,
    print_documents,
    report_unwritten,
    write_outputs,
)
from moefold.cli.plan_table import print_breakdown, print_ranking, print_request
from moefold.cli.screen import open_console, print_prose
from moefold.errors import ConfigError
from moefold.planner.axis_words import parse_axes
from moefold.planner.plan_json import plan_as_dict
from moefold.planner.planner import Planner, PlanRequest, format_mapping
from moefold.planner.search.constraints import Restriction
from moefold.planner.search.search import PlannedMapping
from moefold.planner.search.space import explain_illegal
from moefold.terminal import print_escaped
from moefold.units import GIB

EXIT_NOT_FEASIBLE = 1
TIE_TOLERANCE = 1e-9
"""Relative tolerance of equal step times: the search adds the parts of a step in another order."""


def explain(request: PlanRequest, args: argparse.Namespace, argv: list[str]) -> int:
    """Predict the best mapping with the given axes and return 1 if it is illegal or does not fit, else 0.

    The files of other options are written for this mapping.
    """
    axes = parse_axes(args.explain, "--explain")
    _check_options(request.restriction.fixed, axes, args)
    request = replace(request, restriction=Restriction({**request.restriction.fixed, **axes}, args.method))

    planner = Planner(request)
    if not planner.space.num_folds:
        reason = explain_illegal(planner.space.constraints, request.restriction)
        print_escaped(json.dumps({"legal": False, "reason": reason}) if args.json else f"illegal: {reason}")
        report_unwritten(args, "the mapping is illegal")
        return EXIT_NOT_FEASIBLE
    plan = planner.top_plans(1)[0]
    ranking = _ranking(request, plan, args)
    record = {"legal": True, **plan_as_dict(plan), **ranking}
    if plan.memory.fits:
        write_outputs(planner, plan, args, argv)
    else:
        record["reason"] = memory_excess_reason(plan, request.reserve_gib)
        report_unwritten(args, "the mapping does not fit")
    if args.json:
        print(json.dumps(record))
    else:
        _print(planner, plan, record, wide=args.wide)
    return 0 if plan.memory.fits else EXIT_NOT_FEASIBLE


def _check_options(fixed: Mapping[str, Any], axes: Mapping[str, Any], args: argparse.Namespace) -> None:
    if args.top is not None:
        raise ConfigError("--top counts mappings, and --explain shows one; leave one of them out")
    for axis, value in fixed.items():
        if axes.get(axis, value) != value:
            raise ConfigError(f"--explain {axis}={axes[axis]} and --fix {axis}={value} differ; leave one of them out")


def memory_excess_reason(plan: PlannedMapping, reserve_gib: float) -> str:
    """Explain in one sentence how much memory is missing, and which part takes most of it."""
    lacking = (plan.memory.total - plan.memory.capacity) / GIB
    part, size = max(plan.memory.parts.items(), key=lambda item: item[1])
    reserved = f" with {reserve_gib:.1f} GiB kept free (--memory-reserve)" if reserve_gib else ""
    return (
        f"does not fit: {plan.memory.total / GIB:.1f} GiB of {plan.memory.capacity / GIB:.1f} GiB{reserved}, "
        f"{lacking:.1f} GiB too much even with {format_mapping(plan)}; most of it is {part}, {size / GIB:.1f} GiB"
    )


def _ranking(request: PlanRequest, plan: PlannedMapping, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rank of the mapping among the best mappings of all folds."""
    everything = Planner(replace(request, restriction=Restriction({}, args.method)))
    best = everything.top_plans(1)[0]
    limit_s = plan.time.total_s * (1 - TIE_TOLERANCE)
    return {
        "rank": 1 + len(everything.search.folds_below(limit_s)) if plan.memory.fits else None,
        "num_folds": everything.num_folds,
        "best": format_mapping(best),
        "best_step_time_s": best.time.total_s if best.memory.fits else None,
    }


def _print(planner: Planner, plan: PlannedMapping, record: dict[str, Any], *, wide: bool) -> None:
    console = open_console()
    request = planner.request
    print_request(console, request)
    print_ranking(console, [plan], wide=wide)
    print_breakdown(console, [plan])
    console.print()
    print_prose(console, "#1", format_mapping(plan))
    print_documents(console, planner, plan)
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
    print_prose(console, "assumed", f"{'; '.join(list_assumptions(request, [plan]))}.")
    print_prose(console, "predicted", ACCURACY_STATEMENT)
