"""Parallel mapping: the degrees of parallelism that the planner prices, and its display."""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from moefold.config.base.part import Part, kind_or_part, make_part, values_by_key
from moefold.config.chosen import chosen_in, default_part
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.topology.schedules import DEFAULT_SCHEDULE, schedule_named

OFFLOADED_OPTIMIZER = "optimizer"
"""Value of `ParallelMapping.offload` for the moments."""


class PipelineVariant(NamedTuple):
    """A schedule with its virtual stages."""

    schedule: str | Part
    vpp: int


@dataclass(unsafe_hash=True, kw_only=True, slots=True)
class ParallelMapping:
    """Parallel degrees of attention and experts, micro-batch and execution of a step, by the names of a recipe.

    Never changed, but not frozen: a search builds tens of thousands, and a frozen one takes three times as long.
    """

    tp: int = 1
    """Tensor parallelism of attention and dense layers, with sequence parallelism."""
    cp: int = 1
    """Context parallelism."""
    dp: int = 1
    """Data parallelism of attention."""
    pp: int = 1
    """Pipeline ranks."""
    vpp: int = 1
    """Model chunks on each pipeline rank."""
    ep: int = 1
    """Expert parallelism."""
    etp: int = 1
    """Tensor parallelism of an expert."""
    edp: int = 1
    """Data parallelism of the experts."""
    mbs: int = 1
    """Samples of a micro-batch."""
    zero: int = 1
    """ZeRO stage. 0 replicates, 1 shards the optimizer state, 2 also gradients, 3 also parameters."""
    recompute: tuple[str, ...] = ()
    """Parts of the layers to recompute in the backward pass."""
    offload: tuple[str, ...] = ()
    """Offloaded to host memory: "optimizer", and parts of the layers between the passes."""
    dispatcher: DispatcherPart = field(default_factory=partial(default_part, DispatcherPart))
    """Token dispatcher, with its settings."""
    overlap: bool = False
    """True if the expert all-to-all of one micro-batch overlaps with the compute of another."""
    schedule: str | Part = DEFAULT_SCHEDULE
    """Pipeline schedule. `vpp` of 2 or more with "1f1b" means its interleaved form."""

    @property
    def world_size(self) -> int:
        """World size."""
        return self.tp * self.cp * self.dp * self.pp

    def num_micro_batches(self, global_batch_size: int) -> int:
        """Return the micro-batches of one data-parallel rank in a step, including micro-batches of only padding."""
        return -(-global_batch_size // (self.mbs * self.dp))

    def as_dict(self) -> dict[str, object]:
        """Return every field by name, as `--json` prints it."""
        return values_by_key(self)


def mapping_from_config(parallel: ParallelConfig, train: TrainConfig) -> ParallelMapping:
    """Return the mapping of a recipe."""
    p = parallel
    dispatcher = chosen_in(p, DispatcherPart)
    if dispatcher.resolves_to:
        dispatcher = make_part(dispatcher.group, dispatcher.resolves_to[1])
    return ParallelMapping(
        tp=p.tp,
        cp=p.cp,
        dp=p.dp,
        pp=p.pp,
        vpp=p.virtual_stages,
        ep=p.ep,
        etp=p.etp,
        edp=p.edp,
        mbs=train.micro_batch_size,
        zero=p.zero,
        recompute=train.recompute,
        offload=(*train.offload, *((OFFLOADED_OPTIMIZER,) if train.offload_optimizer == "host" else ())),
        overlap=p.overlap_experts,
        dispatcher=dispatcher,
        schedule=kind_or_part(p.schedule),
    )


def format_compact_degrees(mapping: ParallelMapping) -> str:
    """Format the degrees in a few letters, such as `tp1 pp2x8 ep8 dp32 z1`.

    pp2x8 is pp=2 with 8 virtual stages, z1 is ZeRO 1. cp, etp and mbs are left out where they are 1.
    """
    m = mapping
    words = [f"tp{m.tp}", f"pp{m.pp}x{m.vpp}" if m.vpp > 1 else f"pp{m.pp}"]
    words += [f"cp{m.cp}"] if m.cp > 1 else []
    words.append(f"ep{m.ep}")
    words += [f"etp{m.etp}"] if m.etp > 1 else []
    words += [f"dp{m.dp}", f"z{m.zero}"]
    return " ".join([*words, *([f"mbs{m.mbs}"] if m.mbs > 1 else [])])


def describe_strategy(mapping: ParallelMapping) -> str:
    """Describe how a mapping saves memory and hides communication, beyond its degrees, or "" without such settings."""
    m = mapping
    words = [schedule_named(m.schedule).kind] if m.pp > 1 and m.schedule != DEFAULT_SCHEDULE else []
    words += [f"recompute: {' + '.join(m.recompute)}"] if m.recompute else []
    words += [f"offload: {' + '.join(m.offload)}"] if m.offload else []
    return ", ".join([*words, *(["expert all-to-all overlapped"] if m.overlap else [])])


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits."""
    digits = next((digits for least, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)) if seconds >= least), 4)
    return f"{seconds:.{digits}f}"


def format_rate(value: float) -> str:
    """Format a rate with three significant digits and thousands separators, such as `6,230`."""
    scale = 10 ** max(0, len(f"{value:.0f}") - 3)
    return f"{round(value / scale) * scale:,}"
