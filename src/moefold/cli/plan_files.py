"""The files of `moefold plan`: a recipe, a report and timelines of the best mapping, checked before the search."""

import argparse
import shlex
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

from moefold.cli.disturbance import check_jitter, check_seed, parse_straggler_factors, parse_stragglers
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.output_file import check_output_path, reject_existing
from moefold.plan.planner import Planner, PlanRequest, format_mapping
from moefold.plan.precision import check_recipe_precision
from moefold.plan.restriction import METHODS
from moefold.plan.search import PlannedMapping
from moefold.plan.simulate import Noise
from moefold.plan.stage_work import simulate_mapping
from moefold.plan.timeline_file import check_timeline_file, write_timeline
from moefold.printable import print_escaped, printable


def check_output_paths(args: argparse.Namespace) -> None:
    """The files can be written, and what disturbs their steps is read by one of them.

    Raises:
        ConfigError: one cannot, or nothing would read it.
    """
    for path in args.timeline:
        check_timeline_file(path)
        reject_existing("--timeline", path, force=args.force)
    if args.recipe is not None:
        check_output_path("--recipe", args.recipe, (".toml",))
        reject_existing("--recipe", args.recipe, force=args.force)
    if args.report is not None:
        check_output_path("--report", args.report, (".html", ".htm"))
        reject_existing("--report", args.report, force=args.force)
    check_jitter(args.jitter)
    check_seed(args)
    if (args.straggler or args.jitter) and not args.timeline and args.report is None:
        raise ConfigError("--straggler and --jitter disturb the step of --timeline or --report; name one of these")


def check_contents(request: PlanRequest, args: argparse.Namespace) -> None:
    """What is to stand in the files can: the slow ranks are there, and a recipe can say what is priced.

    Raises:
        ConfigError: it cannot.
    """
    for rank, factor in parse_straggler_factors(args.straggler, request.num_gpus).items():
        if factor < 1:
            raise ConfigError(
                f"--straggler {rank}={factor:g} must be at least 1: the search decides whom a stage waits for; "
                "`moefold simulate` takes faster ranks of a recipe"
            )
    if args.recipe is not None:
        _check_recipe(request)


def can_write_recipe(request: PlanRequest) -> bool:
    """Return True if a recipe can say what is priced."""
    try:
        _check_recipe(request)
    except ConfigError:
        return False
    return True


def _check_recipe(request: PlanRequest) -> None:
    check_recipe_precision(request.workload.precision, request.device)
    # Where cp is 1, ep neighbours are tp = etp apart in either form, and the recipe trains what was priced.
    method = request.restriction.method
    if not METHODS[method].ep_may_span_cp and request.restriction.fixed.get("cp") != 1:
        raise ConfigError(
            f"--method {method} with --recipe: it keeps ep neighbours tp*cp ranks apart, and a recipe folds them over "
            "cp, which trains another mapping than was priced; add --fix cp=1, where both are the same, or leave "
            "--recipe out"
        )


def write_outputs(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> None:
    """Write those that are asked for.

    Raises:
        ConfigError: one cannot be written.
    """
    for path in args.timeline:
        _write_timeline(planner, best, path, _noise(planner.config_for(best), args))
    if args.recipe is not None:
        _write_recipe(planner, best, args, argv)
    if args.report is not None:
        _write_report(planner, best, args, argv)


def report_unwritten(args: argparse.Namespace, reason: str) -> None:
    """Say which files are not there, as there is no mapping for them."""
    for path in (*args.timeline, args.recipe, args.report):
        if path is not None:
            print_escaped(f"{path} is not written: {reason}", file=sys.stderr)


def _write_recipe(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> None:
    from moefold.plan.recipe import write_recipe

    cfg, comments = _trainable_config(planner, best, args)
    write_recipe(cfg, args.recipe, _header_comments(best, argv, comments), comments)
    print_escaped(f"wrote {args.recipe}", file=sys.stderr)


def _header_comments(best: PlannedMapping, argv: list[str], comments: dict[str, str]) -> list[str]:
    fill_in = ["Set what has a comment below, then: moefold train THIS_FILE"] if comments else []
    return [
        *fill_in,
        # A comment of TOML has no control characters.
        printable(f"Planned by: moefold plan {shlex.join(argv)}"),
        f"{format_mapping(best)}: predicted {best.time.total_s:.3g} s a step, MFU {best.time.mfu:.0%}, "
        f"{best.memory.total / 2**30:.1f} GiB on the fullest GPU.",
    ]


def _noise(cfg: Config, args: argparse.Namespace) -> Noise:
    return Noise(
        slowdown_by_rank=parse_stragglers(cfg, args.straggler), jitter=check_jitter(args.jitter), seed=args.seed or 0
    )


def _write_timeline(planner: Planner, best: PlannedMapping, path: Path, noise: Noise) -> None:
    write_timeline(simulate_mapping(planner.cost_model_for(best), best.mapping, noise), path)
    print_escaped(f"wrote {path}", file=sys.stderr)


def _trainable_config(
    planner: Planner, best: PlannedMapping, args: argparse.Namespace
) -> tuple[Config, dict[str, str]]:
    """Return the config of a mapping for its recipe, with comments on the keys that only the user knows, by name."""
    from moefold.plan.recipe import PLACEHOLDER_COMMENTS, with_run_defaults

    cfg = planner.config_for(best)
    cfg = replace(cfg, run=replace(cfg.run, device="auto"))
    if args.model.endswith(".toml"):
        return cfg, {}
    return with_run_defaults(cfg, planner.request.model_spec.name), PLACEHOLDER_COMMENTS


def _write_report(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> None:
    from moefold.plan.report import MAX_SHOWN_PLANS, PlanReport, ReportSource, write_report

    q = planner.request
    study = PlanReport(
        model=q.model_spec.name,
        gpu=q.device,
        num_gpus=q.num_gpus,
        workload=planner.cost_model_for(best).workload,
        model_spec=q.model_spec,
        plans=planner.top_plans(MAX_SHOWN_PLANS),
        replan=lambda count: _best_plan(planner, count),
        noise=_noise(planner.config_for(best), args),
        reserve_gib=q.reserve_gib,
        source=ReportSource(
            command=f"moefold plan {shlex.join(argv)}",
            date=date.today().isoformat(),
            recipe=_recipe_text(planner, best, args, argv),
        ),
    )
    write_report(study, args.report)
    print_escaped(f"wrote {args.report}", file=sys.stderr)


def _recipe_text(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> str:
    """The recipe of a mapping as text; empty where it cannot say what was priced."""
    from moefold.plan.recipe import render_recipe

    if not can_write_recipe(planner.request):
        return ""
    cfg, comments = _trainable_config(planner, best, args)
    return render_recipe(cfg, _header_comments(best, argv, comments), comments)


def _best_plan(planner: Planner, num_gpus: int) -> PlannedMapping | None:
    try:
        return planner.with_num_gpus(num_gpus).best()
    except ConfigError:
        return None
