"""Outputs of `moefold plan`: recipe and timelines of the best mapping, and the footer below the table."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moefold.cli.plan_options import check_jitter_options, noise_of, parse_straggler_factors
from moefold.cli.plan_sites import describe_chosen, format_bytes
from moefold.cli.screen import HEAD_WIDTH, print_prose
from moefold.cli.timeline_file import check_timeline_file, write_timeline
from moefold.config.groups.context import ContextPart
from moefold.errors import ConfigError
from moefold.host.output_file import check_output_path, refuse_existing
from moefold.planner.cost_model.gemm import check_recipe_precision
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.samples import describe_cuts
from moefold.planner.mapping_families import STATED_ERROR
from moefold.planner.model_spec import ModelSpec, train_flops
from moefold.planner.planner import Planner, PlanRequest, format_mapping
from moefold.planner.search.constraints import METHODS
from moefold.planner.search.search import PlannedMapping
from moefold.planner.simulator.simulate import simulate_mapping
from moefold.planner.sites import with_site_settings
from moefold.terminal import print_escaped, printable


def check_output_paths(args: argparse.Namespace) -> None:
    """Check that the output files can be written, and that noise options have an output that uses them."""
    for path in args.timeline:
        check_timeline_file(path)
        refuse_existing("--timeline", path, force=args.force)
    if args.recipe is not None:
        check_output_path("--recipe", args.recipe, (".toml",))
        refuse_existing("--recipe", args.recipe, force=args.force)
    check_jitter_options(args)
    if (args.straggler or args.jitter) and not args.timeline:
        raise ConfigError("--straggler and --jitter disturb the step of --timeline; name a file with it")


def check_contents(request: PlanRequest, args: argparse.Namespace) -> None:
    """Check the contents of the output files: straggler ranks exist, and a recipe can express the plan."""
    for rank, factor in parse_straggler_factors(args.straggler, request.num_gpus).items():
        if factor < 1:
            raise ConfigError(
                f"--straggler {rank}={factor:g} must be at least 1: the search decides which ranks a stage waits for; "
                "`moefold simulate` takes faster ranks of a recipe"
            )
    if args.recipe is not None:
        _check_recipe(request)


def can_write_recipe(request: PlanRequest) -> bool:
    """Return whether a recipe can express the plan."""
    try:
        _check_recipe(request)
    except ConfigError:
        return False
    return True


def _check_recipe(request: PlanRequest) -> None:
    check_recipe_precision(request.workload.precision, request.device)
    # With cp = 1, ep neighbours are tp = etp ranks apart with and without folding, so the recipe trains the plan.
    method = request.restriction.method
    if not METHODS[method].ep_may_span_cp and request.restriction.fixed.get("cp") != 1:
        raise ConfigError(
            f"--method {method} with --recipe: it keeps ep neighbours tp*cp ranks apart, and a recipe folds them over "
            "cp, which trains another mapping than the planned one; add --fix cp=1, which makes both equal, or leave "
            "--recipe out"
        )


def write_outputs(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> None:
    """Write the output files that the options ask for."""
    if args.timeline:
        noise = noise_of(planner.config_for(best).parallel, args)
        timeline = simulate_mapping(planner.search_of(best).cost_model, best.mapping, noise)
        for path in args.timeline:
            write_timeline(timeline, path)
            print_escaped(f"wrote {path}", file=sys.stderr)
    if args.recipe is not None:
        from moefold.planner.export_recipe import write_recipe

        write_recipe(_recipe_text(planner, best, args, argv), args.recipe)
        print_escaped(f"wrote {args.recipe}", file=sys.stderr)


def report_unwritten(args: argparse.Namespace, reason: str) -> None:
    """Report the output files that are not written because there is no mapping for them."""
    for path in (*args.timeline, args.recipe):
        if path is not None:
            print_escaped(f"{path} is not written: {reason}", file=sys.stderr)


def _header_comments(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> list[str]:
    request = planner.request
    is_recipe = args.model.endswith(".toml")
    name = Path(args.model).stem if is_recipe else request.model_spec.name
    w = request.workload
    rate = w.global_batch_size * w.seq_len / best.time.total_s / request.num_gpus
    lines = [
        f"The planned mapping of {name} on {request.num_gpus} x {request.device.name}, for steps of "
        f"{w.global_batch_size} x {w.seq_len} tokens.",
        *([] if is_recipe else ["Set what has a comment below, then: moefold train THIS_FILE"]),
        f"Planned by: moefold plan {shlex.join(argv)}",
        f"{format_mapping(best)}: predicted {best.time.total_s:.3g} s a step, {rate:,.0f} tokens/s per GPU, "
        f"MFU {best.time.mfu:.0%}, {best.memory.total / 2**30:.1f} GiB on the fullest GPU.",
    ]
    if planner.site_plan is not None:
        cost = planner.site_plan.cost
        link = f"{format_bytes(cost.link.bytes_per_s)}/s and {cost.link.latency_s:g} s between {cost.count} sites"
        lines.append(f"{link}, {describe_chosen(planner.site_plan)}.")
    # TOML comments must not contain control characters.
    return [printable(line) for line in lines]


def _recipe_text(planner: Planner, best: PlannedMapping, args: argparse.Namespace, argv: list[str]) -> str:
    """Return the recipe of a mapping, with comments on the keys that only the user can set."""
    from moefold.planner.export_recipe import PLACEHOLDER_COMMENTS, render_recipe, with_run_defaults

    cfg = planner.config_for(best)
    cfg = replace(cfg, run=replace(cfg.run, device="auto"))
    comments = {}
    if not args.model.endswith(".toml"):
        cfg = with_run_defaults(cfg, planner.request.model_spec.name)
        comments = PLACEHOLDER_COMMENTS
    cfg = cfg if planner.site_plan is None else with_site_settings(cfg, planner.site_plan)
    return render_recipe(cfg, _header_comments(planner, best, args, argv), comments)


RECIPE_PATH = Path("planned.toml")
TIMELINE_PATH = Path("step.png")
ACCURACY_STATEMENT = (
    "by a cost model, never checked on a GPU by moefold. It is fitted on published measurements of other software: "
    f"{STATED_ERROR}"
)


def print_footer(
    console: Console,
    planner: Planner,
    shown_plans: Sequence[PlannedMapping],
    args: argparse.Namespace,
    argv: Sequence[str],
    seconds: float,
) -> None:
    """Print the best mapping, the assumptions, the accuracy of a prediction and the next command."""
    console.print()
    print_prose(console, "#1", format_mapping(shown_plans[0]))
    print_documents(console, planner, shown_plans[0])
    gap = planner.search.gap
    # The bounds of mappings outside the beam do not include memory and messages.
    below = f"up to {gap:.0%} below" if gap else "not below"
    print_prose(
        console,
        "searched",
        f"{planner.num_folds:,} legal folds (tp cp pp ep etp) by a beam, in {seconds:.1f} s; lower bounds of the time "
        f"of those outside it are {below} the best.",
    )
    print_prose(console, "assumed", f"{'; '.join(list_assumptions(planner.request, shown_plans))}.")
    print_prose(console, "predicted", ACCURACY_STATEMENT)
    unused_options = [option for option in ("--wide", "--breakdown") if option not in argv]
    if unused_options:
        print_prose(console, "more", f"{', '.join(unused_options)}, --help")
    # On one line, so that it can be copied.
    console.print(f"{'next:':{HEAD_WIDTH}}{_next_command(planner.request, args, argv)}", soft_wrap=True)


def print_documents(console: Console, planner: Planner, plan: PlannedMapping) -> None:
    """Print the lengths of the documents and how the ranks share their attention, or nothing without --lengths."""
    if plan.attention is None:
        return
    cost_model = planner.search_of(plan).cost_model
    loads = cost_model.workload.attention
    peers = cost_model.attention_peers(plan.mapping)
    assert loads is not None
    assert peers is not None
    print_prose(console, "attention", f"{describe_attention(plan.attention, loads.load(peers, 0).max_over_mean)}.")
    print_prose(console, "lengths", f"{describe_documents(loads)}.")


def describe_documents(loads: DocumentLoads) -> str:
    """Describe the document lengths of a plan: origin, effective length, and documents that are cut."""
    cuts = describe_cuts(loads.samples, loads.seq_len)
    text = (
        f"{loads.samples.name} ({loads.samples.source}); effective length {loads.effective_length:,.0f} of "
        f"{loads.seq_len:,} tokens"
    )
    return f"{text}; {cuts}" if cuts else text


def describe_attention(strategy: ContextPart, max_over_mean: float) -> str:
    """Describe how ranks share attention and how evenly, such as "planned attention (documents, balanced hosts)"."""
    how = f" ({strategy.plan.placement}, {strategy.plan.hosts} hosts)" if strategy.is_planned else ""
    return f"{strategy.kind} attention{how}; the busiest rank has {max_over_mean:.2f} times the mean work of a round"


def list_assumptions(request: PlanRequest, shown_plans: Sequence[PlannedMapping]) -> list[str]:
    """Describe the assumptions of a prediction."""
    q = request
    w = request.workload
    even = "balanced experts" if w.imbalance == 1 else f"an ep rank with {w.imbalance:g} times the mean load"
    assumptions = [f"{even} (--imbalance)", describe_margin(q.reserve_gib, q.device.memory_gib)]
    for part in dict.fromkeys(plan.mapping.dispatcher for plan in shown_plans):
        if part.kernel_package:
            assumptions.append(
                f"{part.kind} is installed; without it a run uses alltoall, which --fix dispatcher=alltoall plans for"
            )
    if q.restriction.offload:
        assumptions.append("offload is hidden almost completely, which is not measured (--offload)")
    return [*assumptions, f"{describe_flops(q.model_spec, w)}; MFU is against the bfloat16 peak"]


def describe_flops(model: ModelSpec, w: TrainingWorkload) -> str:
    """Describe the convention of the FLOP count, and the factor to the other convention."""
    full, half = (train_flops(model, w.seq_len, causal=causal) for causal in (False, True))
    words = f"TFLOP/s count {w.flop_description}"
    if w.counts_causal_attention:
        return f"{words}; all of it is x {full / half:.2f} here"
    return f"{words}; Megatron-Bridge counts half: x {half / full:.2f} here"


def describe_margin(reserve_gib: float, memory_gib: float) -> str:
    """Describe the memory that is left free."""
    if not reserve_gib:
        return f"all {memory_gib:.1f} GiB of a GPU may be used (--memory-reserve)"
    share = reserve_gib / memory_gib
    return f"{reserve_gib:.1f} of {memory_gib:.1f} GiB of a GPU ({share:.0%}) stay free (--memory-reserve)"


def _next_command(request: PlanRequest, args: argparse.Namespace, argv: Sequence[str]) -> str:
    """Return the command to run next: train the written recipe, or write a recipe (else a picture)."""
    if args.recipe is not None:
        command = f"moefold train {shlex.quote(str(args.recipe))}"
        return command if request.site_link is None else f"{command} sites.number=0 sites.meet=HOST:PORT"
    output = f"--recipe {RECIPE_PATH}" if can_write_recipe(request) else f"--timeline {TIMELINE_PATH}"
    words = [word for word in argv if word not in ("--wide", "--breakdown")]
    return f"moefold plan {shlex.join(words)} {output}"
