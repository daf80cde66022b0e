"""Work on many things by turns, each turn bounded in size. Torch-free."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batch_by_size(items: Iterable[T], size: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Cut a sequence into runs of neighbours whose sizes add up to at most `max_size`, or of one item that is larger."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > max_size:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
