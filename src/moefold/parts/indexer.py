"""Selections of keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.indexer import IndexerFormula, IndexerPart


@dataclass(frozen=True, kw_only=True)
class LightningIndexerPart(IndexerPart, kind="lightning"):
    """The layer selects its keys by scores of a few heads (arXiv:2512.02556)."""

    def params(self, source: int, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `LightningIndexer`. See base class."""
        yield ParamSpec("wq", (self.num_heads * self.head_dim, source), "attention")
        yield ParamSpec("wk", (self.head_dim, hidden), "attention")
        yield ParamSpec("weights_proj", (self.num_heads, hidden), "attention", never_as_matrix=True)
        yield ParamSpec("key_norm.weight", (self.head_dim,), "norms", drawn="ones")
        yield ParamSpec("key_norm.bias", (self.head_dim,), "norms", drawn="zeros")

    def formula(self) -> IndexerFormula:
        """Return the positive products of each head's query with the key, weighted by the query's shares (eq. 1)."""

        def score(weights: Any, x: Any, source: Any, rotate: Callable[[Any], Any]) -> Any:
            key = x @ weights["wk"].T
            centered = key - key.mean(-1, keepdim=True)
            key = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            key = rotate(key * weights["key_norm.weight"] + weights["key_norm.bias"])
            shares = x @ weights["weights_proj"].T / math.sqrt(self.num_heads)
            scores = x.new_zeros(*x.shape[:2], x.shape[1])
            for head in range(self.num_heads):
                rows = slice(head * self.head_dim, (head + 1) * self.head_dim)
                dots = rotate(source @ weights["wq"][rows].T) @ key.mT / math.sqrt(self.head_dim)
                scores = scores + shares[..., head, None] * dots.clamp(min=0.0)
            return scores

        return score


@dataclass(frozen=True, kw_only=True)
class SharedSelectionPart(IndexerPart, kind="shared"):
    """The keys that the nearest indexer before the layer selected (arXiv:2603.12201)."""

    is_shared: ClassVar[bool] = True
