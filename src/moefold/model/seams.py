"""Two of the seams at which `parallelize` enters the maths, and what stands there on one rank.

A module sees tokens through `Tokens` and the vocabulary through `Vocabulary`; the twins that communicate are in
`parallel/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moefold.model.cross_entropy import chunked_cross_entropy, cross_entropy
from moefold.model.gemm import LIBRARY, Gemm
from moefold.model.later import Later
from moefold.model.linear import Products, linear


class Tokens(ABC):
    """How the tokens of a context shard are spread over tensor-parallel ranks between the sub-layers."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """[S/(cp*tp), B, ...] of every tp rank -> [S/cp, B, ...]."""

    @abstractmethod
    def scatter(self, x: Tensor) -> Tensor:
        """Partial sums [S/cp, B, ...] of every tp rank -> my part of the sum, [S/(cp*tp), B, ...]."""

    def gathered_products(
        self,
        x: Tensor,
        columns: Sequence[tuple[Tensor, Tensor | None]],
        later: Later | None = None,
        products: Products | None = None,
    ) -> list[Tensor]:
        """`gather`, and some linear layers of what it gives.

        Args:
            x: [S/(cp*tp), B, K].
            columns: weight [N, K] and bias [N] of each layer.
            later: as of `linear`.
            products: as of `linear`.

        Returns:
            [S/cp, B, N] of each.
        """
        x = self.gather(x)
        return [linear(x, weight, bias, later, products) for weight, bias in columns]

    def scattered_product(
        self, x: Tensor, weight: Tensor, later: Later | None = None, products: Products | None = None
    ) -> Tensor:
        """`scatter` of the product x [S/cp, B, K] @ weight.T, weight [N, K], a partial sum -> [S/(cp*tp), B, N]."""
        return self.scatter(linear(x, weight, None, later, products))


class Vocabulary(Protocol):
    """How the rows of the embedding and of the output head are spread over tensor-parallel ranks."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` [V/tp, H] for tokens [...]; zeros for tokens of other ranks -> [..., H]."""
        ...

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token in nats, float32 or wider [...], from logits [..., V/tp] and labels [...]."""
        ...

    def chunked_cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, *, keeps: bool = False, gemm: Gemm = LIBRARY
    ) -> Tensor:
        """The same from hidden states [..., H] and the rows of the head [V/tp, H], `chunk` tokens at a time.

        `gemm` multiplies. Their logits are made again in the backward pass, unless it `keeps` the exponentials of all.
        """
        ...


class WholeTokens(Tokens):
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
        self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, *, keeps: bool = False, gemm: Gemm = LIBRARY
    ) -> Tensor:
        """The same, some tokens at a time."""
        return chunked_cross_entropy(x, weight, labels, chunk, keeps=keeps, gemm=gemm)
