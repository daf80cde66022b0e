"""Choice between a kernel of whole layers and their modules, by the time that both take at a number of rows."""

import logging
import time
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

MAX_ROUNDS = 3
"""Timed runs of each, after one that allocates."""
MAX_ROUND_S = 0.02
"""Time from which one round is enough: noise is a small part of a long run."""
MODULES_GAIN = 0.95
"""Share of the kernel's time that modules may take at most: below it they are chosen. The kernel's results do not
depend on the number of rows, the results of library GEMMs may."""


class DecodeChoice:
    """The faster way to compute a layer, measured at the first pass of each number of rows; a power of two shares one.

    A choice holds as long as this object, which a model has for all its layers of a kind. So a run computes equal
    passes alike, though another run may choose otherwise.

    Args:
        clock: returns seconds; None: the CPU time of this thread, which other processes do not lengthen.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.thread_time
        self._is_whole: dict[tuple[Hashable, int], bool] = {}

    def picks_whole(
        self, kind: Hashable, num_rows: int, whole: Callable[[], object], modules: Callable[[], object]
    ) -> bool:
        """Return whether to compute a layer by the kernel; runs both if this is the first pass of such rows.

        Args:
            kind: of the layer; layers of a kind take equally long.
            num_rows: rows of the pass.
            whole: computes the layer by the kernel.
            modules: computes it by its modules.
        """
        key = kind, num_rows.bit_length()
        if key not in self._is_whole:
            whole_s, modules_s = self._measure(whole, modules)
            self._is_whole[key] = whole_s * MODULES_GAIN <= modules_s
            logger.info(
                "decoding a layer (%s) of %d rows takes %.3g ms in C and %.3g ms by modules: %s is chosen",
                *(kind, num_rows, 1e3 * whole_s, 1e3 * modules_s, "C" if self._is_whole[key] else "the modules"),
            )
        return self._is_whole[key]

    def _measure(self, *candidates: Callable[[], object]) -> list[float]:
        """Return the shortest time of each, run in turn."""
        for candidate in candidates:
            candidate()
        best = [float("inf")] * len(candidates)
        for _ in range(MAX_ROUNDS):
            for i, candidate in enumerate(candidates):
                begin = self._clock()
                candidate()
                best[i] = min(best[i], self._clock() - begin)
            if sum(best) > MAX_ROUND_S:
                break
        return best
