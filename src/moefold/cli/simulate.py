"""`moefold simulate`: simulate one step of a recipe without its GPUs, as numbers, a trace or a picture."""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from moefold.cli.command_parser import CommandParser, add_part_option
from moefold.cli.plan_options import add_noise_options, noise_of
from moefold.cli.plan_outputs import describe_attention, describe_documents
from moefold.cli.plan_sites import add_site_options, describe_rate
from moefold.cli.screen import numbers, open_console, print_columns
from moefold.cli.timeline_file import check_timeline_file, format_summary, write_timeline
from moefold.config.chosen import chosen
from moefold.config.groups.schedule import SchedulePart
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import AUTO_RECOMPUTE, TrainConfig
from moefold.convert.run_config import config_of_run
from moefold.cost.auto_recompute import DEFAULT_MEMORY_FRACTION, choose_recompute, with_recompute
from moefold.cost.hardware import Device, device_names, load_device
from moefold.cost.saved_tensors import KERNEL_PROFILES
from moefold.cost.stage_balance import plan_stages
from moefold.errors import ConfigError
from moefold.host.output_file import refuse_existing
from moefold.metrics.reader import read_steps
from moefold.planner.cost_model.gemm import resolve_precision
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import PRECISIONS, workload_from_config
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.distribution import histogram_names
from moefold.planner.mapping import mapping_from_config
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.plan_json import documents_as_dict
from moefold.planner.plan_request import check_imbalance, check_priced_stage, document_loads
from moefold.planner.simulator.simulate import Noise, chunks_of_stages, simulate_mapping
from moefold.planner.simulator.timeline import Timeline
from moefold.planner.sites import SitePlan, plan_sites, resolve_sites
from moefold.recipe import load_config
from moefold.terminal import print_escaped
from moefold.units import GIB
from moefold.validate.config import check_config
from moefold.validate.memory_savings import check_memory_device

EPILOG = """examples:
  moefold simulate recipes/mixtral-8x7b.toml --gpu h100
  moefold simulate RECIPE.toml parallel.schedule=zbv parallel.virtual_stages=2 --timeline step.json --timeline step.png
  moefold simulate RECIPE.toml --sites 3 --site-link 1e8 --site-latency 0.08
  moefold simulate RECIPE.toml --straggler 17=1.3 --jitter 0.05 --seed 1
  moefold simulate --run runs/quickstart --gpu this-machine.toml

Open step.json in ui.perfetto.dev or chrome://tracing. A straggler computes FACTOR times as long as the other ranks.
"""

WARMUP_STEPS = 5
"""Number of first steps of a run that are not compared: they compile kernels and allocate buffers."""


def run(argv: list[str]) -> int:
    """Simulate one step and print the result."""
    args = _parser().parse_intermixed_args(argv)
    if bool(args.words) == bool(args.run):
        raise ConfigError("name a RECIPE.toml, or --run RUN_DIR, whose recipe is simulated; one of the two")
    cfg = config_of_run("--run", args.run) if args.run else load_config(Path(args.words[0]), args.words[1:])
    measured = _measured_steps(args.run) if args.run else []
    if args.overlap:
        cfg = replace(cfg, parallel=replace(cfg.parallel, overlap_experts=True))
    device = load_device(args.gpu)
    cfg, site_link = resolve_sites(cfg, device, args.sites, args.site_link, args.site_latency)
    # A run of an earlier version may have settings that training refuses now.
    check_config(cfg, is_training=not args.run)
    check_priced_stage(cfg.model, cfg.train, cfg.lora)
    for path in args.timeline:
        check_timeline_file(path)
        refuse_existing("--timeline", path, force=args.force)
    if cfg.is_rl:
        _report_sampling(cfg.rl, args)
    check_imbalance(args.imbalance, cfg.model.ffn.moe.num_experts)
    noise = noise_of(cfg.parallel, args)
    cfg = _with_recompute(cfg, device)
    loads = document_loads(args.lengths, cfg.parallel, cfg.train, cfg.data, cfg.rl)
    timeline = _simulate(cfg, device, args, noise, loads)
    sites = None if site_link is None else plan_sites(cfg, site_link, timeline.total_s)
    for path in args.timeline:
        write_timeline(timeline, path)
        print_escaped(f"wrote {path}", file=sys.stderr)
    if args.json:
        report = timeline_as_dict(timeline)
        if sites is not None:
            report["sites"] = sites.as_dict()
        if loads is not None:
            report |= documents_as_dict(loads) | {"attention_max_over_mean": _balance(cfg.parallel, cfg.train, loads)}
        if measured:
            report["measured"] = {"step_time_s": statistics.median(measured), "steps": len(measured)}
        print(json.dumps(report))
    else:
        _print(timeline)
        if loads is not None:
            print_escaped(f"attention: {describe_attention(loads.strategy, _balance(cfg.parallel, cfg.train, loads))}")
            print_escaped(f"lengths: {describe_documents(loads)}")
        if sites is not None:
            print_escaped(_describe_sites(sites))
        if measured:
            median_s = statistics.median(measured)
            print_escaped(
                f"measured: {median_s:.4g} s, the median of {len(measured)} steps of {args.run}; "
                f"simulated / measured {timeline.total_s / median_s:.2f}"
            )
    return 0


def _report_sampling(rl: RLConfig, args: argparse.Namespace) -> None:
    """Report that a step of reinforcement learning is simulated without its rollouts."""
    if args.run:
        raise ConfigError(
            f"--run {args.run} has rl.group_size={rl.group_size}: its steps have sampling, which is not simulated; "
            "name a RECIPE.toml, whose training step is simulated alone"
        )
    print_escaped("sampling is not simulated: this is the training step of a full batch", file=sys.stderr)


def _measured_steps(run_dir: Path) -> list[float]:
    """Return the seconds of each step of a run after the first `WARMUP_STEPS`."""
    seconds = [record["step_time_s"] for record in read_steps(run_dir) if record.get("step_time_s")][WARMUP_STEPS:]
    if not seconds:
        raise ConfigError(f"--run {run_dir} has no more than {WARMUP_STEPS} steps to compare with; train there longer")
    return seconds


def timeline_as_dict(timeline: Timeline) -> dict[str, object]:
    """Return the step in the form that `--json` prints."""
    return {
        "step_time_s": timeline.total_s,
        "pipeline_s": timeline.span_s,
        "bubble": timeline.bubble,
        "idle_share": timeline.idle_share,
        "ranks": [
            {"pp_rank": rank, "in_flight": timeline.max_in_flight(rank)}
            | {name: getattr(timeline, name)(rank) for name in ("work_s", "idle_s", "exposed_s")}
            for rank in range(timeline.num_ranks)
        ],
    }


def _with_recompute(cfg: Config, device: Device) -> Config:
    """Resolve train.recompute "auto" for the device, as the trainer does."""
    if AUTO_RECOMPUTE not in cfg.train.recompute:
        return cfg
    kind = "cpu" if device.name == "cpu" else "cuda"
    check_memory_device(cfg, kind)
    budget = round(cfg.train.memory_budget_gib * GIB) or round(DEFAULT_MEMORY_FRACTION * device.memory_bytes)
    choice = choose_recompute(cfg, budget, KERNEL_PROFILES[kind])
    print_escaped(choice.describe(budget), file=sys.stderr)
    return with_recompute(cfg, choice.parts)


def _describe_sites(plan: SitePlan) -> str:
    """Describe the micro-batch sets of the recipe's settings."""
    rate = plan.recipe
    return (
        f"{plan.cost.count} sites, {describe_rate(plan, rate)}; an exchange takes up to {max(rate.exchanges_s):.4g} "
        f"s, and {rate.exposed_s:.4g} s of each {rate.settings.every} steps are not training"
    )


def _balance(parallel: ParallelConfig, train: TrainConfig, loads: DocumentLoads) -> float:
    """Return the attention work of the busiest rank of a round over the mean."""
    return loads.sets(parallel.cp, parallel.dp, train.micro_batch_size).max_over_mean


def _simulate(
    cfg: Config, device: Device, args: argparse.Namespace, noise: Noise, loads: DocumentLoads | None
) -> Timeline:
    shape = model_spec_from_config(cfg.model)
    cfg, precision = resolve_precision(cfg, args.precision, device)
    workload = workload_from_config(cfg.run, cfg.moe, cfg.train, precision, imbalance=args.imbalance, attention=loads)
    cost_model = CostModel(shape, device, workload)
    return simulate_mapping(
        cost_model,
        mapping_from_config(cfg.parallel, cfg.train),
        noise,
        chunks=chunks_of_stages(plan_stages(cfg), shape),
        schedule=chosen(cfg, SchedulePart),
    )


def _print(timeline: Timeline) -> None:
    console = open_console()
    console.print(format_summary(timeline))
    ranks = range(timeline.num_ranks)
    seconds = {"work, s": timeline.work_s, "idle, s": timeline.idle_s, "exposed, s": timeline.exposed_s}
    columns = [
        numbers("pp rank", [str(rank) for rank in ranks]),
        *(numbers(name, [f"{of_rank(rank):.4g}" for rank in ranks]) for name, of_rank in seconds.items()),
        numbers("in flight", [str(timeline.max_in_flight(rank)) for rank in ranks]),
    ]
    print_columns(console, columns)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("moefold simulate", "Simulate one step of a recipe, on GPUs that need not exist.", EPILOG)
    parser.settings("a recipe, then overrides", "RECIPE.toml | section.key=value", "words")
    parser.option("--run", Path, "RUN_DIR", "simulate the recipe of this run and compare with its step time")
    parser.option("--gpu", "h100", None, f"{', '.join(device_names())}, or FILE.toml (default h100)")
    parser.option("--precision", str, None, "number format of GEMMs (default: the recipe's)", choices=PRECISIONS)
    parser.option("--imbalance", 1.0, "X", "busiest ep rank over the mean (default 1)")
    parser.flag("--overlap", "overlap the experts' all-to-all with the compute of another micro-batch")
    help_ = f"lengths of the documents: {', '.join(histogram_names())}, a file, or a run's data"
    parser.option("--lengths", str, "NAME|FILE|RUN", help_)
    add_noise_options(parser)
    add_site_options(parser)
    parser.repeated("--timeline", "FILE", ".json trace or .png, .svg, .pdf", Path)
    parser.flag("--force", "replace files that exist")
    parser.flag("--json", "print the numbers as one JSON object")
    add_part_option(parser)
    return parser
