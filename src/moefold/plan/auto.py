"""`parallel = "auto"`: the planner fills in the mapping of a recipe before it trains. Torch-free."""

from dataclasses import replace
from typing import Literal, Protocol

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.plan.device import Device, load_device
from moefold.plan.legality import AXES
from moefold.plan.planner import Planner, Question, name_of
from moefold.plan.restriction import Restriction
from moefold.plan.search import Plan
from moefold.plan.shape import shape_of
from moefold.plan.workload import Workload

PROCESS_GIB = 0.5
"""A process with torch and gloo before it has a model."""


class Machine(Protocol):
    """Ranks and their device; see `launch.machine`."""

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Cpu or cuda."""
        ...

    @property
    def device(self) -> str:
        """Name of the planner's device."""
        ...

    @property
    def num_ranks(self) -> int:
        """Of the launcher, or of the machine."""
        ...

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started them."""
        ...

    @property
    def memory_gib(self) -> float:
        """Of all ranks; 0: what each device has."""
        ...


def plan_mapping(cfg: Config, given: frozenset[str], machine: Machine) -> tuple[Config, str]:
    """The recipe with the fastest mapping that fits, and what was chosen and why, in words.

    Args:
        cfg: a recipe with `parallel.mapping = "auto"`.
        given: the keys that the recipe sets; those of a mapping stay as they are.
        machine: where it is to train.

    Raises:
        ConfigError: nothing is legal, or nothing fits.
    """
    p = cfg.parallel
    fixed = {axis: getattr(getattr(cfg, s), key) for axis, (s, key) in AXES.items() if f"{s}.{key}" in given}
    if fixed.get("dispatcher") == "auto":
        del fixed["dispatcher"]
    says_ranks = "parallel.world_size" in given and not (p.elastic and machine.is_launched)
    base = replace(cfg, parallel=replace(p, mapping="given"), run=replace(cfg.run, device=machine.device_type))
    counts = [p.world_size] if says_ranks else [machine.num_ranks]
    if not says_ranks and not machine.is_launched:
        # Not all numbers of devices divide all models and batches.
        counts = list(range(machine.num_ranks, 0, -1))
    for num_ranks in counts:
        planner = Planner(_question(base, num_ranks, machine, fixed))
        if planner.space.folds or num_ranks == counts[-1]:
            break
    best = planner.best()
    planned = replace(planner.config_of(best), run=cfg.run)
    return planned, _words(planner, best)


def _question(base: Config, num_ranks: int, machine: Machine, fixed: dict[str, object]) -> Question:
    cfg = replace(base, parallel=replace(base.parallel, world_size=num_ranks))
    train = cfg.train
    return Question(
        base=cfg,
        shape=replace(shape_of(cfg.model), name=cfg.model.preset or "the model"),
        device=_device(machine, num_ranks),
        workload=Workload(
            seq_len=train.seq_len,
            global_batch_size=train.global_batch_size,
            capacity_factor=cfg.moe.capacity_factor,
            dispatch_precision=cfg.moe.dispatch_precision,
        ),
        restriction=Restriction(fixed),
    )


def _device(machine: Machine, num_ranks: int) -> Device:
    device = load_device(machine.device)
    if not machine.memory_gib:
        return device
    memory = machine.memory_gib / num_ranks - PROCESS_GIB
    if memory <= 0:
        raise ConfigError(
            f"parallel.world_size={num_ranks} leaves {machine.memory_gib / num_ranks:.2f} GiB for each process; "
            "choose fewer"
        )
    return replace(device, memory_gib=memory)


def _words(planner: Planner, best: Plan) -> str:
    q, lines = planner.question, []
    lines.append(
        f"parallel = auto: {name_of(best)} on {q.num_gpus} x {q.device.name}, of {planner.space.count():,} legal "
        f"mappings; predicted {best.time.total_s:.3g} s a step, bound by {best.binding}"
    )
    for plan in planner.first(3)[1:]:
        slower = plan.time.total_s / best.time.total_s - 1
        lines.append(f"  {slower:.1%} slower: {name_of(plan)}, bound by {plan.binding}")
    return "\n".join(lines)
