"""State memory: bytes of weights, gradients and optimizer state on each rank, exact to the byte. Torch-free.

Counted is what the runtime allocates: FSDP's padding of uneven shards, the gathered weights in the compute type, and
unreduced gradient sums. Not counted: code and buffers of libraries, and the allocator's rounding.

Also the optimizer state that `train.offload_optimizer` removes from a rank's memory and that an update fetches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from heapq import nlargest

import numpy as np

from moefold.config.param_spec import ParamSpec
from moefold.config.schema import Config
from moefold.cost.memory_columns import (
    ByteTable,
    Counts,
    MemoryColumns,
    ModelChunk,
    recipe_chunk,
    recipe_columns,
    state_counts,
)
from moefold.cost.stages import plan_stages
from moefold.cost.unit_memory import (
    ShardSpec,
    StateBytes,
    Unit,
    UnitMemory,
    dispatch_buffer_bytes,
    rope_buffer_bytes,
    unit_weights,
)

STATE_FIELDS = tuple(field.name for field in fields(StateBytes))
"""Parts of a table of states."""
PARAMS_IN_TRANSIT = 3
"""Parameters whose offloaded moments are in memory at once: one being fetched, one in use, one being written back."""


def state_table(
    units: Mapping[int, StateBytes],
    columns: MemoryColumns,
    *,
    has_second_embedding: bool,
    prefetched: Mapping[int, int] | None,
    rope_bytes: int,
    exchange_bytes: int,
) -> ByteTable:
    """Return the bytes of each state column, [`STATE_FIELDS`, columns].

    Args:
        units: states of the kinds of layers, the embedding, the head and MTP layers, by column.
        columns: columns of the model.
        has_second_embedding: whether the last stage needs a copy of the embedding.
        prefetched: bytes of each layer, by its column, that are gathered while the layer before it computes, if the
            layers of a stage gather their weights one after another, as with ZeRO-3; None: all stay gathered.
        rope_bytes: bytes of a stage's RoPE table.
        exchange_bytes: bytes of a rank's symmetric memory.
    """
    table = np.zeros((len(STATE_FIELDS), columns.state_size))
    for column, states in units.items():
        table[:, column] = [getattr(states, name) for name in STATE_FIELDS]
    if has_second_embedding:
        for name in ("second_embedding", "following_embedding"):
            table[:, columns.state_column(name)] = table[:, columns.state_column("embedding")]
        # The copy on the rank of the first has no moments, and no gradient of its own after the reduction.
        table[STATE_FIELDS.index("optimizer"), columns.state_column("following_embedding")] = 0
    table[STATE_FIELDS.index("buffers"), columns.state_column("stage")] = rope_bytes
    # A rank counts one set of kinds.
    table[STATE_FIELDS.index("buffers"), columns.first_kind_set :] = exchange_bytes
    if prefetched is not None:
        # The FSDP root's own weights stay gathered; of the layers of a rank, only the largest counts, and the next one.
        gathered = table[STATE_FIELDS.index("gathered")]
        for kind_set in range(columns.several_layers):
            contained = [column for bit, column in enumerate(columns.layer_units) if kind_set >> bit & 1]
            at = columns.first_kind_set + kind_set
            gathered[at] = max(gathered[contained], default=0)
            next_layer = max((prefetched.get(column, 0) for column in contained), default=0)
            gathered[at + columns.several_layers] = gathered[at] + next_layer
        gathered[columns.layer_units] = 0
    return table


def recipe_stages(cfg: Config) -> tuple[list[ModelChunk], list[list[int]]]:
    """Return the layers of each stage, and the stage indices of each pipeline rank."""
    plan = plan_stages(cfg)
    chunks = [recipe_chunk(cfg.model, stage.parts) for stage in plan.stages]
    return chunks, [[stage.number for stage in plan.of_rank(rank)] for rank in range(cfg.parallel.pp)]


class StateMemory(UnitMemory):
    """State bytes of all ranks of a config; the cost grows with the number of stages, not of tensors."""

    @cached_property
    def max_by_pp_rank(self) -> tuple[StateBytes, ...]:
        """State bytes of the first rank of every pipeline stage, the maximum of its stage."""
        return self.by_pp_rank((0, 0))

    def by_pp_rank(self, dp_ranks: tuple[int, int]) -> tuple[StateBytes, ...]:
        """Return the state bytes of each pipeline rank, for given data-parallel ranks.

        Data-parallel rank 0, such as the first rank of each stage, holds most: later ranks get the remaining rows.

        Args:
            dp_ranks: rank within the dp x cp group over which dense weights are sharded, and within the edp group over
                which experts are sharded.
        """
        cfg = self._cfg
        dp_ranks = dp_ranks if self._is_sharded else (0, 0)
        table = state_table(
            {column: self.unit_states(name, dp_ranks) for column, name in self._units.items()},
            recipe_columns(cfg.model),
            has_second_embedding=cfg.model.last_stage_needs_embedding,
            prefetched=self._prefetched_bytes() if self._is_fsdp and cfg.parallel.zero == 3 else None,
            rope_bytes=rope_buffer_bytes(cfg.run, cfg.model, cfg.parallel, cfg.train),
            exchange_bytes=dispatch_buffer_bytes(cfg),
        )
        return tuple(StateBytes(*(table @ counts).astype(int).tolist()) for counts in self._counts)

    def _prefetched_bytes(self) -> dict[int, int]:
        """Return the bytes of each layer that are gathered while the layer before it computes, by its column."""
        p = self._cfg.parallel
        return {
            column: self.shard_spec.prefetched_bytes(
                weight.shard(p.tp, p.ep, p.etp) for weight in unit_weights(self._cfg.model, self._cfg.lora, name)
            )
            for column, name in self._units.items()
        }

    @cached_property
    def offloaded_moments(self) -> tuple["OptimizerOffloadMemory", ...]:
        """Offloaded moments on the first rank of every pipeline stage."""
        cfg = self._cfg
        p = cfg.parallel
        if cfg.train.offload_optimizer == "none":
            return (OptimizerOffloadMemory(),) * p.pp
        sizes: dict[int, list[int]] = {}
        for column, name in self._units.items():
            weights = (weight.shard(p.tp, p.ep, p.etp) for weight in unit_weights(cfg.model, cfg.lora, name))
            sizes[column] = list(offloaded_moment_sizes(self.shard_spec, weights, cfg.train.offload_min_kib))
        if cfg.model.last_stage_needs_embedding:
            columns = recipe_columns(cfg.model)
            sizes[columns.state_column("second_embedding")] = sizes[columns.state_column("embedding")]
        counts = np.array(self._counts)
        offloaded = counts[:, list(sizes)] @ [sum(unit) for unit in sizes.values()]
        in_transit = moments_in_transit(sizes, counts)
        return tuple(
            OptimizerOffloadMemory(int(size), int(most)) for size, most in zip(offloaded, in_transit, strict=True)
        )

    @cached_property
    def _units(self) -> dict[int, Unit]:
        """Name of each unit of the model, by its state column."""
        model = self._cfg.model
        ends = ("embedding", "head", "mtp") if model.mtp_layers else ("embedding", "head")
        columns = recipe_columns(model)
        units: dict[int, Unit] = {columns.state_column(name): name for name in ends}
        return {i: kind for i, kind in enumerate(model.distinct_kinds) if kind in model.block_kinds} | units

    @cached_property
    def _counts(self) -> list[Counts]:
        """State counts of each pipeline rank."""
        chunks, stages_by_rank = recipe_stages(self._cfg)
        columns = recipe_columns(self._cfg.model)
        return [state_counts(chunks, stages, columns) for stages in stages_by_rank]


@dataclass(frozen=True, slots=True)
class OptimizerOffloadMemory:
    """Bytes of offloaded moments on the first rank of a pipeline stage."""

    offloaded: int = 0
    """Bytes offloaded between two updates."""
    in_transit: int = 0
    """Maximum bytes in memory during an update: the moments of `PARAMS_IN_TRANSIT` parameters."""


def offloaded_moment_sizes(shard_spec: ShardSpec, weights: Iterable[ParamSpec], min_kib: int) -> Iterator[int]:
    """Yield the moment bytes of each weight that is large enough for `optim/state_offload.py` to offload.

    Args:
        shard_spec: shard spec of the rank.
        weights: weights already sharded by tensor and expert parallelism.
        min_kib: minimum KiB of one moment to be offloaded.
    """
    for weight in weights:
        numel = weight.dp_shards(shard_spec.degrees[weight.is_expert]).numel(0)
        own_numel = numel // shard_spec.owners(weight)
        min_bytes = max(min_kib * 2**10, 1)
        offloaded = 0
        for state in shard_spec.optimizer.states(weight):
            size = own_numel * shard_spec.state_item_bytes(state)
            offloaded += size if size >= min_bytes and not (state.is_count or state.is_kept) else 0
        if numel * shard_spec.master_bytes >= min_bytes:
            offloaded += numel * shard_spec.outer_bytes
        if own_numel * shard_spec.master_bytes >= min_bytes:
            offloaded += own_numel * shard_spec.residual_bytes
        if offloaded:
            yield offloaded


def moments_in_transit(sizes: Mapping[int, Sequence[int]], counts: Counts) -> Counts:
    """Return the most bytes of offloaded moments in memory during an update, [ranks].

    Args:
        sizes: bytes of the moments of each weight of a unit, by its state column. A copy of the embedding on the rank
            of the first has no moments; on another rank it does.
        counts: state counts, [ranks, columns].
    """
    rows, which = np.unique(counts[:, list(sizes)], axis=0, return_inverse=True)
    sums = [
        sum(
            nlargest(
                PARAMS_IN_TRANSIT,
                (
                    size
                    for count, unit in zip(row, sizes.values(), strict=True)
                    for size in [*unit] * min(int(count), PARAMS_IN_TRANSIT)
                ),
            )
        )
        for row in rows
    ]
    return np.array(sums, dtype=float)[which.reshape(-1)]
