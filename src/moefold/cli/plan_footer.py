"""The text below the table of `moefold plan`: best mapping, assumptions, how sure a prediction is, next command."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moefold.cli.plan_files import can_write_recipe
from moefold.cli.screen import HEAD_WIDTH, print_prose
from moefold.plan.planner import Planner, PlanRequest, format_mapping
from moefold.plan.search import PlannedMapping

RECIPE_PATH = Path("planned.toml")
REPORT_PATH = Path("plan.html")
ACCURACY_STATEMENT = (
    "by a cost model, never checked on a GPU by moefold. It is fitted on published measurements of other "
    "software, which it meets within about 7 % on average and 30 % at worst (docs/cost-model.md); mappings that are "
    "closer than that are as good as equal."
)
"""The table of docs/cost-model.md: mean absolute error of all 255 rows, and of the worst device and precision."""


def print_footer(
    console: Console,
    planner: Planner,
    shown: Sequence[PlannedMapping],
    args: argparse.Namespace,
    argv: Sequence[str],
    seconds: float,
) -> None:
    """Print it.

    Args:
        console: where to.
        planner: what has answered.
        shown: the mappings of the table, best first.
        args: the options.
        argv: the words after `moefold plan`.
        seconds: that the command has taken.
    """
    console.print()
    print_prose(console, "#1", format_mapping(shown[0]))
    print_prose(
        console,
        "searched",
        f"{planner.space.count():,} legal mappings in {planner.num_folds:,} folds (tp cp pp ep etp), in "
        f"{seconds:.1f} s; of each fold the best is ranked.",
    )
    print_prose(console, "assumed", f"{'; '.join(list_assumptions(planner.request, shown))}.")
    print_prose(console, "predicted", ACCURACY_STATEMENT)
    others = [option for option in ("--wide", "--breakdown", "--report plan.html") if option.split()[0] not in argv]
    if others:
        print_prose(console, "more", f"{', '.join(others)}, --help")
    # In one piece, so that it can be copied.
    console.print(f"{'next:':{HEAD_WIDTH}}{_next_command(planner.request, args, argv)}", soft_wrap=True)


def list_assumptions(request: PlanRequest, shown: Sequence[PlannedMapping]) -> list[str]:
    """What a prediction rests on, in words."""
    q, w = request, request.workload
    even = "balanced experts" if w.imbalance == 1 else f"an ep rank with {w.imbalance:g} times the mean load"
    words = [f"{even} (--imbalance)", describe_margin(q)]
    if any(plan.mapping.dispatcher == "deepep" for plan in shown):
        words.append(
            "deepep is installed; a run takes alltoall without it, as --fix dispatcher=alltoall ranks the mappings"
        )
    return [*words, f"MFU counts {w.flop_description}, against the bfloat16 peak"]


def describe_margin(request: PlanRequest) -> str:
    """What of the memory is left free, in words."""
    q = request
    if not q.reserve_gib:
        return f"all {q.device.memory_gib:.1f} GiB of a GPU may be used (--memory-reserve)"
    share = q.reserve_gib / q.device.memory_gib
    return f"{q.reserve_gib:.1f} of {q.device.memory_gib:.1f} GiB of a GPU ({share:.0%}) stay free (--memory-reserve)"


def _next_command(request: PlanRequest, args: argparse.Namespace, argv: Sequence[str]) -> str:
    """The command that trains what was found, or writes it down; a recipe only where one can be written."""
    if args.recipe is not None:
        return f"moefold train {shlex.quote(str(args.recipe))}"
    output = f"--recipe {RECIPE_PATH}" if can_write_recipe(request) else f"--report {REPORT_PATH}"
    words = [word for word in argv if word not in ("--wide", "--breakdown")]
    return f"moefold plan {shlex.join(words)} {output}"
