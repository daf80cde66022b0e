"""Split a list of units into the stages of a pipeline, balanced over its ranks."""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

Bounds = NDArray[np.int64]
Key = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
"""Function of the FLOPs and the bytes of the ranks of many splits, [splits, ranks] each. It returns the columns of a
sort key, most important first. The smallest row is the best split."""

PATIENCE = 32
"""Moves without a better split after which the search ends."""
MAX_STAGES = 16
"""Number of stages up to which every rank may lose a unit. With more, only the busiest and the fullest may."""


def split_units(
    flops: Sequence[float],
    ranks: Sequence[int],
    sizes: Sequence[Sequence[float]] = (),
    max_slowdown_pct: int = 0,
) -> list[int]:
    """Return the bounds of consecutive non-empty stages that minimise the FLOPs of the busiest rank.

    Units are dealt one by one to the least busy rank. Where all units but the first and the last are equal no split is
    better: the excess of the busiest rank is a maximum of sums that grow by equal steps. Otherwise units are moved
    between stages. Tests compare with all splits of small models.

    Args:
        flops: FLOPs of the units in model order: the embedding, each layer, and the loss with MTP. They are as many
            as stages or more.
        ranks: the pipeline rank of each stage.
        sizes: bytes of the units on each stage. With them the split minimises the product of the busiest rank's squared
            FLOPs and the fullest rank's bytes instead.
        max_slowdown_pct: with sizes, the allowed excess over the least FLOPs, in per cent.
    """
    assert len(flops) >= len(ranks), (len(flops), len(ranks))
    if len(ranks) == 1:
        return [0, len(flops)]
    units = _Units(flops, ranks, sizes)
    bounds = units.assign_greedily()
    if len(set(flops[1:-1])) > 1:
        bounds = units.tabu_search(bounds, _fastest)
    if not sizes:
        return list(map(int, bounds))
    limit = float(units.loads(bounds[None])[0].max()) * (1 + max_slowdown_pct / 100)

    def lightest(work: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
        pace = work.max(1)
        product = np.where(pace <= limit, pace * pace * size.max(1), inf)
        return np.stack([product, pace, (size**2).sum(1), (work**2).sum(1)], 1)

    return list(map(int, units.tabu_search(bounds, lightest)))


def _fastest(work: NDArray[np.float64], _: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([work.max(1), (work**2).sum(1)], 1)


class _Units:
    """Units of a model, and the ranks of its stages."""

    def __init__(self, flops: Sequence[float], ranks: Sequence[int], sizes: Sequence[Sequence[float]]) -> None:
        self._flops = flops
        self._ranks = ranks
        # Scaled, so that the squares of all sums are exact enough to compare.
        self._sums = np.array([0.0, *accumulate(flops)]) / (sum(flops) or 1.0)
        self._size_sums = np.array([[0.0, *accumulate(size)] for size in sizes or [[0.0] * len(flops)] * len(ranks)])
        self._size_sums /= self._size_sums.max() or 1.0
        self._placed = np.eye(max(ranks) + 1)[list(ranks)]
        self._stages = np.arange(len(ranks))

    def loads(self, bounds: Bounds) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the shares of FLOPs and bytes of each rank, [splits, ranks], of bounds [splits, stages + 1]."""
        first = bounds[:, :-1]
        stop = bounds[:, 1:]
        work = self._sums[stop] - self._sums[first]
        size = self._size_sums[self._stages, stop] - self._size_sums[self._stages, first]
        return work @ self._placed, size @ self._placed

    def assign_greedily(self) -> Bounds:
        """Return one unit for each stage, and every further one for the least busy rank, in its shortest stage."""
        flops = self._flops
        mean = sum(flops[1:-1]) / max(1, len(flops) - 2)
        counts = [1] * len(self._ranks)
        loads = [flops[0], *[mean] * (len(counts) - 2), flops[-1]]
        of_rank: dict[int, list[int]] = {}
        for stage, rank in enumerate(self._ranks):
            of_rank.setdefault(rank, []).append(stage)
        # Equal ranks: the last one first, which has the fewest micro-batches in flight.
        queue = [(sum(loads[stage] for stage in own), -rank) for rank, own in of_rank.items()]
        heapify(queue)
        for _ in range(len(flops) - len(counts)):
            busy, rank = queue[0]
            stage = min(of_rank[-rank], key=loads.__getitem__)
            counts[stage] += 1
            loads[stage] += mean
            heapreplace(queue, (busy + mean, rank))
        return np.array([0, *accumulate(counts)])

    def tabu_search(self, bounds: Bounds, key: Key) -> Bounds:
        """Return the best of the splits that a tabu search visits: each step takes the best move to a new split."""
        best = _rounded(key(*self.loads(bounds[None])))[0]
        found = bounds
        seen = {bounds.tobytes()}
        patience = PATIENCE
        while patience:
            tried = self._moves(bounds, *self.loads(bounds[None]))
            keys = _rounded(key(*self.loads(tried)))
            order = np.lexsort(keys.T[::-1])
            new = next((i for i in order if tried[i].tobytes() not in seen), None)
            if new is None:
                break
            bounds = tried[new]
            seen.add(bounds.tobytes())
            patience -= 1
            if tuple(keys[new]) < tuple(best):
                best = keys[new]
                found = bounds
                patience = PATIENCE
        return found

    def _moves(self, bounds: Bounds, work: NDArray[np.float64], size: NDArray[np.float64]) -> Bounds:
        """Return the bounds after each move of one unit to another stage, along the stages in between.

        In a long pipeline only the busiest and the fullest rank lose units.
        """
        counts = np.diff(bounds)
        sources = self._stages
        if len(sources) > MAX_STAGES:
            sources = np.flatnonzero(np.isin(self._ranks, (work[0].argmax(), size[0].argmax())))
        source, target, bound = np.ix_(sources[counts[sources] > 1], self._stages, np.arange(len(bounds)))
        later = (target < bound) & (bound <= source)
        earlier = (source < bound) & (bound <= target)
        moved = bounds + later - earlier.astype(bounds.dtype)
        return np.concatenate([bounds[None], moved.reshape(-1, len(bounds))])


def _rounded(keys: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return keys without the noise of their sums."""
    return np.round(keys, 12)
