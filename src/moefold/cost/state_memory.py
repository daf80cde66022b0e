"""State memory: bytes of weights, gradients and optimizer state on each rank, exact to the byte. Torch-free.

Counted is what the runtime allocates: FSDP's padding of uneven shards, the gathered weights in the compute type, and
unreduced gradient sums. Not counted: code and buffers of libraries, and the allocator's rounding.

Also the optimizer state that `train.offload_optimizer` removes from a rank's memory and that an update fetches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from moefold.config.schema import Config
from moefold.cost.param_shapes import WeightShape
from moefold.cost.stages import plan_stages
from moefold.cost.unit_memory import (
    ZERO_STATES,
    ShardSpec,
    StateBytes,
    UnitMemory,
    cast_copy_bytes,
    make_shard_spec,
    rope_buffer_bytes,
    unit_names,
    unit_weights,
)
from moefold.topology.pipeline_layout import Stage


def rank_state_bytes(cfg: Config, pp_rank: int, dense_dp_rank: int = 0, expert_dp_rank: int = 0) -> StateBytes:
    """Return the state bytes of one rank.

    Data-parallel rank 0, such as the first rank of each stage, holds most: later ranks get the remaining rows.

    Args:
        cfg: a recipe that `check_config` passed.
        pp_rank: pipeline rank.
        dense_dp_rank: rank within the dp x cp group over which dense weights are sharded.
        expert_dp_rank: rank within the edp group over which experts are sharded.
    """
    return StateMemory(cfg).rank_bytes(pp_rank, dense_dp_rank, expert_dp_rank)


class StateMemory(UnitMemory):
    """State bytes of all ranks of a config; the cost grows with the number of stages, not of tensors."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self._stage_plan = plan_stages(cfg)

    def rank_bytes(self, pp_rank: int, dense_dp_rank: int = 0, expert_dp_rank: int = 0) -> StateBytes:
        """See `rank_state_bytes`."""
        members = (dense_dp_rank, expert_dp_rank) if self._is_sharded else (0, 0)
        stages = self._stage_plan.of_rank(pp_rank)
        total = sum(
            (self._unit_states(name, *members) for stage in stages for name in unit_names(self._cfg, stage)),
            ZERO_STATES,
        )
        if self._cfg.model.last_stage_needs_embedding and len(stages) > 1 and stages[0].is_first and stages[-1].is_last:
            # The second copy of the embedding has no moments, and no gradient of its own after the reduction.
            total += replace(ZERO_STATES, optimizer=-self._unit_states("embedding", *members).optimizer)
        gathered = sum(self._gathered_bytes(stage) for stage in stages)
        return replace(total, gathered=gathered, buffers=total.buffers + len(stages) * rope_buffer_bytes(self._cfg))

    @cached_property
    def max_by_pp_rank(self) -> tuple[StateBytes, ...]:
        """State bytes of the first rank of every pipeline stage, the maximum of its stage."""
        return tuple(self.rank_bytes(pp_rank) for pp_rank in range(self._cfg.parallel.pp))

    def _gathered_bytes(self, stage: Stage) -> int:
        """Return the bytes of the compute-type copies of a stage's weights."""
        names = unit_names(self._cfg, stage)
        if not self._is_fsdp:
            return cast_copy_bytes(self._cfg, names)
        sizes = [self._shard_spec.gathered_bytes(self._sharded_weights(name)) for name in names]
        if self._cfg.parallel.zero < 3:
            return sum(sizes)
        layers = [size for name, size in zip(names, sizes, strict=True) if name not in ("embedding", "head")]
        # With ZeRO-3 the FSDP root's own weights stay gathered; of the layers, one at a time.
        return sum(sizes) - sum(layers) + max(layers, default=0)


PARAMS_IN_TRANSIT = 3
"""Parameters whose offloaded moments are in memory at once: one being fetched, one in use, one being written back."""


@dataclass(frozen=True, slots=True)
class OptimizerOffloadMemory:
    """Bytes of offloaded moments on the first rank of a pipeline stage."""

    offloaded: int = 0
    """Bytes offloaded between two updates."""
    in_transit: int = 0
    """Maximum bytes in memory during an update: the moments of `PARAMS_IN_TRANSIT` parameters."""


def optimizer_offload_memory(cfg: Config, pp_rank: int) -> OptimizerOffloadMemory:
    """Count the moments that are large enough for `optim/state_offload.py` to offload.

    Args:
        cfg: a recipe that `check_config` passed.
        pp_rank: pipeline rank.
    """
    p = cfg.parallel
    train = cfg.train
    if train.offload_optimizer == "none":
        return OptimizerOffloadMemory()
    names = [name for stage in plan_stages(cfg).of_rank(pp_rank) for name in unit_names(cfg, stage)]
    if names.count("embedding") > 1:
        # The second copy of the embedding has no moments.
        names.remove("embedding")
    degrees = (p.dp * p.cp, p.edp) if p.world_size > 1 and p.zero > 0 else (1, 1)
    weights = (weight.shard(p.tp, p.ep, p.etp) for name in names for weight in unit_weights(cfg, name))
    sizes = list(
        offloaded_moment_sizes(
            make_shard_spec(cfg, degrees, accumulates_gradients=False), weights, train.offload_min_kib
        )
    )
    return OptimizerOffloadMemory(sum(sizes), sum(sorted(sizes)[-PARAMS_IN_TRANSIT:]))


def offloaded_moment_sizes(shard_spec: ShardSpec, weights: Iterable[WeightShape], min_kib: int) -> Iterator[int]:
    """Yield the moment bytes of each weight whose moments are offloaded.

    Args:
        shard_spec: shard spec of the rank.
        weights: weights already sharded by tensor and expert parallelism.
        min_kib: minimum KiB of one moment to be offloaded.
    """
    for weight in weights:
        moment_bytes = weight.dp_shards(shard_spec.degrees[weight.is_expert]).numel(0) * shard_spec.moment_bytes
        if moment_bytes >= max(min_kib * 2**10, 1):
            yield moment_bytes * shard_spec.num_moments(weight)
