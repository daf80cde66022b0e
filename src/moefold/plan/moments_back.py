"""What an update brings back of the moments that live outside of memory, by the runtime's formula. Torch-free."""

from collections.abc import Sequence
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from moefold.metrics.moments_away import PARAMS_IN_TRANSIT
from moefold.plan.held_states import StateMemoryTable
from moefold.plan.mapping import OFFLOADED_OPTIMIZER, ParallelMapping


class OptimizerPrefetch:
    """The moments that are in memory at once while parameters are updated, one after another.

    Args:
        state_memory: of the model.
    """

    def __init__(self, state_memory: StateMemoryTable) -> None:
        self._state_memory = state_memory
        self._largest: dict[tuple[object, ...], list[int]] = {}

    def extra_bytes(self, mapping: ParallelMapping, state_counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes beside the states, [moments]; 0 where moments never leave, or are updated where they are.

        Args:
            mapping: the mapping.
            state_counts: what of the model the rank has, [moments, `MemoryColumns.state_size`].
        """
        found = np.zeros(len(state_counts))
        # Megatron-Core updates on the host.
        if OFFLOADED_OPTIMIZER not in mapping.offload or self._state_memory.workload.is_megatron:
            return found
        units = [(column, self._largest_of_unit(name, mapping)) for column, name in self._state_memory.units()]
        if self._state_memory.model_spec.has_second_embedding:
            # A second copy that follows the first has no moments; one alone does.
            units.append(
                (
                    self._state_memory.columns.state_column("second_embedding"),
                    self._largest_of_unit("embedding", mapping),
                )
            )
        rows, which = np.unique(state_counts[:, [column for column, _ in units]], axis=0, return_inverse=True)
        sums = np.array([_sum_of_largest(row, [sizes for _, sizes in units]) for row in rows], dtype=float)
        return sums[which.reshape(-1)]

    def _largest_of_unit(self, name: str | int, mapping: ParallelMapping) -> list[int]:
        """The largest of one unit."""
        key = (
            name,
            mapping.tp,
            mapping.ep,
            mapping.etp,
            *self._state_memory.sharding_degrees(mapping),
            mapping.world_size == 1,
        )
        if key not in self._largest:
            self._largest[key] = nlargest(PARAMS_IN_TRANSIT, self._state_memory.offloaded_sizes(name, mapping))
        return self._largest[key]


def _sum_of_largest(counts: NDArray[np.float64], sizes: Sequence[list[int]]) -> int:
    all_sizes = [
        size for count, unit in zip(counts, sizes, strict=True) for size in unit * min(int(count), PARAMS_IN_TRANSIT)
    ]
    return sum(nlargest(PARAMS_IN_TRANSIT, all_sizes))
