"""Symmetric-memory dispatcher: an all-to-all whose split sizes stay on the device, so that the host never waits.

The price is memory for the busiest rank: a rank receives into a buffer of fixed size, `receive_factor` times the rows
of balanced routing. A step where a rank would receive more is stopped with an error, before its weights change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group
from moefold.comm.row_exchange import RowExchange
from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.permute import as_counts, permute, permute_probs, plan_permutation, unpermute
from moefold.ops.expert_ops import LazyCounts, Permutation


@dataclass
class SymmMemMetadata:
    """Dispatch state of one micro-batch."""

    permutation: Permutation
    probs_TK: Tensor | None
    """Routing probabilities, or None where the experts have applied them."""
    splits_E: Tensor
    """Rows sent to each expert, int64 [E] on the device."""
    tokens_per_expert: Sequence[int]
    segments: Tensor | None = None
    """Rows and first row of each received segment, int64 [2, E]. Known once the tokens have been sent."""


class SymmMemDispatcher(Dispatcher[SymmMemMetadata]):
    """Dispatcher over symmetric memory. etp is 1.

    Received rows are sorted by expert. Rows after the last expert's rows are undefined: experts that read row counts on
    the device skip them, and for other experts they are cut off.

    Args:
        ep: ranks that hold different experts. Member i holds the i-th part of them.
        exchange: buffers of these ranks.
        num_experts: E, over all ranks.
    """

    def __init__(self, ep: Group, exchange: RowExchange, num_experts: int) -> None:
        self._ep = ep
        self._exchange = exchange
        self._num_experts = num_experts
        self._largest_receive: Tensor | None = None

    def take_receive_load(self) -> Tensor | None:
        """See `Dispatcher`."""
        largest = self._largest_receive
        self._largest_receive = None
        return None if largest is None else largest.double() / self._exchange.capacity

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, SymmMemMetadata]:
        """Permute the tokens by expert, and all-gather the counts [E] of all ranks on the device."""
        assert routing_map.padded_capacity is None, "padded rows need no counts: the all-to-all never waits for them"
        ids_TK = routing_map.ids_TK
        permutation = plan_permutation(ids_TK, self._num_experts, routing_map.kept_TK, num_rows=ids_TK.numel())
        counts_SE = all_gather(permutation.tokens_per_expert_E.unsqueeze(0), self._ep)
        # [source, destination, experts there]
        counts = counts_SE.view(self._ep.size, self._ep.size, -1)
        received_D = counts.sum((0, 2))
        self._record_receive(received_D.max())
        # Nothing is sent to a rank whose buffer would overflow. The step is stopped at its end.
        fits_D = received_D <= self._exchange.capacity
        splits_E = (counts[self._ep.rank] * fits_D.unsqueeze(1)).flatten()
        arriving = counts[:, self._ep.rank].sum(0) * fits_D[self._ep.rank]
        rows = permute(x_TH, permutation, self.permute_ops)
        return rows, SymmMemMetadata(permutation, routing_map.probs_TK, splits_E, as_counts(arriving))

    def dispatch_communicate(self, rows: Tensor, metadata: SymmMemMetadata) -> Tensor:
        """Send each token to the rank of its expert: [N, H] -> [capacity, H], sorted by expert."""
        return _RowDispatch.apply(rows, metadata, self._exchange)

    def dispatch_postprocess(self, rows: Tensor, metadata: SymmMemMetadata) -> Tensor:
        """Cut off the undefined rows, unless the counts are only on the device."""
        counts = metadata.tokens_per_expert
        return rows if isinstance(counts, LazyCounts) else rows[: sum(counts)]

    def combine_preprocess(self, y_RH: Tensor, metadata: SymmMemMetadata) -> Tensor:
        """Return the rows, which are in the order of arrival, unchanged."""
        return y_RH

    def combine_communicate(self, rows: Tensor, metadata: SymmMemMetadata) -> Tensor:
        """Send the outputs back to the ranks of their tokens: [R, H] -> [N, H]."""
        return _RowCombine.apply(rows, metadata, self._exchange)

    def combine_postprocess(self, rows: Tensor, metadata: SymmMemMetadata) -> Tensor:
        """Compute the weighted sum of each token's expert outputs."""
        return unpermute(rows, metadata.permutation, metadata.probs_TK, self.permute_ops)

    def dispatch_probs(self, metadata: SymmMemMetadata) -> tuple[Tensor, SymmMemMetadata]:
        """Send the probabilities like the tokens."""
        assert metadata.probs_TK is not None
        probs_N1 = permute_probs(metadata.probs_TK, metadata.permutation).unsqueeze(1)
        probs_R1 = self.dispatch_postprocess(self.dispatch_communicate(probs_N1, metadata), metadata)
        return probs_R1.squeeze(1), replace(metadata, probs_TK=None)

    @torch.no_grad()
    def _record_receive(self, num_rows: Tensor) -> None:
        largest = self._largest_receive
        self._largest_receive = num_rows if largest is None else torch.maximum(largest, num_rows)


class _RowDispatch(torch.autograd.Function):
    """Dispatch, which fills in the segments. Its adjoint is a combine."""

    @staticmethod
    def forward(ctx: Any, rows_NW: Tensor, metadata: SymmMemMetadata, exchange: RowExchange) -> Tensor:
        received, metadata.segments = exchange.dispatch(rows_NW, metadata.splits_E)
        ctx.segments = metadata.segments
        ctx.exchange = exchange
        ctx.num_rows = len(rows_NW)
        return received

    @staticmethod
    def backward(ctx: Any, grad_CW: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.combine(grad_CW, ctx.segments, ctx.num_rows), None, None


class _RowCombine(torch.autograd.Function):
    """Combine of rows, whose adjoint is a dispatch with the same splits."""

    @staticmethod
    def forward(ctx: Any, rows_RW: Tensor, metadata: SymmMemMetadata, exchange: RowExchange) -> Tensor:
        assert metadata.segments is not None
        ctx.splits_E = metadata.splits_E
        ctx.exchange = exchange
        ctx.num_rows = len(rows_RW)
        return exchange.combine(rows_RW, metadata.segments, metadata.permutation.row_TK.numel())

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor, None, None]:
        received, _ = ctx.exchange.dispatch(grad_NW, ctx.splits_E)
        return received[: ctx.num_rows], None, None
