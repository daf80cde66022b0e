"""`moefold plan`: rank all legal mappings of a model on some GPUs by predicted step time, with memory and reasons."""

import argparse
import atexit
import gc
import json
import sys
import time
from pathlib import Path

from moefold.cli.command_parser import CommandParser, add_part_option
from moefold.cli.plan_options import add_noise_options, request_from_args
from moefold.cli.plan_outputs import check_contents, check_output_paths, print_footer, write_outputs
from moefold.cli.plan_sites import add_site_options, print_site_plan, refuse_site_options
from moefold.cli.plan_table import print_breakdown, print_families, print_ranking, print_request
from moefold.cli.screen import open_console
from moefold.cost.hardware import device_names
from moefold.errors import ConfigError
from moefold.planner.cost_model.workload import PRECISIONS
from moefold.planner.lengths.distribution import histogram_names
from moefold.planner.mapping_families import FAMILIES, best_of_families, choose_family
from moefold.planner.memory.budget import RESERVE_FRACTION
from moefold.planner.plan_json import DEFAULT_MAPPINGS, result_as_dict
from moefold.planner.planner import Planner
from moefold.planner.search.constraints import FOLDED, METHODS
from moefold.progress import WorkProgress
from moefold.terminal import print_escaped

EPILOG = (
    """MODEL is a preset, a recipe.toml or the config.json (or folder) of a Hugging Face model. A recipe supplies the
batch, the number of GPUs and its other settings wherever no option is given. For a recipe of reinforcement learning,
the mapping of training is planned.
With --sites, the GPUs and the batch belong to one site.

For Mixtral 8x22B on 128 H100, arXiv:2504.14960 measured 4.3, 23.4 and 36.6 % MFU with its fsdp, fsdp+ep and tp+ep+dp:
their gathers were exposed, with mbs = 1. A plan has moefold's overlap and all axes, and predicts more.

methods, restrictions of the search named after the methods of arXiv:2504.14960:
"""
    + "\n".join(f"  {name:9} {method.summary}" for name, method in METHODS.items())
    + """

examples:
  moefold plan qwen3-235b-a22b --gpu h100 --num-gpus 64
  moefold plan mixtral-8x22b --gpu h100 --num-gpus 128 --seq-len 4096 --global-batch-size 256
  moefold plan mixtral-8x22b --gpu h100 --num-gpus 128 --seq-len 4096 --global-batch-size 256 --fix tp=2,ep=8
  moefold plan recipes/mixtral-8x7b.toml --gpu h100 --explain "tp=4 cp=1 pp=4 ep=8 etp=1 mbs=1"
  moefold plan recipes/mixtral-8x7b.toml --gpu h200 --num-gpus 64 --recipe planned.toml
  moefold plan recipes/mixtral-8x7b.toml train.optimizer=muon --gpu h100
  moefold plan recipes/mixtral-8x7b.toml --gpu h100 --sites 3 --site-link 1e8 --site-latency 0.08
  moefold plan mixtral-8x22b --gpu h100 --num-gpus 256 --seq-len 4096 --global-batch-size 4096 \\
      --compare-folding 4096 32768 131072
"""
)


def run(argv: list[str]) -> int:
    """Run `moefold plan` and return 1 if the mapping to explain is illegal or does not fit, else 0."""
    # A search makes half a million objects and few cycles: collections would take a tenth of its time, and the last one
    # at the exit of Python as much again.
    gc.disable()
    atexit.register(gc.freeze)
    try:
        return _answer(argv)
    finally:
        gc.enable()


def _answer(argv: list[str]) -> int:
    """Print and write what the options ask for, and return the exit status."""
    started = time.perf_counter()
    args = _parser().parse_intermixed_args(argv)
    _check_output(args)
    check_output_paths(args)
    request = request_from_args(args)
    check_contents(request, args)
    if request.base_config.is_rl:
        print_escaped("sampling is not priced, nor its memory", file=sys.stderr)
    if args.compare_folding is not None:
        from moefold.cli.plan_compare import compare_folding

        return compare_folding(request, args)
    if args.explain is not None:
        from moefold.cli.plan_explain import explain

        return explain(request, args, argv)
    # A plan takes seconds, with documents a minute, and a log file should hold only the answer.
    has_documents = args.lengths is not None
    with WorkProgress("plan", is_shown=has_documents or sys.stderr.isatty()) as progress:
        progress.report("listing the legal mappings")
        planner = Planner(request)
        balanced = ", with the attention of drawn documents balanced for each" if has_documents else ""
        progress.report(f"searching {planner.num_folds:,} foldings of attention and experts{balanced}")
        families = best_of_families(planner, (args.top or DEFAULT_MAPPINGS) if args.json else 0)
        chosen_family = choose_family(families, args.take)
        if chosen_family is None:
            if not families:
                raise ConfigError(planner.infeasible_reason())
            raise ConfigError(f"--take {args.take}: no such mapping is legal and fits; leave it out for the others")
    best = chosen_family.plan
    write_outputs(planner, best, args, argv)
    if args.json:
        print(json.dumps(result_as_dict(planner, args.top, families)))
    else:
        console = open_console()
        print_request(console, request)
        print_families(console, families, chosen_family, request.device)
        shown_plans = [family.plan for family in sorted(families, key=lambda family: family is not chosen_family)]
        if args.top is not None:
            shown_plans = planner.top_plans(args.top)
        if args.top is not None or args.wide:
            print_ranking(console, shown_plans, wide=args.wide)
        if args.breakdown:
            print_breakdown(console, shown_plans)
        if planner.site_plan is not None:
            print_site_plan(console, planner.site_plan)
        print_footer(console, planner, (best, *shown_plans), args, argv, time.perf_counter() - started)
    return 0


def _check_output(args: argparse.Namespace) -> None:
    for option in ("wide", "breakdown"):
        if getattr(args, option) and args.json:
            raise ConfigError(f"--{option} has no effect on --json, which has every number; leave --{option} out")
    if args.lengths is not None and args.compare_folding is not None:
        raise ConfigError(
            f"--lengths {args.lengths} has no effect on --compare-folding, which compares samples of one document; "
            "leave one of them out"
        )
    is_other_answer = args.explain is not None or args.compare_folding is not None
    if is_other_answer and args.take is not None:
        raise ConfigError(f"--take {args.take} chooses a family of a plan; leave it out, or use --fix")
    if is_other_answer:
        option = "--explain" if args.explain is not None else "--compare-folding"
        refuse_site_options(args, option)
    if args.breakdown and args.explain is not None:
        raise ConfigError("--breakdown has no effect on --explain, which always prints it; leave --breakdown out")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold plan",
        "Find the best mappings of a model on some GPUs by predicted step time: folded, coupled, ZeRO-3.",
        EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="preset, recipe.toml, or Hugging Face config.json")
    parser.settings("settings that override the recipe or the defaults")
    add("--gpu", required=True, metavar="NAME", help=f"{', '.join(device_names())}, or a FILE.toml")
    add("--num-gpus", type=int, metavar="N", help="GPUs in all")
    add("--seq-len", type=int, metavar="S", help="tokens per sample (default: the recipe's, 4096)")
    batch = "samples per step (default: the recipe's, or a power of two with up to 4M tokens)"
    add("--global-batch-size", type=int, metavar="B", help=batch)
    add("--precision", choices=PRECISIONS, help="number format of GEMMs (default: the recipe's, bf16)")
    add("--imbalance", type=float, default=1.0, metavar="X", help="routed tokens of the busiest ep rank over mean (1)")
    add("--capacity-factor", type=float, metavar="X", help="token dropping; 0 is dropless (default: the recipe's, 0)")
    help_ = f"memory of each GPU to leave free (default: {RESERVE_FRACTION:.0%}".replace("%", "%%") + " of it)"
    add("--memory-reserve", type=float, metavar="GIB", help=help_)
    add("--cuda-graphs", choices=("none", "partial", "full"), default="none", help="what is captured (none)")
    add("--flops", choices=("full", "causal"), default="full", help="attention in the FLOP count of the MFU (full)")
    add("--mtp-flops", choices=("with", "without"), help="multi-token prediction in that count (with)")
    add(
        "--method",
        choices=tuple(METHODS),
        default=FOLDED,
        metavar="NAME",
        help="a part of the search, see below (default folding: all of it)",
    )
    help_ = "the family to write and draw (default: of those within the error the nearest to a measurement)"
    add("--take", choices=tuple(FAMILIES), help=help_)
    add("--offload", action="store_true", help="search offload to host memory too, whose cost is unmeasured")
    add("--fix", action="extend", nargs="+", metavar="AXIS=VALUE", help="search only mappings with these: tp=2,ep=8")
    add("--explain", action="extend", nargs="+", metavar="AXIS=VALUE", help="explain one mapping, or why it cannot run")
    add("--trace", type=Path, metavar="RUN_DIR", help="plan for the recorded routing of a run (moe.trace_every)")
    help_ = f"lengths of the documents: {', '.join(histogram_names())}, a file, or a run's data"
    add("--lengths", metavar="NAME|FILE|RUN", help=help_)
    add_part_option(parser)
    help_ = "compare the best mapping with folding to the best without, at these sequence lengths (default: --seq-len)"
    add("--compare-folding", action="extend", nargs="*", type=int, metavar="S", help=help_)
    add(
        "--top",
        type=int,
        metavar="N",
        help="rank the best N folds too, or mappings of --json (10)",
    )
    add("--wide", action="store_true", help="all columns of the table")
    add("--breakdown", action="store_true", help="time and memory of each mapping by part")
    add("--json", action="store_true", help="print the best mappings as one JSON object")
    add("--recipe", type=Path, metavar="OUT.toml", help="write a recipe of mapping #1")
    help_ = "write the simulated step of the best mapping: .json trace, or .png, .svg, .pdf; repeatable"
    add("--timeline", action="append", type=Path, default=[], metavar="FILE", help=help_)
    add("--force", action="store_true", help="replace files that exist")
    add_noise_options(parser, "of the simulated step: ")
    add_site_options(parser)
    return parser
