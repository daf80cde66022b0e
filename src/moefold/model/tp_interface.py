"""Two of the seams at which `parallelize` enters the maths, and what stands there on one rank.

A module sees tokens through `SequenceParallel` and the vocabulary through `VocabParallel`; the twins that communicate are in
`parallel/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.linear import LinearBackend, linear
from moefold.model.loss import chunked_cross_entropy, cross_entropy
from moefold.ops.gemm import TORCH_GEMM, Gemm


class SequenceParallel(ABC):
    """How the tokens of a context shard are spread over tensor-parallel ranks between the sub-layers."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """[S/(cp*tp), B, ...] of every tp rank -> [S/cp, B, ...]."""

    @abstractmethod
    def scatter(self, x: Tensor) -> Tensor:
        """Partial sums [S/cp, B, ...] of every tp rank -> my part of the sum, [S/(cp*tp), B, ...]."""

    def all_gather_linear(
        self,
        x: Tensor,
        weights_and_biases: Sequence[tuple[Tensor, Tensor | None]],
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
    ) -> list[Tensor]:
        """`gather`, and some linear layers of what it gives.

        Args:
            x: [S/(cp*tp), B, K].
            weights_and_biases: weight [N, K] and bias [N] of each layer.
            wgrad_store: as of `linear`.
            linear_backend: as of `linear`.

        Returns:
            [S/cp, B, N] of each.
        """
        x = self.gather(x)
        return [linear(x, weight, bias, wgrad_store, linear_backend) for weight, bias in weights_and_biases]

    def linear_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
    ) -> Tensor:
        """`scatter` of the product x [S/cp, B, K] @ weight.T, weight [N, K], a partial sum -> [S/(cp*tp), B, N]."""
        return self.scatter(linear(x, weight, None, wgrad_store, linear_backend))


class VocabParallel(Protocol):
    """How the rows of the embedding and of the output head are spread over tensor-parallel ranks."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of `weight` [V/tp, H] for tokens [...]; zeros for tokens of other ranks -> [..., H]."""
        ...

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token in nats, float32 or wider [...], from logits [..., V/tp] and labels [...]."""
        ...

    def chunked_cross_entropy(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        *,
        saves_exponentials: bool = False,
        gemm: Gemm = TORCH_GEMM,
    ) -> Tensor:
        """The same from hidden states [..., H] and the rows of the head [V/tp, H], `chunk` tokens at a time.

        `gemm` multiplies. Their logits are made again in the backward pass, unless it `saves_exponentials` the exponentials of all.
        """
        ...


class NoSequenceParallel(SequenceParallel):
    """One rank holds all tokens."""

    def gather(self, x: Tensor) -> Tensor:
        """Nothing to gather."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Nothing to sum."""
        return x


class NoVocabParallel:
    """One rank holds all rows."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Look the rows up."""
        return F.embedding(tokens, weight)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over all rows."""
        return cross_entropy(logits, labels)

    def chunked_cross_entropy(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        *,
        saves_exponentials: bool = False,
        gemm: Gemm = TORCH_GEMM,
    ) -> Tensor:
        """The same, some tokens at a time."""
        return chunked_cross_entropy(x, weight, labels, chunk, saves_exponentials=saves_exponentials, gemm=gemm)
