"""The files of `moefold plan`: a recipe, a report and timelines of the best mapping, checked before the search."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from moefold.cli.disturbance import check_seed, factors_of, jitter_of, stragglers_of
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.output_file import check_output
from moefold.plan.planner import Planner, Question, name_of
from moefold.plan.precision import check_trainable
from moefold.plan.restriction import FOLDED
from moefold.plan.search import Plan
from moefold.plan.simulate import Disturbance
from moefold.plan.stage_work import simulate_mapping
from moefold.plan.timeline_file import check_timeline_file, write_timeline


def check_places(args: argparse.Namespace) -> None:
    """The files can be written, and what disturbs their steps is read by one of them.

    Raises:
        ConfigError: one cannot, or nothing would read it.
    """
    for path in args.timeline:
        check_timeline_file(path)
    if args.recipe is not None:
        check_output("--recipe", args.recipe, (".toml",))
    if args.report is not None:
        check_output("--report", args.report, (".html", ".htm"))
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
    if args.recipe is None:
        return
    check_trainable(question.workload.precision, question.device)
    # Where cp is 1, ep neighbours are tp = etp apart in either form, and the recipe trains what was priced.
    method = question.restriction.method
    if method != FOLDED and question.restriction.fixed.get("cp") != 1:
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
        _write_recipe(planner, best, args.recipe, argv)
    if args.report is not None:
        _write_report(planner, best, args.report, _disturbance(planner.config_of(best), args))


def tell_unwritten(args: argparse.Namespace, reason: str) -> None:
    """Say which files are not there, as there is no mapping for them."""
    for path in (*args.timeline, args.recipe, args.report):
        if path is not None:
            print(f"{path} is not written: {reason}", file=sys.stderr)


def _write_recipe(planner: Planner, best: Plan, path: Path, argv: list[str]) -> None:
    from moefold.plan.recipe import write_recipe

    remarks = [
        f"Planned by: moefold plan {' '.join(argv)}",
        f"{name_of(best)}: predicted {best.time.total_s:.3g} s a step, MFU {best.time.mfu:.1%}, "
        f"{best.memory.total / 2**30:.1f} GiB on the fullest GPU.",
    ]
    write_recipe(_trainable(planner.config_of(best)), path, remarks)
    print(f"wrote {path}", file=sys.stderr)


def _disturbance(cfg: Config, args: argparse.Namespace) -> Disturbance:
    return Disturbance(slow=stragglers_of(cfg, args.straggler), jitter=jitter_of(args.jitter), seed=args.seed or 0)


def _write_timeline(planner: Planner, best: Plan, path: Path, disturbance: Disturbance) -> None:
    write_timeline(simulate_mapping(planner.pricer_of(best), best.mapping, disturbance), path)
    print(f"wrote {path}", file=sys.stderr)


def _trainable(cfg: Config) -> Config:
    return replace(cfg, run=replace(cfg.run, device="auto"))


def _write_report(planner: Planner, best: Plan, path: Path, disturbance: Disturbance) -> None:
    from moefold.plan.report import SHOWN, Study, write_report

    q = planner.question
    study = Study(
        model=q.shape.name,
        gpu=q.device,
        num_gpus=q.num_gpus,
        workload=planner.pricer_of(best).workload,
        shape=q.shape,
        plans=planner.first(SHOWN),
        replan=lambda count: _best_on(planner, count),
        disturbance=disturbance,
    )
    write_report(study, path)
    print(f"wrote {path}", file=sys.stderr)


def _best_on(planner: Planner, num_gpus: int) -> Plan | None:
    try:
        return planner.on(num_gpus).best()
    except ConfigError:
        return None
