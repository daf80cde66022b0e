"""`moefold plan`: build the request from the options, and the result as a dict."""

import argparse
from dataclasses import replace
from typing import Any

from moefold.cli.noise_options import check_imbalance
from moefold.cli.plan_table import parse_axes
from moefold.config.limits import MAX_BY_KEY, check_at_most
from moefold.config.schema import ModelConfig
from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.planner.cost_model.gemm import resolve_precision
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.memory.budget import default_reserve_gib
from moefold.planner.planner import MAX_GPUS, Planner, PlanRequest, read_model
from moefold.planner.search.constraints import Restriction
from moefold.planner.search.search import PlannedMapping


def request_from_args(args: argparse.Namespace) -> PlanRequest:
    """Build the plan request from the options.

    Raises:
        ConfigError: an option is wrong or missing.
    """
    device = load_device(args.gpu)
    base, shape = read_model(args.model)
    is_recipe = args.model.endswith(".toml")
    p = base.parallel
    train = base.train
    num_gpus = _resolve_number("--num-gpus", args.num_gpus, p.world_size, MAX_GPUS, is_recipe=is_recipe)
    seq_len = _resolve_number(
        "--seq-len", args.seq_len, train.seq_len, MAX_BY_KEY["train.seq_len"], is_recipe=is_recipe
    )
    max_batch = MAX_BY_KEY["train.global_batch_size"]
    batch = _resolve_number(
        "--global-batch-size", args.global_batch_size, train.global_batch_size, max_batch, is_recipe=is_recipe
    )
    reserve = default_reserve_gib(device) if args.memory_reserve is None else args.memory_reserve
    if not 0 <= reserve < device.memory_gib:
        raise ConfigError(
            f"--memory-reserve {reserve:g} must be at least 0 and below {device.memory_gib:g}, the GiB of {device.name}"
        )
    if args.top is not None and args.top < 1:
        raise ConfigError(f"--top {args.top} must be at least 1")
    check_imbalance(args.imbalance, base.model.num_experts)
    factor = base.moe.capacity_factor if args.capacity_factor is None else args.capacity_factor
    fixed = parse_axes(args.fix, "--fix") if args.fix else {}
    base_with_precision, precision = resolve_precision(base, args.precision, device)
    cfg = replace(
        base_with_precision,
        run=replace(base.run, device="cpu" if device.name == "cpu" else "cuda"),
        moe=replace(base.moe, capacity_factor=factor),
        parallel=replace(p, world_size=num_gpus, mapping="given"),
        train=replace(base_with_precision.train, seq_len=seq_len, global_batch_size=batch),
    )
    return PlanRequest(
        base_config=cfg,
        model_spec=shape,
        device=device,
        workload=workload_from_config(
            cfg,
            precision,
            imbalance=args.imbalance,
            cuda_graphs=args.cuda_graphs,
            counts_causal_attention=args.flops == "causal",
            counts_mtp=_counts_mtp(args.mtp_flops, base.model),
        ),
        restriction=Restriction(fixed, args.method),
        reserve_gib=reserve,
    )


def make_planner(request: PlanRequest, args: argparse.Namespace) -> Planner:
    """Create the planner, with the recorded routing of --trace if it is given."""
    if args.trace is None:
        return Planner(request)
    from moefold.planner.cost_model.workload import RecordedRouting
    from moefold.planner.planner import TracedPlanner

    return TracedPlanner(request, RecordedRouting(args.trace, request.base_config.model))


def result_as_dict(planner: Planner, count: int | None = None) -> dict[str, Any]:
    """Return the result in the form of `moefold plan --json`: the best mapping of each fold, best first.

    Args:
        planner: the planner that searched.
        count: number of folds to return; None returns all.
    """
    q = planner.request
    return {
        "model": q.model_spec.name,
        "gpu": q.device.name,
        "gpu_memory_gib": q.device.memory_gib,
        "memory_reserve_gib": q.reserve_gib,
        "num_gpus": q.num_gpus,
        "seq_len": q.workload.seq_len,
        "global_batch_size": q.workload.global_batch_size,
        "precision": q.workload.gemm_precision,
        "imbalance": q.workload.imbalance,
        "method": q.restriction.method,
        "flop_convention": "causal" if q.workload.counts_causal_attention else "full",
        "mtp_flops": "with" if q.workload.counts_mtp else "without",
        "num_legal": planner.space.count(),
        "num_folds": planner.num_folds,
        "mappings": [plan_as_dict(plan) for plan in (planner.plans if count is None else planner.top_plans(count))],
    }


def plan_as_dict(plan: PlannedMapping) -> dict[str, Any]:
    """Return one mapping with its predicted time and memory, ready for JSON."""
    gib = 2**30
    time_of = plan.time
    return plan.mapping.as_dict() | {
        "step_time_s": time_of.total_s,
        "mfu": time_of.mfu,
        "tflops_per_gpu": time_of.tflops_per_gpu,
        "tokens_per_s_per_gpu": time_of.tokens_per_s_per_gpu,
        "num_micro_batches": time_of.num_micro_batches,
        "memory_gib": plan.memory.total / gib,
        "memory_parts_gib": {part: size / gib for part, size in plan.memory_parts.items()},
        "time_parts_s": time_of.parts,
        "binding": plan.bottleneck,
        "fits": plan.memory.fits,
    }


def _resolve_number(option: str, given: int | None, recipe_value: int, maximum: int, *, is_recipe: bool) -> int:
    if given is None and not is_recipe:
        raise ConfigError(f"{option} is missing; set it, or give a recipe as MODEL, which supplies it")
    number = recipe_value if given is None else given
    if number < 1:
        raise ConfigError(f"{option} {number} must be at least 1")
    check_at_most(option, number, maximum)
    return number


def _counts_mtp(given: str | None, model: ModelConfig) -> bool:
    if given is not None and not model.mtp_layers:
        raise ConfigError(
            f"--mtp-flops {given} has no effect: model.mtp_layers=0 turns multi-token prediction off; leave it out"
        )
    return given != "without"
