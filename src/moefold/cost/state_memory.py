"""State memory: bytes of weights, gradients and optimizer state on each rank, exact to the byte. Torch-free.

Counted is what the runtime allocates: FSDP's padding of uneven shards, the gathered weights in the compute type, and
unreduced gradient sums. Not counted: code and buffers of libraries, and the allocator's rounding.

Also the optimizer state that `train.offload_optimizer` removes from a rank's memory and that an update fetches.
"""

from dataclasses import astuple, dataclass, fields
from functools import cached_property
from heapq import nlargest

import numpy as np

from moefold.config.schema import Config
from moefold.cost.memory_columns import ByteTable, Counts, ModelChunk, recipe_chunk, state_counts
from moefold.cost.saved_tensors import CUDA_KERNELS, KernelProfile
from moefold.cost.stages import plan_stages
from moefold.cost.unit_memory import (
    StateBytes,
    StateMapping,
    UnitMemory,
    dispatch_buffer_bytes,
    rope_buffer_bytes,
    state_mapping,
)

STATE_FIELDS = tuple(field.name for field in fields(StateBytes))
"""Parts of a table of states."""
PARAMS_IN_TRANSIT = 3
"""Parameters whose offloaded moments are in memory at once: one being fetched, one in use, one being written back."""


def state_table(
    memory: UnitMemory,
    mapping: StateMapping,
    *,
    exchange_bytes: int,
    offloads_moments: bool = False,
    dp_ranks: tuple[int, int] = (0, 0),
) -> ByteTable:
    """Return the bytes of each state column, [`STATE_FIELDS`, columns].

    Args:
        memory: states of the units.
        mapping: the mapping.
        exchange_bytes: bytes of a rank's symmetric memory.
        offloads_moments: whether moments are in the host's memory between updates.
        dp_ranks: see `UnitMemory.unit_states`.
    """
    cfg = memory.cfg
    columns = memory.columns
    table = np.zeros((len(STATE_FIELDS), columns.state_size))
    for column in memory.units:
        table[:, column] = astuple(memory.unit_states(column, mapping, dp_ranks))
        if offloads_moments:
            table[STATE_FIELDS.index("optimizer"), column] -= sum(memory.offloaded_moments(column, mapping))
    if cfg.model.last_stage_needs_embedding:
        for name in ("second_embedding", "following_embedding"):
            table[:, columns.state_column(name)] = table[:, columns.state_column("embedding")]
        # The copy on the rank of the first has no moments, and no gradient of its own after the reduction.
        table[STATE_FIELDS.index("optimizer"), columns.state_column("following_embedding")] = 0
    table[STATE_FIELDS.index("buffers"), columns.state_column("stage")] = rope_buffer_bytes(
        cfg.run, cfg.model, cfg.train, mapping.cp
    )
    # A rank counts one set of kinds.
    table[STATE_FIELDS.index("buffers"), columns.first_kind_set :] = exchange_bytes
    if mapping.shards_layers:
        # The FSDP root's own weights stay gathered; of the layers of a rank, only the largest counts, and the next one.
        prefetched = memory.prefetched_bytes(mapping)
        gathered = table[STATE_FIELDS.index("gathered")]
        for kind_set in range(columns.several_layers):
            contained = [column for bit, column in enumerate(columns.layer_units) if kind_set >> bit & 1]
            at = columns.first_kind_set + kind_set
            gathered[at] = max(gathered[contained], default=0)
            next_layer = max((prefetched[column] for column in contained if column in prefetched), default=0)
            gathered[at + columns.several_layers] = gathered[at] + next_layer
        gathered[columns.layer_units] = 0
    return table


def recipe_stages(cfg: Config) -> tuple[list[ModelChunk], list[list[int]]]:
    """Return the layers of each stage, and the stage indices of each pipeline rank."""
    plan = plan_stages(cfg)
    chunks = [recipe_chunk(cfg.model, stage.parts) for stage in plan.stages]
    return chunks, [[stage.number for stage in plan.of_rank(rank)] for rank in range(cfg.parallel.pp)]


def moments_in_transit(memory: UnitMemory, mapping: StateMapping, counts: Counts) -> Counts:
    """Return the most bytes of offloaded moments in memory during an update, [ranks].

    Args:
        memory: states of the units.
        mapping: the mapping.
        counts: state counts, [ranks, columns].
    """
    sizes = _moment_sizes(memory, mapping)
    rows, which = np.unique(counts[:, list(sizes)], axis=0, return_inverse=True)
    sums = [
        sum(
            nlargest(
                PARAMS_IN_TRANSIT,
                (
                    size
                    for count, unit in zip(row, sizes.values(), strict=True)
                    for size in unit[:PARAMS_IN_TRANSIT] * min(int(count), PARAMS_IN_TRANSIT)
                ),
            )
        )
        for row in rows
    ]
    return np.array(sums, dtype=float)[which.reshape(-1)]


def _moment_sizes(memory: UnitMemory, mapping: StateMapping) -> dict[int, list[int]]:
    """Return the offloaded moments of each unit, largest first, by its state column.

    A copy of the embedding on the rank of the first has no moments; on another rank it does.
    """
    columns = memory.columns
    sizes: dict[int, list[int]] = {column: memory.offloaded_moments(column, mapping) for column in memory.units}
    if memory.cfg.model.last_stage_needs_embedding:
        sizes[columns.state_column("second_embedding")] = sizes[columns.state_column("embedding")]
    return sizes


@dataclass(frozen=True, slots=True)
class OptimizerOffloadMemory:
    """Bytes of offloaded moments on the first rank of a pipeline stage."""

    offloaded: int = 0
    """Bytes offloaded between two updates."""
    in_transit: int = 0
    """Maximum bytes in memory during an update: the moments of `PARAMS_IN_TRANSIT` parameters."""


class StateMemory:
    """State bytes of all ranks of a config; the cost grows with the number of stages, not of tensors.

    Args:
        cfg: a recipe that `check_config` passed.
        kernels: kernel profile of the device.
    """

    def __init__(self, cfg: Config, kernels: KernelProfile = CUDA_KERNELS) -> None:
        self._cfg = cfg
        self._memory = UnitMemory(cfg, kernels)
        self._mapping = state_mapping(cfg)

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
        dp_ranks = dp_ranks if self._cfg.parallel.zero > 0 and not self._mapping.is_single else (0, 0)
        exchange_bytes = dispatch_buffer_bytes(self._cfg)
        table = state_table(self._memory, self._mapping, exchange_bytes=exchange_bytes, dp_ranks=dp_ranks)
        return tuple(StateBytes(*(table @ counts).astype(int).tolist()) for counts in self._counts)

    @cached_property
    def offloaded_moments(self) -> tuple[OptimizerOffloadMemory, ...]:
        """Offloaded moments on the first rank of every pipeline stage."""
        if self._cfg.train.offload_optimizer == "none":
            return (OptimizerOffloadMemory(),) * self._cfg.parallel.pp
        sizes = _moment_sizes(self._memory, self._mapping)
        offloaded = self._counts[:, list(sizes)] @ [sum(unit) for unit in sizes.values()]
        in_transit = moments_in_transit(self._memory, self._mapping, self._counts)
        return tuple(
            OptimizerOffloadMemory(int(size), int(most)) for size, most in zip(offloaded, in_transit, strict=True)
        )

    @cached_property
    def _counts(self) -> Counts:
        """State counts of each pipeline rank, [ranks, columns]."""
        chunks, stages_by_rank = recipe_stages(self._cfg)
        return np.array([state_counts(chunks, stages, self._memory.columns) for stages in stages_by_rank])
