"""The text below the table of `moefold plan`: best mapping, assumptions, how sure a prediction is, next command."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moefold.cli.plan_files import can_write_recipe
from moefold.cli.screen import HEAD_WIDTH, print_prose
from moefold.plan.planner import Planner, Question, name_of
from moefold.plan.search import Plan

PLANNED = Path("planned.toml")
REPORT = Path("plan.html")
DOUBT = (
    "by a cost model, never checked on a GPU by moefold. It is fitted on published measurements of other "
    "software, which it meets within about 7 % on average and 30 % at worst (docs/cost-model.md); mappings that are "
    "closer than that are as good as equal."
)
"""The table of docs/cost-model.md: mean absolute error of all 255 rows, and of the worst device and precision."""


def print_footer(
    console: Console,
    planner: Planner,
    shown: Sequence[Plan],
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
    print_prose(console, "#1", name_of(shown[0]))
    print_prose(
        console,
        "searched",
        f"{planner.space.count():,} legal mappings in {planner.num_folds:,} folds (tp cp pp ep etp), in "
        f"{seconds:.1f} s; of each fold the best is ranked.",
    )
    print_prose(console, "assumed", f"{'; '.join(assumptions(planner.question, shown))}.")
    print_prose(console, "predicted", DOUBT)
    others = [option for option in ("--wide", "--breakdown", "--report plan.html") if option.split()[0] not in argv]
    if others:
        print_prose(console, "more", f"{', '.join(others)}, --help")
    # In one piece, so that it can be copied.
    console.print(f"{'next:':{HEAD_WIDTH}}{_next(planner.question, args, argv)}", soft_wrap=True)


def assumptions(question: Question, shown: Sequence[Plan]) -> list[str]:
    """What a prediction rests on, in words."""
    q, w = question, question.workload
    even = "balanced experts" if w.imbalance == 1 else f"an ep rank with {w.imbalance:g} times the mean load"
    words = [f"{even} (--imbalance)", margin_words(q)]
    if any(plan.mapping.dispatcher == "deepep" for plan in shown):
        words.append(
            "deepep is installed; a run takes alltoall without it, as --fix dispatcher=alltoall ranks the mappings"
        )
    return [*words, f"MFU counts {w.flop_words}, against the bfloat16 peak"]


def margin_words(question: Question) -> str:
    """What of the memory is left free, in words."""
    q = question
    if not q.reserve_gib:
        return f"all {q.device.memory_gib:.1f} GiB of a GPU may be used (--memory-reserve)"
    share = q.reserve_gib / q.device.memory_gib
    return f"{q.reserve_gib:.1f} of {q.device.memory_gib:.1f} GiB of a GPU ({share:.0%}) stay free (--memory-reserve)"


def _next(question: Question, args: argparse.Namespace, argv: Sequence[str]) -> str:
    """The command that trains what was found, or writes it down; a recipe only where one can be written."""
    if args.recipe is not None:
        return f"moefold train {shlex.quote(str(args.recipe))}"
    output = f"--recipe {PLANNED}" if can_write_recipe(question) else f"--report {REPORT}"
    words = [word for word in argv if word not in ("--wide", "--breakdown")]
    return f"moefold plan {shlex.join(words)} {output}"
