"""The files of `moefold plan`: a recipe, a report and timelines of the best mapping, checked before the search."""

import argparse
import shlex
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

from moefold.cli.disturbance import check_seed, factors_of, jitter_of, stragglers_of
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.output_file import check_output, refuse_existing
from moefold.plan.planner import Planner, Question, name_of
from moefold.plan.precision import check_trainable
from moefold.plan.restriction import METHODS
from moefold.plan.search import Plan
from moefold.plan.simulate import Disturbance
from moefold.plan.stage_work import simulate_mapping
from moefold.plan.timeline_file import check_timeline_file, write_timeline
from moefold.printable import print_escaped, printable


def check_places(args: argparse.Namespace) -> None:
    """The files can be written, and what disturbs their steps is read by one of them.

    Raises:
        ConfigError: one cannot, or nothing would read it.
    """
    for path in args.timeline:
        check_timeline_file(path)
        refuse_existing("--timeline", path, force=args.force)
    if args.recipe is not None:
        check_output("--recipe", args.recipe, (".toml",))
        refuse_existing("--recipe", args.recipe, force=args.force)
    if args.report is not None:
        check_output("--report", args.report, (".html", ".htm"))
        refuse_existing("--report", args.report, force=args.force)
    jitter_of(args.jitter)
    check_seed(args)
    if (args.straggler or args.jitter) and not args.timeline and args.report is None:
        raise ConfigError("--straggler and --jitter disturb the step of --timeline or --report; name one of these")


def check_contents(question: Question, args: argparse.Namespace) -> None:
    """What is to stand in the files can: the slow ranks are there, and a recipe can say what is priced.

    Raises:
        ConfigError: it cannot.
    """
    for rank, factor in factors_of(args.straggler, question.num_gpus).items():
        if factor < 1:
            raise ConfigError(
                f"--straggler {rank}={factor:g} must be at least 1: the search decides whom a stage waits for; "
                "`moefold simulate` takes faster ranks of a recipe"
            )
    if args.recipe is not None:
        _check_recipe(question)


def can_write_recipe(question: Question) -> bool:
    """Return True if a recipe can say what is priced."""
    try:
        _check_recipe(question)
    except ConfigError:
        return False
    return True


def _check_recipe(question: Question) -> None:
    check_trainable(question.workload.precision, question.device)
    # Where cp is 1, ep neighbours are tp = etp apart in either form, and the recipe trains what was priced.
    method = question.restriction.method
    if not METHODS[method].folds_cp and question.restriction.fixed.get("cp") != 1:
        raise ConfigError(
            f"--method {method} with --recipe: it keeps ep neighbours tp*cp ranks apart, and a recipe folds them over "
            "cp, which trains another mapping than was priced; add --fix cp=1, where both are the same, or leave "
            "--recipe out"
        )


def write_files(planner: Planner, best: Plan, args: argparse.Namespace, argv: list[str]) -> None:
    """Write those that are asked for.

    Raises:
        ConfigError: one cannot be written.
    """
    for path in args.timeline:
        _write_timeline(planner, best, path, _disturbance(planner.config_of(best), args))
    if args.recipe is not None:
        _write_recipe(planner, best, args, argv)
    if args.report is not None:
        _write_report(planner, best, args, argv)


def tell_unwritten(args: argparse.Namespace, reason: str) -> None:
    """Say which files are not there, as there is no mapping for them."""
    for path in (*args.timeline, args.recipe, args.report):
        if path is not None:
            print_escaped(f"{path} is not written: {reason}", file=sys.stderr)


def _write_recipe(planner: Planner, best: Plan, args: argparse.Namespace, argv: list[str]) -> None:
    from moefold.plan.recipe import write_recipe

    cfg, comments = _trainable(planner, best, args)
    write_recipe(cfg, args.recipe, _remarks(best, argv, comments), comments)
    print_escaped(f"wrote {args.recipe}", file=sys.stderr)


def _remarks(best: Plan, argv: list[str], comments: dict[str, str]) -> list[str]:
    fill_in = ["Set what has a comment below, then: moefold train THIS_FILE"] if comments else []
    return [
        *fill_in,
        # A comment of TOML has no control characters.
        printable(f"Planned by: moefold plan {shlex.join(argv)}"),
        f"{name_of(best)}: predicted {best.time.total_s:.3g} s a step, MFU {best.time.mfu:.0%}, "
        f"{best.memory.total / 2**30:.1f} GiB on the fullest GPU.",
    ]


def _disturbance(cfg: Config, args: argparse.Namespace) -> Disturbance:
    return Disturbance(slow=stragglers_of(cfg, args.straggler), jitter=jitter_of(args.jitter), seed=args.seed or 0)


def _write_timeline(planner: Planner, best: Plan, path: Path, disturbance: Disturbance) -> None:
    write_timeline(simulate_mapping(planner.pricer_of(best), best.mapping, disturbance), path)
    print_escaped(f"wrote {path}", file=sys.stderr)


def _trainable(planner: Planner, best: Plan, args: argparse.Namespace) -> tuple[Config, dict[str, str]]:
    """Return the config of a mapping for its recipe, with comments on the keys that only the user knows, by name."""
    from moefold.plan.recipe import FILL_IN, with_run

    cfg = planner.config_of(best)
    cfg = replace(cfg, run=replace(cfg.run, device="auto"))
    if args.model.endswith(".toml"):
        return cfg, {}
    return with_run(cfg, planner.question.shape.name), FILL_IN


def _write_report(planner: Planner, best: Plan, args: argparse.Namespace, argv: list[str]) -> None:
    from moefold.plan.report import SHOWN, Source, Study, write_report

    q = planner.question
    study = Study(
        model=q.shape.name,
        gpu=q.device,
        num_gpus=q.num_gpus,
        workload=planner.pricer_of(best).workload,
        shape=q.shape,
        plans=planner.first(SHOWN),
        replan=lambda count: _best_on(planner, count),
        disturbance=_disturbance(planner.config_of(best), args),
        reserve_gib=q.reserve_gib,
        source=Source(
            command=f"moefold plan {shlex.join(argv)}",
            date=date.today().isoformat(),
            recipe=_recipe_of(planner, best, args, argv),
        ),
    )
    write_report(study, args.report)
    print_escaped(f"wrote {args.report}", file=sys.stderr)


def _recipe_of(planner: Planner, best: Plan, args: argparse.Namespace, argv: list[str]) -> str:
    """The recipe of a mapping as text; empty where it cannot say what was priced."""
    from moefold.plan.recipe import recipe_text

    if not can_write_recipe(planner.question):
        return ""
    cfg, comments = _trainable(planner, best, args)
    return recipe_text(cfg, _remarks(best, argv, comments), comments)


def _best_on(planner: Planner, num_gpus: int) -> Plan | None:
    try:
        return planner.on(num_gpus).best()
    except ConfigError:
        return None
