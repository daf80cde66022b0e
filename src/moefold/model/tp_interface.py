"""Interfaces of tensor and context parallelism, and their implementations for one rank.

A module handles sequence shards through `SequenceParallel` and vocabulary shards through `VocabParallel`; the
communicating implementations are in `moefold.parallel`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.linear import LinearBackend, UnquantizedLinear, linear
from moefold.model.loss import FULL_VOCAB, VocabRange


class SequenceParallel(ABC):
    """Sequence parallelism: tokens of a context shard are sharded over tp between the sub-layers."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Gather tokens: [S/(cp*tp), B, ...] of every tp rank -> [S/cp, B, ...]."""

    @abstractmethod
    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter partial sums [S/cp, B, ...] of every tp rank -> this rank's [S/(cp*tp), B, ...]."""

    @abstractmethod
    def own_rows(self, x: Tensor) -> Tensor:
        """Return the rows of this rank's own tokens of a tensor that every rank has, [S/cp, ...]; no communication."""

    def all_gather_linear(
        self,
        x: Tensor,
        weights_and_biases: Sequence[tuple[Tensor, Tensor | None]],
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
        num_unquantized: int = 0,
    ) -> list[Tensor]:
        """Apply linear layers to the gathered tokens.

        Args:
            x: [S/(cp*tp), B, K].
            weights_and_biases: weight [N, K] and bias [N] of each layer.
            wgrad_store: see `linear`.
            linear_backend: see `linear`.
            num_unquantized: number of the last layers, whose GEMMs are always in the dtype of x.

        Returns:
            [S/cp, B, N] for each layer.
        """
        x = self.gather(x)
        is_exact = linear_backend is None or isinstance(linear_backend, UnquantizedLinear)
        backends = [linear_backend] * len(weights_and_biases)
        if num_unquantized and not is_exact:
            backends[-num_unquantized:] = [None] * num_unquantized
        return [
            linear(x, weight, bias, wgrad_store, backend)
            for (weight, bias), backend in zip(weights_and_biases, backends, strict=True)
        ]

    def linear_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
    ) -> Tensor:
        """Compute x [S/cp, B, K] @ weight.T, weight [N, K], and reduce-scatter it over tp -> [S/(cp*tp), B, N]."""
        return self.scatter(linear(x, weight, None, wgrad_store, linear_backend))


class ContextParallel(Protocol):
    """Context parallelism for losses: each rank of a group has a part of every sample's tokens."""

    @property
    def size(self) -> int:
        """Number of ranks that share a sample, cp."""
        ...

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Sum a tensor over these ranks, on each of them; the gradient is the sum of the ranks' gradients."""
        ...


class NoContextParallel:
    """No context parallelism: one rank has all tokens of a sample."""

    size = 1

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x


class VocabParallel(Protocol):
    """Vocabulary parallelism: rows of the embedding and of the output head are sharded over tp."""

    @property
    def vocab_range(self) -> VocabRange:
        """Rows of this rank, for the cross-entropy over all rows."""
        ...

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Look up rows of `weight` [V/tp, H] for tokens [...] -> [..., H]; zeros for tokens of other ranks."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Gather logits [..., V/tp] of every tp rank -> [..., V]; each rank's loss must be a copy of one loss."""
        ...


class NoSequenceParallel(SequenceParallel):
    """No sequence parallelism: one rank holds all tokens."""

    def gather(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x

    def own_rows(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x


class NoVocabParallel:
    """No vocabulary parallelism: one rank holds all rows."""

    vocab_range = FULL_VOCAB

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Look up the rows of tokens."""
        return F.embedding(tokens, weight)

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits, which are complete."""
        return logits
