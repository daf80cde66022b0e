"""Which bytes of a file are in use: the room for what is offloaded, handed out and taken back. Without torch."""

import math
import threading
from bisect import insort
from collections import deque

ALIGNMENT_BYTES = 4096
"""Of the start of every extent: the block of file systems and the page of memory."""

Span = tuple[int, int]


class Extent:
    """Bytes [start, stop) of the file, which are free again once nobody holds this object."""

    __slots__ = ("_returned", "start", "stop")

    def __init__(self, start: int, stop: int, returned: deque[Span]) -> None:
        self.start = start
        self.stop = stop
        self._returned = returned

    def __del__(self) -> None:
        # Wherever the collector finds it, in a thread that holds the lock too: a deque takes it without one.
        self._returned.append((self.start, self.stop))


class Extents:
    """Hands out extents, the smallest hole first that is large enough; for any number of threads.

    Args:
        limit_bytes: no extent ends beyond.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self._limit_bytes = limit_bytes
        self._end = 0
        self._holes: list[Span] = []
        self._returned: deque[Span] = deque()
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        """Where the last extent ends."""
        with self._lock:
            self._take_back()
            return self._end

    def take(self, num_bytes: int) -> Extent | None:
        """An extent of at least so many bytes, of which there is one or more, or None if there is no room."""
        num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._take_back()
            spans = (*self._holes, (self._end, self._end + num_bytes))
            fits = [span for span in spans if span[0] + num_bytes <= min(span[1], self._limit_bytes)]
            if not fits:
                return None
            start, stop = min(fits, key=lambda span: (span[0] == self._end, span[1] - span[0]))
            if start < self._end:
                self._holes.remove((start, stop))
                if stop - start > num_bytes:
                    insort(self._holes, (start + num_bytes, stop))
            else:
                self._end = stop
            return Extent(start, start + num_bytes, self._returned)

    def stop_at(self, offset: int) -> None:
        """From now on no extent ends beyond `offset`: the file holds no more."""
        with self._lock:
            self._limit_bytes = min(self._limit_bytes, offset)

    def _take_back(self) -> None:
        while self._returned:
            insort(self._holes, self._returned.popleft())
        joined: list[Span] = []
        for start, stop in self._holes:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        if joined and joined[-1][1] == self._end:
            self._end = joined.pop()[0]
        self._holes = joined
