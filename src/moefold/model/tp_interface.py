"""Interfaces of tensor and context parallelism.

The base classes are their implementations on one rank. A module handles sequence shards through `SequenceParallel` and
vocabulary shards through `VocabParallel`. The communicating implementations are in `moefold.parallel`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.linear import LinearBackend, UnquantizedLinear, linear
from moefold.model.loss import FULL_VOCAB, VocabRange


class SequenceParallel:
    """Sequence parallelism: tokens of a context shard are sharded over tp between the sub-layers. Here tp is 1."""

    def split_unevenly(self, num_tokens: int) -> int:
        """Shard S/cp tokens in the next passes, which tp need not divide, and return the number of this rank's.

        The first ranks hold one token more, some maybe none.
        """
        return num_tokens

    def split_evenly(self) -> None:
        """Shard tokens in equal parts, as at the beginning."""

    def gather(self, x: Tensor) -> Tensor:
        """Gather tokens: [S/(cp*tp), B, ...] of every tp rank -> [S/cp, B, ...]."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter partial sums [S/cp, B, ...] of every tp rank -> this rank's [S/(cp*tp), B, ...]."""
        return x

    def local_rows(self, x: Tensor) -> Tensor:
        """Return the rows of this rank's own tokens of a tensor that every rank has, [S/cp, ...], by itself."""
        return x

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


class ContextParallel:
    """Context parallelism for losses: each rank of a group has a part of every sample's tokens. Here cp is 1."""

    size = 1
    """Number of ranks that share a sample, cp."""

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Sum a tensor over these ranks, on each of them. The gradient is the sum of the ranks' gradients."""
        return x


class SampleShards:
    """Tokens of samples that are sharded over cp, for layers that need all keys or earlier tokens. Here cp is 1.

    A rank has some segments of consecutive tokens of each sample, all of equal length.
    """

    num_segments = 1
    """Segments of this rank, n."""
    initial_state: Callable[[Tensor, Tensor], Tensor] | None = None
    """The states before the segments, which count as samples: a batch of n*B. See `InitialState`. None means zeros."""

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in their sample, int64 [num_tokens]."""
        return torch.arange(num_tokens, device=device)

    def gather(self, x: Tensor) -> Tensor:
        """Gather tokens in the order of the sample, [S/cp, ...] -> [S, ...]. Gradients of all ranks are summed."""
        return x

    def previous_tokens(self, x_SBC: Tensor, num_tokens: int) -> Tensor:
        """Return the tokens right before each segment, [num_tokens, n*B, C], given the segments [S, n*B, C]."""
        return x_SBC.new_zeros(num_tokens, *x_SBC.shape[1:])


class VocabParallel:
    """Vocabulary parallelism: rows of the embedding and of the output head are sharded over tp. Here tp is 1."""

    vocab_range: VocabRange = FULL_VOCAB
    """Rows of this rank, for the cross-entropy over all rows."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Look up rows of `weight` [V/tp, H] for tokens [...] -> [..., H], or zeros for tokens of other ranks."""
        return F.embedding(tokens, weight)

    def gather(self, logits: Tensor) -> Tensor:
        """Gather logits [..., V/tp] of every tp rank -> [..., V]. Each rank's loss must be a copy of one loss."""
        return logits
