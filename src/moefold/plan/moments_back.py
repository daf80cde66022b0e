"""What an update brings back of the moments that live outside of memory, by the runtime's formula. Torch-free."""

from collections.abc import Sequence
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from moefold.metrics.moments_away import AT_ONCE
from moefold.plan.held_states import HeldStates
from moefold.plan.mapping import OPTIMIZER, Mapping


class MomentsBack:
    """The moments that are in memory at once while parameters are updated, one after another.

    Args:
        states: of the model.
    """

    def __init__(self, states: HeldStates) -> None:
        self._states = states
        self._largest: dict[tuple[object, ...], list[int]] = {}

    def at(self, m: Mapping, held: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes beside the states, [moments]; 0 where moments never leave, or are updated where they are.

        Args:
            m: the mapping.
            held: what of the model the rank has, [moments, `Columns.state_size`].
        """
        found = np.zeros(len(held))
        # Megatron-Core updates on the host.
        if OPTIMIZER not in m.offload or self._states.workload.is_megatron:
            return found
        units = [(column, self._of_unit(name, m)) for column, name in self._states.units()]
        if self._states.shape.embeds_twice:
            # A second copy that follows the first has no moments; one alone does.
            units.append((self._states.columns.state("second_embedding"), self._of_unit("embedding", m)))
        rows, which = np.unique(held[:, [column for column, _ in units]], axis=0, return_inverse=True)
        sums = np.array([_sum_of_largest(row, [sizes for _, sizes in units]) for row in rows], dtype=float)
        return sums[which.reshape(-1)]

    def _of_unit(self, name: str | int, m: Mapping) -> list[int]:
        """The largest of one unit."""
        key = (name, m.tp, m.ep, m.etp, *self._states.degrees(m), m.world_size == 1)
        if key not in self._largest:
            self._largest[key] = nlargest(AT_ONCE, self._states.sizes_away(name, m))
        return self._largest[key]


def _sum_of_largest(counts: NDArray[np.float64], sizes: Sequence[list[int]]) -> int:
    all_sizes = [size for count, unit in zip(counts, sizes, strict=True) for size in unit * min(int(count), AT_ONCE)]
    return sum(nlargest(AT_ONCE, all_sizes))
