"""Which bytes of a file are in use: the room for what is offloaded, handed out and taken back. Without torch."""

import math
import threading
from bisect import insort
from collections import deque

ALIGNMENT_BYTES = 4096
"""Of the start of every extent: the block of file systems and the page of memory."""

ByteRange = tuple[int, int]


class Extent:
    """Bytes [start, stop) of the file, which are free again once nobody holds this object."""

    __slots__ = ("_freed", "start", "stop")

    def __init__(self, start: int, stop: int, freed: deque[ByteRange]) -> None:
        self.start = start
        self.stop = stop
        self._freed = freed

    def __del__(self) -> None:
        # Wherever the collector finds it, in a thread that holds the lock too: a deque takes it without one.
        self._freed.append((self.start, self.stop))


class FileAllocator:
    """Hands out extents, the smallest hole first that is large enough; for any number of threads.

    Args:
        limit_bytes: no extent ends beyond.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self._limit_bytes = limit_bytes
        self._end = 0
        self._free_ranges: list[ByteRange] = []
        self._freed: deque[ByteRange] = deque()
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        """Where the last extent ends."""
        with self._lock:
            self._reclaim()
            return self._end

    def allocate(self, num_bytes: int) -> Extent | None:
        """An extent of at least so many bytes, of which there is one or more, or None if there is no room."""
        num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._reclaim()
            spans = (*self._free_ranges, (self._end, self._end + num_bytes))
            fits = [span for span in spans if span[0] + num_bytes <= min(span[1], self._limit_bytes)]
            if not fits:
                return None
            start, stop = min(fits, key=lambda span: (span[0] == self._end, span[1] - span[0]))
            if start < self._end:
                self._free_ranges.remove((start, stop))
                if stop - start > num_bytes:
                    insort(self._free_ranges, (start + num_bytes, stop))
            else:
                self._end = stop
            return Extent(start, start + num_bytes, self._freed)

    def limit_to(self, offset: int) -> None:
        """From now on no extent ends beyond `offset`: the file holds no more."""
        with self._lock:
            self._limit_bytes = min(self._limit_bytes, offset)

    def _reclaim(self) -> None:
        while self._freed:
            insort(self._free_ranges, self._freed.popleft())
        joined: list[ByteRange] = []
        for start, stop in self._free_ranges:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        if joined and joined[-1][1] == self._end:
            self._end = joined.pop()[0]
        self._free_ranges = joined
