"""Bytes of weights, gradients and optimizer state on each rank of a recipe, exact to the byte.

The formulas count all that the runtime allocates, also FSDP's padding of uneven shards, the gathered weights in the
compute type, and unreduced gradient sums. Not counted: code and buffers of libraries, and the allocator's rounding.

Also the optimizer state that `train.offload_optimizer` removes from a rank's memory and that an update fetches.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moefold.config.schema import Config
from moefold.cost.memory_columns import Counts, ModelChunk, recipe_chunk, state_counts
from moefold.cost.stage_balance import plan_stages
from moefold.cost.state_bytes import StateBytes, dispatch_buffer_bytes
from moefold.cost.unit_state_memory import BUFFERS, StateMapping, UnitStateMemory, state_mapping


def recipe_stages(cfg: Config) -> tuple[list[ModelChunk], list[list[int]]]:
    """Return the layers of each stage, and the stage indices of each pipeline rank."""
    plan = plan_stages(cfg)
    chunks = [recipe_chunk(cfg.model, stage.parts) for stage in plan.stages]
    return chunks, [[stage.index for stage in plan.stages_of_rank(rank)] for rank in range(cfg.parallel.pp)]


@dataclass(frozen=True, slots=True)
class OptimizerOffloadMemory:
    """Bytes of offloaded moments on the first rank of a pipeline stage."""

    offloaded: int = 0
    """Bytes offloaded between two updates."""
    in_transit: int = 0
    """Maximum bytes in memory during an update: the moments of `PARAMS_IN_TRANSIT` parameters."""


class RankStateMemory(UnitStateMemory):
    """State bytes of all ranks of a config. The cost grows with the number of stages, not of tensors.

    Args:
        cfg: a recipe that `check_config` passed.
    """

    @cached_property
    def max_by_pp_rank(self) -> tuple[StateBytes, ...]:
        """State bytes of the first rank of every pipeline stage, the maximum of its stage."""
        table = self.table(self._mapping)
        table[BUFFERS] += self.rank_buffers(self.cfg.parallel.cp, dispatch_buffer_bytes(self.cfg))
        return tuple(StateBytes(*(table @ counts).astype(int).tolist()) for counts in self._counts)

    @cached_property
    def offloaded_moments(self) -> tuple[OptimizerOffloadMemory, ...]:
        """Offloaded moments on the first rank of every pipeline stage."""
        if self.cfg.train.offload_optimizer == "none":
            return (OptimizerOffloadMemory(),) * self.cfg.parallel.pp
        sizes = self.moment_sizes(self._mapping)
        offloaded = self._counts[:, list(sizes)] @ [sum(unit) for unit in sizes.values()]
        in_transit = self.moments_in_transit(self._mapping, self._counts)
        return tuple(
            OptimizerOffloadMemory(int(size), int(most)) for size, most in zip(offloaded, in_transit, strict=True)
        )

    @cached_property
    def _counts(self) -> Counts:
        """State counts of each pipeline rank, [ranks, columns]."""
        chunks, stages_by_rank = recipe_stages(self.cfg)
        return np.array([state_counts(chunks, stages, self.columns) for stages in stages_by_rank])

    @cached_property
    def _mapping(self) -> StateMapping:
        return state_mapping(self.cfg)
