"""The fastest mapping of one fold that fits, found a step at a time. Torch-free.

`search.py` says what is left out, and why.
"""

from heapq import heapify, heappop, heappush
from math import inf

from moefold.plan.pipeline_choice import (
    FoldCosts,
    MicroBatchChoice,
    PipelineChoice,
    PricedChoice,
    StrategyBatch,
    TimedMapping,
)
from moefold.plan.space import Fold

_QueueEntry = tuple[float, int, int, int]
"""Seconds at least; numbers of a base, of a portion of its savers, and of a pipeline; -1: none is chosen yet."""


class FoldSearch:
    """Best first: bases unfold into portions of savers, these into pipelines, and what may fit is priced.

    Args:
        fold_costs: of the space.
        fold: the degrees.
        choices: of the fold.
    """

    def __init__(self, fold_costs: FoldCosts, fold: Fold, choices: tuple[MicroBatchChoice, ...]) -> None:
        self._fold_costs, self._fold, self._micro_batch_choices = fold_costs, fold, choices
        self._sends_and_bubble_s: dict[int, float] = {}
        self._strategy_batches: dict[int, list[StrategyBatch]] = {}
        self._priced_choices: dict[tuple[int, int], PricedChoice] = {}
        self._pipeline_choices: dict[tuple[int, int, int], PipelineChoice] = {}
        self._queue: list[_QueueEntry] = [(base.lower_bound_s, i, -1, -1) for i, base in enumerate(choices)]
        heapify(self._queue)
        self.best: TimedMapping | None = None
        """The fastest so far."""

    @property
    def lower_bound_s(self) -> float:
        """Seconds at least of the fastest mapping that fits; inf if none is left."""
        left = self._queue[0][0] if self._queue else inf
        return min(left, self._best_s)

    @property
    def is_finished(self) -> bool:
        """Whether `best` is the fastest of all."""
        return not self._queue or self._queue[0][0] >= self._best_s

    @property
    def _best_s(self) -> float:
        return self.best[0] if self.best else inf

    def finish(self, limit: float = inf, *, stop_at_first: bool = False) -> TimedMapping | None:
        """The fastest below a limit, or any below it where one is enough; None if there is none."""
        while not self.is_finished and self.lower_bound_s < limit and not (stop_at_first and self.best):
            self.advance(limit)
        return self.best

    def advance(self, limit: float = inf) -> None:
        """Look further into what may be fastest, if it may be below a limit."""
        floor, i, part, which = heappop(self._queue)
        limit, base = min(limit, self._best_s), self._micro_batch_choices[i]
        if part < 0 and i not in self._sends_and_bubble_s:
            least, self._sends_and_bubble_s[i] = self._fold_costs.lower_bound_plain(self._fold, base)
            self._push(least, floor, (i, -1, -1), limit)
        elif part < 0:
            self._strategy_batches[i] = self._fold_costs.strategy_batches(
                self._fold, base, self._sends_and_bubble_s[i], limit
            )
            if self._strategy_batches[i]:
                self._push(self._strategy_batches[i][0].lower_bound_s, floor, (i, 0, -1), limit)
        elif which < 0:
            self._price_batch(floor, i, part, limit)
        elif (i, part, which) not in self._pipeline_choices:
            choice = PipelineChoice(self._fold_costs, self._fold, self._priced_choices[i, part], which)
            self._pipeline_choices[i, part, which] = choice
            self._push(choice.lower_bound_s(limit), floor, (i, part, which), limit)
        elif (found := self._pipeline_choices.pop((i, part, which)).fastest(limit)) is not None:
            self.best = found

    def _price_batch(self, lower_bound: float, i: int, batch: int, limit: float) -> None:
        """Price the pipelines with a portion of the savers; the next portion waits for its turn."""
        portions = self._strategy_batches[i]
        opened = self._fold_costs.price_choice(self._fold, self._micro_batch_choices[i], portions[batch].below(limit))
        self._priced_choices[i, batch] = opened
        for number, least in enumerate(opened.lower_bounds_s):
            self._push(least, lower_bound, (i, batch, number), limit)
        if batch + 1 < len(portions):
            self._push(portions[batch + 1].lower_bound_s, lower_bound, (i, batch + 1, -1), limit)

    def _push(self, lower_bound_s: float, min_lower_bound: float, indices: tuple[int, int, int], limit: float) -> None:
        if lower_bound_s < limit:
            heappush(self._queue, (max(min_lower_bound, lower_bound_s), *indices))
