"""The fastest mapping of one fold that fits, found a step at a time. Torch-free.

`search.py` says what is left out, and why.
"""

from heapq import heapify, heappop, heappush
from math import inf

from moefold.plan.pipeline_choice import Base, FoldPrices, Opened, PipelineChoice, Portion, Timed
from moefold.plan.space import Fold

_Entry = tuple[float, int, int, int]
"""Seconds at least; numbers of a base, of a portion of its savers, and of a pipeline; -1: none is chosen yet."""


class FoldSearch:
    """Best first: bases unfold into portions of savers, these into pipelines, and what may fit is priced.

    Args:
        prices: of the space.
        fold: the degrees.
        bases: of the fold.
    """

    def __init__(self, prices: FoldPrices, fold: Fold, bases: tuple[Base, ...]) -> None:
        self._prices, self._fold, self._bases = prices, fold, bases
        self._beside: dict[int, float] = {}
        self._portions: dict[int, list[Portion]] = {}
        self._opened: dict[tuple[int, int], Opened] = {}
        self._choices: dict[tuple[int, int, int], PipelineChoice] = {}
        self._queue: list[_Entry] = [(base.floor_s, i, -1, -1) for i, base in enumerate(bases)]
        heapify(self._queue)
        self.best: Timed | None = None
        """The fastest so far."""

    @property
    def least_s(self) -> float:
        """Seconds at least of the fastest mapping that fits; inf if none is left."""
        left = self._queue[0][0] if self._queue else inf
        return min(left, self._best_s)

    @property
    def is_through(self) -> bool:
        """Whether `best` is the fastest of all."""
        return not self._queue or self._queue[0][0] >= self._best_s

    @property
    def _best_s(self) -> float:
        return self.best[0] if self.best else inf

    def finish(self, limit: float = inf, *, is_enough: bool = False) -> Timed | None:
        """The fastest below a limit, or any below it where one is enough; None if there is none."""
        while not self.is_through and self.least_s < limit and not (is_enough and self.best):
            self.advance(limit)
        return self.best

    def advance(self, limit: float = inf) -> None:
        """Look further into what may be fastest, if it may be below a limit."""
        floor, i, part, which = heappop(self._queue)
        limit, base = min(limit, self._best_s), self._bases[i]
        if part < 0 and i not in self._beside:
            least, self._beside[i] = self._prices.least_plain(self._fold, base)
            self._push(least, floor, (i, -1, -1), limit)
        elif part < 0:
            self._portions[i] = self._prices.portions(self._fold, base, self._beside[i], limit)
            if self._portions[i]:
                self._push(self._portions[i][0].least, floor, (i, 0, -1), limit)
        elif which < 0:
            self._open(floor, i, part, limit)
        elif (i, part, which) not in self._choices:
            choice = PipelineChoice(self._prices, self._fold, self._opened[i, part], which)
            self._choices[i, part, which] = choice
            self._push(choice.least(limit), floor, (i, part, which), limit)
        elif (found := self._choices.pop((i, part, which)).fastest(limit)) is not None:
            self.best = found

    def _open(self, floor: float, i: int, part: int, limit: float) -> None:
        """Price the pipelines with a portion of the savers; the next portion waits for its turn."""
        portions = self._portions[i]
        opened = self._prices.open(self._fold, self._bases[i], portions[part].below(limit))
        self._opened[i, part] = opened
        for number, least in enumerate(opened.least):
            self._push(least, floor, (i, part, number), limit)
        if part + 1 < len(portions):
            self._push(portions[part + 1].least, floor, (i, part + 1, -1), limit)

    def _push(self, least_s: float, floor: float, place: tuple[int, int, int], limit: float) -> None:
        if least_s < limit:
            heappush(self._queue, (max(floor, least_s), *place))
