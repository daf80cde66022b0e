"""Random permutation of sample indices without memory: an element is a function of its index."""

from math import isqrt

from moefold.integer_hash import hash_ints, splitmix64

_ROUNDS = 8


class IndexShuffle:
    """A seeded bijection of [0, length), evaluated one index at a time.

    A generalised Feistel network over a grid just larger than the length. Indices outside the range are permuted again
    until they are inside (cycle walking: Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9).
    """

    def __init__(self, length: int, key: int) -> None:
        """Select the permutation of [0, length) for a 64-bit key."""
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        self.length = length
        self._rows = isqrt(length - 1) + 1
        self._columns = -(-length // self._rows)
        self._round_keys = tuple(hash_ints(key, i) for i in range(_ROUNDS))

    def __call__(self, index: int) -> int:
        """Return the image of one index. Raises IndexError if the index is outside [0, length)."""
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is outside [0, {self.length})")
        image = self._scramble(index)
        while image >= self.length:
            image = self._scramble(image)
        return image

    def _scramble(self, index: int) -> int:
        row, column = divmod(index, self._columns)
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                row = (row + splitmix64(key ^ column)) % self._rows
            else:
                column = (column + splitmix64(key ^ row)) % self._columns
        return row * self._columns + column


class EpochOrder:
    """Order of the members of a part of the data, by their index in the run. Each epoch has another shuffle."""

    def __init__(self, length: int, key: int | None) -> None:
        """Select the orders by a 64-bit key. None means the order of the data, in every epoch."""
        self._length = length
        self._key = key
        self._shuffled: tuple[int, IndexShuffle] | None = None

    def __call__(self, index: int) -> int:
        """Return the member at an index of the run, in [0, length)."""
        epoch, place = divmod(index, self._length)
        if self._key is None:
            return place
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = (epoch, IndexShuffle(self._length, hash_ints(self._key, epoch)))
        return self._shuffled[1](place)
