"""`parallel = "auto"`: the planner chooses the mapping of a recipe before training."""

from dataclasses import replace

from moefold.config.base.part import kind_or_part
from moefold.config.chosen import chosen
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.schema import Config
from moefold.config.sections.train import AUTO_RECOMPUTE
from moefold.cost.hardware import DetectedMachine, Device, load_device
from moefold.errors import ConfigError
from moefold.planner.cost_model.gemm import (
    BF16,
    PLANNER_NAMES,
    dtype_unsupported_reason,
    matrix_unit_unsupported_reason,
)
from moefold.planner.cost_model.workload import workload_from_config
from moefold.planner.memory.budget import RESERVE_FRACTION, default_reserve_gib
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.planner import Planner, PlanRequest, format_mapping, legal_context
from moefold.planner.search.constraints import AXIS_KEYS, Restriction
from moefold.planner.search.search import PlannedMapping

PROCESS_OVERHEAD_GIB = 0.5
"""Memory of a process with torch and gloo, without a model."""


def plan_mapping(cfg: Config, given: frozenset[str], machine: DetectedMachine) -> tuple[Config, str]:
    """Return the recipe with the fastest mapping that fits, and a description of the choice.

    Args:
        given: the keys that the recipe sets. Keys of a mapping among them are fixed.

    Raises:
        ConfigError: nothing is legal, or nothing fits.
    """
    p = cfg.parallel
    keys = {axis: key for axis, key in AXIS_KEYS.items() if ".".join(key) in given}
    fixed: dict[str, object] = {axis: kind_or_part(getattr(getattr(cfg, s), key)) for axis, (s, key) in keys.items()}
    if "dispatcher" in fixed and chosen(cfg, DispatcherPart).resolves_to:
        del fixed["dispatcher"]
    if AUTO_RECOMPUTE in cfg.train.recompute:
        raise ConfigError(
            f"train.recompute=['{AUTO_RECOMPUTE}'] and parallel='auto' both choose what to recompute; leave out "
            "train.recompute and train.memory_budget_gib, or name the parts, such as train.recompute=['norms']"
        )
    says_ranks = "parallel.world_size" in given and not (p.elastic and machine.is_launched)
    base = replace(cfg, parallel=replace(p, mapping="given"), run=replace(cfg.run, device=machine.device_type))
    counts = [p.world_size] if says_ranks else [machine.num_ranks]
    if not says_ranks and not machine.is_launched:
        # Fewer devices may divide a model and batch that all of them do not.
        counts = list(range(machine.num_ranks, 0, -1))
    planners = (Planner(_plan_request(base, num_ranks, machine, fixed)) for num_ranks in counts)
    legal = next((planner for planner in planners if planner.space.num_folds), None)
    # If nothing is legal, the error explains it for all devices.
    planner = legal or Planner(_plan_request(base, counts[0], machine, fixed))
    best = planner.best()
    planned = replace(planner.config_for(best), run=cfg.run)
    simulated = matrix_unit_unsupported_reason(cfg.run, PLANNER_NAMES[cfg.train.precision], planner.request.device)
    notes = []
    priced = planner.request.workload.gemm_precision
    if simulated:
        setting = f"train.precision={cfg.train.precision!r} is simulated, at the speed of float32 at best"
        notes.append(f"\n  priced in {priced}: {setting}, as {simulated}")
    if reason := dtype_unsupported_reason(cfg.run, planner.request.device):
        notes.append(f"\n  priced in {priced}: run.dtype={cfg.run.dtype!r} has no price, as {reason}")
    return planned, _describe(planner, best) + "".join(notes)


def _plan_request(base: Config, num_ranks: int, machine: DetectedMachine, fixed: dict[str, object]) -> PlanRequest:
    parallel = replace(base.parallel, world_size=num_ranks, context=legal_context(base.model, base.parallel))
    cfg = replace(base, parallel=parallel)
    train = cfg.train
    device = _device_with_memory(machine, num_ranks)
    precision = PLANNER_NAMES[train.precision]
    known = replace(cfg, run=replace(cfg.run, dtype="bfloat16")) if dtype_unsupported_reason(cfg.run, device) else cfg
    return PlanRequest(
        base_config=cfg,
        model_spec=replace(model_spec_from_config(cfg.model), name=cfg.model.preset or "the model"),
        device=device,
        # All mappings emulate the same GEMMs, or have the same dtype, so a supported precision ranks them. The
        # description reports it.
        workload=workload_from_config(
            known.run,
            known.moe,
            known.train,
            BF16 if matrix_unit_unsupported_reason(cfg.run, precision, device) else precision,
        ),
        restriction=Restriction(fixed),
        reserve_gib=default_reserve_gib(device),
    )


def _device_with_memory(machine: DetectedMachine, num_ranks: int) -> Device:
    device = load_device(machine.device)
    if not machine.memory_gib:
        return device
    memory = machine.memory_gib / num_ranks - PROCESS_OVERHEAD_GIB
    if memory <= 0:
        raise ConfigError(
            f"parallel.world_size={num_ranks} leaves {machine.memory_gib / num_ranks:.2f} GiB for each process; "
            "choose fewer"
        )
    return replace(device, memory_gib=memory)


def _describe(planner: Planner, best: PlannedMapping) -> str:
    q = planner.request
    lines = [
        f"parallel = auto: {format_mapping(best)} on {q.num_gpus} x {q.device.name}, of {planner.space.count():,} "
        f"legal mappings; predicted {best.time.total_s:.3g} s a step, bound by {best.bottleneck}; "
        f"{q.reserve_gib:.1f} of {q.device.memory_gib:.1f} GiB ({RESERVE_FRACTION:.0%}) are left free"
    ]
    for plan in planner.top_plans(3)[1:]:
        slower = plan.time.total_s / best.time.total_s - 1
        lines.append(f"  {slower:.1%} slower: {format_mapping(plan)}, bound by {plan.bottleneck}")
    return "\n".join(lines)
