"""Two of the seams at which `parallelize` enters the maths, and what stands there on one rank.

A module sees tokens through `Tokens` and the vocabulary through `Vocabulary`; the twins that communicate are in
`parallel/`.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moefold.model.cross_entropy import chunked_cross_entropy, cross_entropy


class Tokens(Protocol):
    """How the tokens of a context shard are spread over tensor-parallel ranks between the sub-layers."""

    def gather(self, x: Tensor) -> Tensor:
        """[S/(cp*tp), B, ...] of every tp rank -> [S/cp, B, ...]."""
        ...

    def scatter(self, x: Tensor) -> Tensor:
        """Partial sums [S/cp, B, ...] of every tp rank -> my part of the sum, [S/(cp*tp), B, ...]."""
        ...


class Vocabulary(Protocol):
    """How the rows of the embedding and of the output head are spread over tensor-parallel ranks."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` [V/tp, H] for tokens [...]; zeros for tokens of other ranks -> [..., H]."""
        ...

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token in nats, float32 or wider [...], from logits [..., V/tp] and labels [...]."""
        ...

    def chunked_cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, *, keeps: bool = False
    ) -> Tensor:
        """The same from hidden states [..., H] and the rows of the head [V/tp, H], `chunk` tokens at a time.

        Their logits are made again in the backward pass, unless it `keeps` the exponentials of all.
        """
        ...


class WholeTokens:
    """One rank holds all tokens."""

    def gather(self, x: Tensor) -> Tensor:
        """Nothing to gather."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Nothing to sum."""
        return x


class WholeVocabulary:
    """One rank holds all rows."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Look the rows up."""
        return F.embedding(tokens, weight)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over all rows."""
        return cross_entropy(logits, labels)

    def chunked_cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, *, keeps: bool = False
    ) -> Tensor:
        """The same, some tokens at a time."""
        return chunked_cross_entropy(x, weight, labels, chunk, keeps=keeps)
