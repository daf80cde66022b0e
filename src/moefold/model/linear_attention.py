"""Base class of the layers "linear": training over whole sequences or segments of them, decoding from cached states.

The recurrences are in `ops/linear_attention.py`, the layers in `parts/attention/`. A rank computes whole heads of whole
sequences, or under context parallelism of some segments of them, whose initial states come from `SampleShards`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from moefold.model.activation_checkpoint import checkpoint_wrapper
from moefold.model.attention import TokenMixer
from moefold.model.layer_cache import CacheSize, CurrentPass, LayerCache
from moefold.model.linear import UnquantizedLinear, linear
from moefold.model.local_param import local_param
from moefold.model.recurrent_cache import RecurrentStates, StateShapes
from moefold.model.tp_interface import SampleShards
from moefold.ops.documents import PackedDocuments
from moefold.ops.linear_attention import ChunkedLinearAttention, recurrent_linear_attention
from moefold.ops.rope import NoRope, Rope

Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Compute outputs [S, B, A, Dv] and the last states from q, k, v, the log decay and the write strength or None."""


@dataclass(frozen=True)
class PrecedingTokens:
    """Tokens, counts and states before the tokens [S, B, ...] of one computation."""

    previous_KBC: Tensor
    """Inputs of the convolutions, [K-1, B, C]."""
    num_previous_SB: Tensor
    """Earlier tokens of each token's document, int64 [S, B]."""
    recurrence: Recurrence
    """The recurrence, from the states after the preceding tokens."""


class LinearAttention(TokenMixer):
    """Base class of the layers "linear": recurrences of linear attention, and convolutions.

    A subclass declares its weights and implements `project`, `core_weights`, `state_shapes` and `compute`, and also
    `convolved` if it has a convolution. `parallelize` also replaces `shards` (context parallelism). `compute` is always
    recomputed in the backward pass: it would save about twenty numbers for each input.
    """

    fused_refusal: ClassVar[str] = "linear attention"
    wo: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.shards = SampleShards()
        self.state_cache: RecurrentStates | None = None

    def open_caches(self, current_pass: CurrentPass, size: CacheSize) -> list[LayerCache]:
        """Continue from the states of each row's sample. See base class."""
        self.state_cache = RecurrentStates(current_pass)
        return [self.state_cache]

    def close_caches(self) -> None:
        """Begin from zeros. See base class."""
        self.state_cache = None

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the projections of the gathered tokens, [S/cp, B, ...] each, from x [S/(cp*tp), B, H]."""

    @abstractmethod
    def core_weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the local weights of `compute`."""

    @abstractmethod
    def state_shapes(self, weights: Sequence[Tensor]) -> StateShapes:
        """Return the shapes of the cached tensors of one sample, given the local weights of `compute`."""

    @abstractmethod
    def compute(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], preceding: PrecedingTokens
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer between its projections. It communicates only the initial states.

        Args:
            projected: as `project` returns them, [S, B, ...] each, with segments or samples in B.

        Returns:
            The input of the output projection, [S, B, A/tp * Dv], in the type of the projections, and the last states,
            or None without a recurrence.
        """

    def convolved(self, projected: Sequence[Tensor]) -> Tensor | None:
        """Return the inputs of the convolution, [S, B, C], or None without a convolution."""
        return None

    def forward(self, x: Tensor, rope: Rope | NoRope, documents: PackedDocuments | None = None) -> Tensor:
        """Compute the layer, as `TokenMixer.forward`. Positions have no effect."""
        mixed = self.mix(self.project(x), documents)
        wo = local_param(self.wo, x.dtype)
        return self.sequence_parallel.linear_reduce_scatter(mixed, wo, self.wgrad_store, self.kernels.linear_backend)

    def mix(self, projected: tuple[Tensor, ...], documents: PackedDocuments | None) -> Tensor:
        """Compute everything between the projections, [S/cp, B, ...] each -> [S/cp, B, A/tp * Dv]."""
        weights = self.core_weights(projected[0].dtype)
        if self.state_cache is not None:
            return self._continue(projected, weights, self.state_cache)
        positions = self.shards.positions(len(projected[0]), projected[0].device)
        starts_SB = None if documents is None else documents.starts_SB
        return checkpoint_wrapper(self._train)(projected, weights, positions, starts_SB)

    def column_linear(self, x: Tensor, *weights: Tensor, num_unquantized: int = 0) -> list[Tensor]:
        """Apply projections into the heads to the gathered tokens, [S/cp, B, N/tp] each, by one all-gather over tp.

        Args:
            x: [S/(cp*tp), B, K].
            weights: weights of the projections, [N/tp, K].
            num_unquantized: number of the last projections, which `train.precision` leaves in the type of x.
        """
        columns = [(local_param(weight, x.dtype), None) for weight in weights]
        return self.sequence_parallel.all_gather_linear(
            x, columns, self.wgrad_store, self.kernels.linear_backend, num_unquantized
        )

    def low_rank_linear(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Apply a projection through a low rank, [S/cp, B, N/tp]. The ranks of tp gather the low-rank product.

        `train.precision` leaves it in the type of x.
        """
        backend = self.kernels.linear_backend
        exact = backend if isinstance(backend, UnquantizedLinear) else None
        low = linear(x, local_param(down, x.dtype), None, self.wgrad_store, exact)
        (out,) = self.column_linear(low, up, num_unquantized=1)
        return out

    def _train(
        self, projected: Sequence[Tensor], weights: Sequence[Tensor], positions: Tensor, starts_SB: Tensor | None
    ) -> Tensor:
        """Compute `mix` for whole sequences. The backward pass recomputes it."""
        shards = self.shards
        count = shards.num_segments
        num_previous_SB = positions.unsqueeze(1).expand(-1, projected[0].shape[1])
        if starts_SB is not None:
            num_previous_SB = num_previous_SB - starts_SB[positions]
        tensors = [_split_segments(x, count) for x in projected]
        num_previous_SB = _split_segments(num_previous_SB, count)
        convolved = self.convolved(tensors)
        if convolved is None:
            previous = tensors[0].new_zeros(0, tensors[0].shape[1], 0)
        else:
            previous = shards.previous_tokens(convolved, self.state_shapes(weights).num_previous)
        is_start_SB = None if starts_SB is None else num_previous_SB == 0
        chunked = ChunkedLinearAttention(initial_state=shards.initial_state, kernel=self.kernels.linear_attention)
        recurrence = partial(chunked, is_start_SB=is_start_SB)
        out, _ = self.compute(tensors, weights, PrecedingTokens(previous, num_previous_SB, recurrence))
        return _join_segments(out, count)

    def _continue(self, projected: Sequence[Tensor], weights: Sequence[Tensor], cache: RecurrentStates) -> Tensor:
        """Compute `mix` for the rows of a pass, [R, 1, ...], from cached states, without a gradient."""
        rows = [x.squeeze(1) for x in projected]
        shapes = self.state_shapes(weights)
        out = rows[0].new_zeros(len(rows[0]), local_param(self.wo).shape[1])
        for samples in cache.read(shapes, rows[0]):
            tensors = [x[samples.rows_R].unflatten(0, (len(samples.slots_n), -1)).transpose(0, 1) for x in rows]
            length = len(tensors[0])
            chunked = ChunkedLinearAttention(kernel=self.kernels.linear_attention)
            function = recurrent_linear_attention if length == 1 else chunked
            distance = torch.arange(length, device=tensors[0].device).unsqueeze(1)
            preceding = PrecedingTokens(
                samples.previous_KnC, samples.num_previous_n + distance, partial(function, state=samples.state)
            )
            output, state = self.compute(tensors, weights, preceding)
            convolved = self.convolved(tensors)
            last = samples.previous_KnC if convolved is None else torch.cat((samples.previous_KnC, convolved))[length:]
            cache.write(samples, last, samples.state if state is None else state)
            out[samples.rows_R] = output.transpose(0, 1).flatten(0, 1)
        return out.unsqueeze(1)


def _split_segments(x: Tensor, num_segments: int) -> Tensor:
    """Return [S, B, ...] as [S/n, n*B, ...]: segments become samples."""
    return x if num_segments == 1 else x.unflatten(0, (num_segments, -1)).transpose(0, 1).flatten(1, 2)


def _join_segments(x: Tensor, num_segments: int) -> Tensor:
    """Return [S/n, n*B, ...] as [S, B, ...], the inverse of `_split_segments`."""
    return x if num_segments == 1 else x.unflatten(1, (num_segments, -1)).transpose(0, 1).flatten(0, 1)
