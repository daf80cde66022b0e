"""Memory check before a run: a step is refused if its minimum memory by formula exceeds the machine's memory.

States are exact to the byte. Activations are within a quarter of measurements, so three quarters of them are certain.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from moefold.config.chosen import chosen
from moefold.config.groups.schedule import SchedulePart
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import AUTO_RECOMPUTE, TrainConfig
from moefold.cost.flops import count_parameters
from moefold.cost.kv_cache import CACHE_PART, cache_sizes, min_rollout_cache_bytes
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.cost.saved_tensors import KERNEL_PROFILES, BytesByPart
from moefold.cost.stage_balance import plan_stages
from moefold.cost.state_bytes import StateBytes, compute_dtype_bytes, unit_names, unit_weights
from moefold.errors import ConfigError
from moefold.host.memory import AvailableMemory
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
from moefold.units import GIB, format_bytes
from moefold.validate.config import check_config

CERTAIN_FRACTION = 0.75
"""Fraction of the estimated activations that is certainly needed."""
MIN_PROCESS_BYTES = GIB // 10
"""Minimum memory of a CPU rank in addition to its tensors: pages not shared with other processes."""
MAX_ACTIONS = 50_000
"""Maximum number of simulated schedule actions. For longer schedules only states are counted."""
STEADY_MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage after which the number in flight no longer grows."""
MAX_LISTED_PARTS = 4
SNAPSHOT_PART = "peer snapshots"
DISABLING_SETTING = "run.check_memory=false"


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Ranks of one machine and its memory."""

    device_type: str
    """"cpu": the ranks share the memory. "cuda": each rank has its own."""
    pp_ranks: tuple[int, ...]
    """Pipeline rank of each rank of the machine."""
    available: AvailableMemory
    """Memory of all ranks together on a CPU, or of the smallest GPU."""
    process_limit: AvailableMemory | None = None
    """Memory limit of one process, if there is one."""


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """Missing memory: more is needed than available."""

    needed: int
    available: AvailableMemory
    parts: BytesByPart
    """Needed bytes by part."""
    subject: str


def min_training_memory(cfg: Config, device_type: str) -> tuple[BytesByPart, ...]:
    """Return the minimum memory of a rank of each pipeline stage in a training step of a checked recipe."""
    steps = _step_memory(cfg, device_type)
    if device_type == "cpu" and cfg.checkpoint.peer_every:
        from moefold.cost.peer_snapshot_memory import snapshot_bytes

        # With another placement they are not in the memory of the step.
        for parts, size in zip(steps, snapshot_bytes(cfg), strict=True):
            if size:
                parts[SNAPSHOT_PART] = size
    if not cfg.is_rl:
        return steps
    # Only a recipe with rollouts needs the sizes of their models.
    from moefold.cost.rollout_memory import further_weights, min_sampling_memory

    if cfg.rollout.ranks:
        return tuple(step + further for step, further in zip(steps, further_weights(cfg), strict=True))
    # A step and sampling alternate.
    return tuple(
        max(step, sampling, key=BytesByPart.total) + further
        for step, sampling, further in zip(
            steps, min_sampling_memory(cfg, device_type), further_weights(cfg), strict=True
        )
    )


def _step_memory(cfg: Config, device_type: str) -> tuple[BytesByPart, ...]:
    """Return the minimum memory of a rank of each pipeline stage, without a second model for sampling."""
    shortened = _with_fewer_micro_batches(cfg)
    p = shortened.parallel
    if p.pp * p.virtual_stages * shortened.num_micro_batches > MAX_ACTIONS:
        memory = RankStateMemory(shortened, KERNEL_PROFILES[device_type])
        return tuple(
            _state_bytes(states, moments.offloaded)
            for states, moments in zip(memory.max_by_pp_rank, memory.offloaded_moments, strict=True)
        )
    # "auto" needs at least the memory of recomputing whole layers.
    recompute = ("layer",) if AUTO_RECOMPUTE in cfg.train.recompute else None
    ranks = compute_rank_memory(shortened, recompute=recompute, kernels=KERNEL_PROFILES[device_type])
    return tuple(_rank_bytes(cfg.train, rank) for rank in ranks)


def inference_weight_memory(cfg: Config) -> tuple[BytesByPart, ...]:
    """Return the weight bytes of a rank of each pipeline stage in inference with a checked config."""
    p = cfg.parallel
    sizes = [0] * p.pp
    for stage in plan_stages(cfg).stages:
        for name in unit_names(cfg.model, stage):
            shards = (weight.shard(p.tp, p.ep, p.etp) for weight in unit_weights(cfg.model, cfg.lora, name))
            sizes[stage.pp_rank] += compute_dtype_bytes(cfg.run) * sum(weight.numel for weight in shards)
    return tuple(BytesByPart(weights=size) for size in sizes)


def find_shortage(required: tuple[BytesByPart, ...], host: HostCapacity) -> MemoryShortage | None:
    """Return what the ranks of a machine lack, given the minimum of each pipeline stage, or None if they may fit."""
    largest = max((required[rank] for rank in host.pp_ranks), key=BytesByPart.total)
    count = len(host.pp_ranks)
    if host.device_type == "cuda":
        candidates = [MemoryShortage(largest.total(), host.available, largest, "the fullest rank needs")]
    else:
        total = BytesByPart()
        for pp_rank, num_ranks in Counter(host.pp_ranks).items():
            for part, size in required[pp_rank].items():
                total[part] += num_ranks * size
        total["processes"] = count * MIN_PROCESS_BYTES
        ranks = f"the {count} ranks of this machine need" if count > 1 else "the rank needs"
        candidates = [MemoryShortage(total.total(), host.available, total, ranks)]
        if host.process_limit is not None:
            candidates.append(MemoryShortage(largest.total(), host.process_limit, largest, "one process needs"))
    return next((short for short in candidates if short.needed > short.available.size), None)


def check_training_fits(cfg: Config, host: HostCapacity) -> None:
    """Check that a training step fits into the machine's memory.

    Raises:
        ConfigError: it does not fit. The message names the parts and the changes that would help.
    """
    if not cfg.run.check_memory:
        return
    if (short := find_shortage(min_training_memory(cfg, host.device_type), host)) is not None:
        raise ConfigError(
            f"{_training_shortage_message(cfg.parallel, short, host)}; {_suggest_changes(cfg, short, host)}; "
            f"{DISABLING_SETTING} starts it anyway"
        )


def check_sampling_fits(cfg: Config, host: HostCapacity, training_pp_ranks: tuple[int, ...]) -> None:
    """Check that the ranks of rollout.ranks on a machine fit into its memory, on a CPU with its training ranks.

    Args:
        host: the machine, with the pipeline ranks of its sampling ranks.
        training_pp_ranks: pipeline ranks of its training ranks.

    Raises:
        ConfigError: they do not fit.
    """
    from moefold.cost.rollout_memory import sampling_rank_memory

    required = sampling_rank_memory(cfg, host.device_type)
    if host.device_type == "cpu":
        host = replace(host, pp_ranks=(*host.pp_ranks, *(len(required) + rank for rank in training_pp_ranks)))
        required += min_training_memory(cfg, host.device_type)
    if (short := find_shortage(required, host)) is not None:
        raise ConfigError(
            f"the ranks of rollout.ranks={cfg.rollout.ranks} do not fit into memory: {shortage_message(short)}; lower "
            f"rollout.cache_gib={cfg.rollout.cache_gib:g}, or raise rollout.tp, pp or ep; {DISABLING_SETTING} starts "
            "them anyway"
        )


def shortage_message(shortage: MemoryShortage) -> str:
    """Format needed and available memory: "the rank needs at least 752 GiB, and 21.5 GiB are free ..."."""
    parts = ", ".join(
        f"{part} {_format_size(size)}" for part, size in shortage.parts.most_common(MAX_LISTED_PARTS) if size
    )
    return (
        f"{shortage.subject} at least {_format_size(shortage.needed)} ({parts}), and "
        f"{_format_size(shortage.available.size)} are {shortage.available.description}"
    )


def _training_shortage_message(parallel: ParallelConfig, shortage: MemoryShortage, host: HostCapacity) -> str:
    count = parallel.world_size
    device = {"cpu": "on the CPU", "cuda": "on GPUs"}[host.device_type]
    return f"a step of {count} rank{'s' * (count > 1)} {device} does not fit into memory: {shortage_message(shortage)}"


def _suggest_changes(cfg: Config, shortage: MemoryShortage, host: HostCapacity) -> str:
    """Suggest cheap changes that make the step fit. Otherwise state the remaining need and a way out."""
    changes: list[str] = []
    for section, key, value in _memory_saving_changes(cfg, shortage, host.device_type):
        section_cfg: Any = getattr(cfg, section)
        changed: Config = replace(cfg, **{section: replace(section_cfg, **{key: value})})
        try:
            check_config(changed)
        except ConfigError:
            continue
        cfg = changed
        changes.append(f"{section}.{key}={value!r}".replace("('layer',)", '["layer"]'))
        remaining = find_shortage(min_training_memory(cfg, host.device_type), host)
        if remaining is None:
            return f"it may fit with {' '.join(changes)}"
        shortage = remaining
    with_ = f"with {' '.join(changes)} it still needs {_format_size(shortage.needed)}; " if changes else ""
    return f"{with_}{_irreducible_memory_message(cfg, host)}"


def _memory_saving_changes(cfg: Config, shortage: MemoryShortage, device_type: str) -> Iterator[tuple[str, str, Any]]:
    """Yield changes that save memory without changing the training result, cheapest in time first."""
    if cache_gib := _smaller_cache_gib(cfg, shortage, device_type):
        yield "rollout", "cache_gib", cache_gib
    train = cfg.train
    p = cfg.parallel
    if p.zero < 3 and p.world_size > p.pp * p.tp:
        yield "parallel", "zero", 3
    if train.micro_batch_size > 1:
        yield "train", "micro_batch_size", 1
    if "layer" not in train.recompute:
        yield "train", "recompute", ("layer",)


def _smaller_cache_gib(cfg: Config, shortage: MemoryShortage, device_type: str) -> float:
    """Return the rollout.cache_gib with which sampling fits, or 0 if a smaller cache does not help.

    The cache holds at least a sample of train.seq_len.
    """
    share = shortage.parts[CACHE_PART]
    remaining = share - (shortage.needed - shortage.available.size)
    if remaining <= 0:
        return 0.0
    sampling = rollout_config(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else cfg
    sizes = cache_sizes(sampling, device_type)
    num_pages = -(-cfg.train.seq_len // sizes.page_positions) + 1
    needed = sizes.total_bytes(num_pages, cfg.rollout.slots, cfg.rollout.cache)
    fitting = min(cfg.rollout.cache_gib, min_rollout_cache_bytes(cfg) / GIB) * remaining / share
    rounded = floor(fitting * 1000) / 1000
    return rounded if rounded * GIB >= needed else 0.0


def _irreducible_memory_message(cfg: Config, host: HostCapacity) -> str:
    """Describe the states of the whole model, which no setting reduces, and the hardware they need."""
    total = count_parameters(cfg.model).total
    memory = RankStateMemory(replace(cfg, parallel=type(cfg.parallel)()))
    state_bytes = memory.max_by_pp_rank[0]
    states = state_bytes.weights + state_bytes.gradients + state_bytes.optimizer - memory.offloaded_moments[0].offloaded
    if states < host.available.size:
        train = cfg.train
        return f"lower train.micro_batch_size (now {train.micro_batch_size}) or train.seq_len (now {train.seq_len})"
    text = (
        f"weights, gradients and moments of {total:,} parameters are {_format_size(states)}, however ranks share them"
    )
    if host.device_type == "cuda":
        return f"{text}: at least {-(-states // host.available.size)} GPUs of this size, or a smaller model"
    machine = "start it on GPUs or more machines (moefold plan RECIPE --gpu NAME finds a mapping that fits)"
    return f"{text}: {machine}, or choose a smaller model"


def _with_fewer_micro_batches(cfg: Config) -> Config:
    """Return the recipe with the fewest micro-batches that reach the peak."""
    p = cfg.parallel
    train = cfg.train
    count = STEADY_MICRO_BATCHES_PER_STAGE * p.pp * p.virtual_stages
    if chosen(cfg, SchedulePart).is_for_one_mapping or cfg.num_micro_batches <= count:
        return cfg
    return replace(cfg, train=replace(train, global_batch_size=count * train.micro_batch_size * p.dp))


def _rank_bytes(train: TrainConfig, memory: RankMemory) -> BytesByPart:
    parts = _state_bytes(memory.states, 0)
    # How much is offloaded at the peak depends on the disk.
    active = 0 if train.offload else memory.activations.total
    parts["activations"] = round(CERTAIN_FRACTION * active)
    return parts


def _state_bytes(states: StateBytes, offloaded_bytes: int) -> BytesByPart:
    return BytesByPart(
        weights=states.weights + states.gathered,
        gradients=max(states.gradients, states.gradient_sums),
        optimizer=states.optimizer - offloaded_bytes,
        buffers=states.buffers,
    )


def _format_size(size: int) -> str:
    return f"{size / GIB:,.0f} GiB" if size >= 100 * GIB else format_bytes(size)
