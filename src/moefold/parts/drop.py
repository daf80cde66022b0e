"""Orders of the tokens that an expert keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.drop import DropPart, QueueEntry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DropByPosition(DropPart, kind="position"):
    """Keep the first tokens by position: later tokens do not change which tokens are dropped."""

    def order(self, ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
        """Return the order by expert and index. See base class."""
        return by_index[ids[by_index].argsort(stable=True)]

    def formula(self) -> Callable[[list[QueueEntry]], list[QueueEntry]]:
        """Return the order by index."""
        return lambda queue: sorted(queue, key=lambda entry: entry[1:])


@dataclass(frozen=True, kw_only=True)
class DropByProbability(DropPart, kind="probs"):
    """Keep the most probable tokens, ties by position: a later token may displace an earlier token."""

    def order(self, ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
        """Return the order by expert, probability and index. See base class."""
        return _order_by_probability(ids, probs, by_index)

    def formula(self) -> Callable[[list[QueueEntry]], list[QueueEntry]]:
        """Return the order by probability, ties by index."""
        return _by_probability


def _order_by_probability(ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
    """Return the order by expert, then descending probability, ties by index. For arguments see `DropPart.order`.

    Probabilities are tied if neighbours in their order differ by no more than the tolerance. Tokens with equal context,
    such as the first tokens of samples, have equal probabilities in exact arithmetic, and each mapping rounds them
    differently: without the tolerance each mapping would keep different tokens.
    """
    import torch

    # Relative difference: far above the rounding error of the dtype, far below the differences between tokens.
    tolerance = {torch.float64: 2.0**-36, torch.float32: 2.0**-19}[probs.dtype]
    order = by_index[probs[by_index].argsort(descending=True, stable=True)]
    order = order[ids[order].argsort(stable=True)]
    sorted_ids = ids[order]
    sorted_probs = probs[order]
    gaps = sorted_probs[:-1] - sorted_probs[1:]
    is_apart = (gaps > tolerance * sorted_probs[:-1].abs()) | (sorted_ids[1:] != sorted_ids[:-1])
    tie = torch.nn.functional.pad(is_apart.long().cumsum(0), (1, 0))
    rank = torch.empty_like(by_index)
    rank[by_index] = torch.arange(len(by_index), device=by_index.device)
    return order[(tie * len(by_index) + rank[order]).argsort()]


def _by_probability(queue: list[QueueEntry]) -> list[QueueEntry]:
    """Sort a queue by descending probability. Neighbours that differ by at most 2**-36 of them are sorted by index."""
    ties: list[tuple[int, QueueEntry]] = []
    tie = 0
    last = None
    for entry in sorted(queue, key=lambda entry: (-entry[0], entry[1:])):
        if last is not None and last - entry[0] > 2.0**-36 * abs(last):
            tie += 1
        last = entry[0]
        ties.append((tie, entry))
    return [entry for _, entry in sorted(ties, key=lambda pair: (pair[0], pair[1][1:]))]
