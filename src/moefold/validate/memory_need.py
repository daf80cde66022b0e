"""Whether a step fits into memory before it is tried: what its ranks need at least, by formula. Torch-free.

States are exact to the byte. Activations are within a quarter of what is measured, so that three quarters of them are
certain; what is refused for lack of memory does not fit even then.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.schema import Config
from moefold.cost.flops import count_parameters
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.recompute_parts import AUTO
from moefold.cost.saved_tensors import KERNEL_PROFILES
from moefold.cost.stages import plan_stages
from moefold.cost.state_memory import (
    StateBytes,
    StateMemory,
    compute_dtype_bytes,
    optimizer_offload_memory,
    unit_names,
    unit_weights,
)
from moefold.errors import ConfigError
from moefold.host.memory import AvailableMemory
from moefold.terminal import format_bytes
from moefold.validate.config import check_config

GIB = 2**30
CERTAIN_FRACTION = 0.75
"""Part of the formula's activations that is certain to be needed."""
MIN_PROCESS_BYTES = GIB // 10
"""Of a CPU rank beside its tensors, at the least: pages that it does not share with others."""
MAX_ACTIONS = 50_000
"""Passes of a schedule that are walked through; of longer ones states alone are counted."""
STEADY_MICRO_BATCHES_PER_STAGE = 4
"""After so many micro-batches for each stage no more come into flight."""
MAX_LISTED_PARTS = 4
DISABLING_SETTING = "run.check_memory=false"

BytesByPart = Counter[str]
"""Bytes of one rank, by part."""


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """The ranks of one machine, and the memory that they have."""

    device_type: str
    """"cpu": the ranks share the room. "cuda": each has its own."""
    pp_ranks: tuple[int, ...]
    """Pipeline rank of each rank of the machine."""
    available: AvailableMemory
    """Of all ranks together on the CPU; of the smallest GPU."""
    process_limit: AvailableMemory | None = None
    """What one process may take, where that is limited."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """More than there is."""

    needed: int
    available: AvailableMemory
    parts: BytesByPart
    """Of what is needed."""
    subject: str


def min_training_memory(cfg: Config, device_type: str) -> tuple[BytesByPart, ...]:
    """Return what a rank of each pipeline stage takes at the least in a training step.

    Args:
        cfg: a recipe that `check_config` passed.
        device_type: "cpu" or "cuda".
    """
    short = _with_fewer_micro_batches(cfg)
    p = short.parallel
    if p.pp * p.virtual_stages * short.num_micro_batches > MAX_ACTIONS:
        worst = StateMemory(short).max_by_pp_rank
        return tuple(
            _state_bytes(states, optimizer_offload_memory(short, rank).offloaded) for rank, states in enumerate(worst)
        )
    # "auto" takes at the least what is left where whole layers run again.
    again = ("layer",) if AUTO in cfg.train.recompute else None
    memory = compute_rank_memory(short, recompute=again, kernels=KERNEL_PROFILES[device_type])
    return tuple(_rank_bytes(cfg, rank) for rank in memory)


def inference_weight_memory(cfg: Config) -> tuple[BytesByPart, ...]:
    """Return the bytes of the weights that a rank of each pipeline stage holds where nothing learns.

    Args:
        cfg: of evaluation or generation; one that `check_config` passed.
    """
    p = cfg.parallel
    sizes = [0] * p.pp
    for stage in plan_stages(cfg).stages:
        for name in unit_names(cfg, stage):
            cut = (weight.shard(p.tp, p.ep, p.etp) for weight in unit_weights(cfg, name))
            sizes[stage.pp_rank] += compute_dtype_bytes(cfg) * sum(weight.numel for weight in cut)
    return tuple(BytesByPart(weights=size) for size in sizes)


def find_shortage(required: tuple[BytesByPart, ...], host: HostCapacity) -> Shortage | None:
    """Return what the ranks of a machine take more than it has, or None if they may fit.

    Args:
        required: of a rank of each pipeline stage.
        host: the machine.
    """
    fullest = max((required[rank] for rank in host.pp_ranks), key=BytesByPart.total)
    count = len(host.pp_ranks)
    if host.device_type == "cuda":
        found = [Shortage(fullest.total(), host.available, fullest, "the fullest rank needs")]
    else:
        together = BytesByPart()
        for pp_rank, times in Counter(host.pp_ranks).items():
            for part, size in required[pp_rank].items():
                together[part] += times * size
        together["processes"] = count * MIN_PROCESS_BYTES
        ranks = f"the {count} ranks of this machine need" if count > 1 else "the rank needs"
        found = [Shortage(together.total(), host.available, together, ranks)]
        if host.process_limit is not None:
            found.append(Shortage(fullest.total(), host.process_limit, fullest, "one process needs"))
    return next((short for short in found if short.needed > short.available.size), None)


def check_training_fits(cfg: Config, host: HostCapacity) -> None:
    """Refuse a training step that the machine has no memory for.

    Raises:
        ConfigError: it does not fit; with the parts, what would make it fit and what it takes at the least.
    """
    if not cfg.run.check_memory:
        return
    if (short := find_shortage(min_training_memory(cfg, host.device_type), host)) is not None:
        raise ConfigError(
            f"{_training_shortage_message(cfg, short, host)}; {_suggest_changes(cfg, short, host)}; {DISABLING_SETTING} starts it anyway"
        )


def shortage_message(short: Shortage) -> str:
    """Say what is needed and what there is: "the rank needs at least 752 GiB, and 21.5 GiB are free ..."."""
    parts = ", ".join(
        f"{part} {_format_size(size)}" for part, size in short.parts.most_common(MAX_LISTED_PARTS) if size
    )
    return f"{short.subject} at least {_format_size(short.needed)} ({parts}), and {_format_size(short.available.size)} are {short.available.description}"


def _training_shortage_message(cfg: Config, short: Shortage, host: HostCapacity) -> str:
    count = cfg.parallel.world_size
    device = {"cpu": "on the CPU", "cuda": "on GPUs"}[host.device_type]
    return f"a step of {count} rank{'s' * (count > 1)} {device} does not fit into memory: {shortage_message(short)}"


def _suggest_changes(cfg: Config, short: Shortage, host: HostCapacity) -> str:
    """What of the cheap changes would make it fit; if none, the least that they leave, and who could hold it."""
    words: list[str] = []
    for section, key, value in _memory_saving_changes(cfg):
        section_cfg: Any = getattr(cfg, section)
        changed: Config = replace(cfg, **{section: replace(section_cfg, **{key: value})})
        try:
            check_config(changed)
        except ConfigError:
            continue
        cfg = changed
        words.append(f"{section}.{key}={value!r}".replace("('layer',)", '["layer"]'))
        left = find_shortage(min_training_memory(cfg, host.device_type), host)
        if left is None:
            return f"it may fit with {' '.join(words)}"
        short = left
    with_ = f"with {' '.join(words)} it still needs {_format_size(short.needed)}; " if words else ""
    return f"{with_}{_irreducible_memory_message(cfg, host)}"


def _memory_saving_changes(cfg: Config) -> Iterator[tuple[str, str, Any]]:
    """Changes that save memory and change nothing that is learnt, cheapest in time first."""
    train, p = cfg.train, cfg.parallel
    if p.zero < 3 and p.world_size > p.pp * p.tp:
        yield "parallel", "zero", 3
    if train.micro_batch_size > 1:
        yield "train", "micro_batch_size", 1
    if "layer" not in train.recompute:
        yield "train", "recompute", ("layer",)


def _irreducible_memory_message(cfg: Config, host: HostCapacity) -> str:
    """The states of the whole model, which ranks can share and no setting makes smaller, and who could hold them."""
    total = count_parameters(cfg.model).total
    alone = replace(cfg, parallel=type(cfg.parallel)())
    held = StateMemory(alone).max_by_pp_rank[0]
    states = held.weights + held.gradients + held.optimizer - optimizer_offload_memory(alone, 0).offloaded
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
    """The recipe with no more micro-batches than it takes to have most of them in flight."""
    p, train = cfg.parallel, cfg.train
    count = STEADY_MICRO_BATCHES_PER_STAGE * p.pp * p.virtual_stages
    if p.schedule == "csv" or cfg.num_micro_batches <= count:
        return cfg
    return replace(cfg, train=replace(train, global_batch_size=count * train.micro_batch_size * p.dp))


def _rank_bytes(cfg: Config, memory: RankMemory) -> BytesByPart:
    parts = _state_bytes(memory.states, 0)
    # How much of what is offloaded is away at the fullest moment depends on the disk.
    active = 0 if cfg.train.offload else memory.activations.total + memory.pipeline
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
