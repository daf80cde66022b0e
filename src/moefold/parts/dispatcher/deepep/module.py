"""DeepEP dispatcher (github.com/deepseek-ai/DeepEP): a token is sent once to each rank that holds its experts.

The plain all-to-all sends a token once for each chosen expert. DeepEP sends it once to each rank that holds any of its
experts, copies it there, and returns one partial sum from each of these ranks. This adapter is written for the
documented interface of `deep_ep.Buffer` and tested with an emulation of it. It has not been run on hardware.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from moefold.comm.groups import Group
from moefold.errors import ConfigError
from moefold.model.moe.dispatch.base import RoutingMap
from moefold.model.moe.dispatch.partial_sums import DispatchState, PartialSumDispatcher, ReceivedTokens
from moefold.model.moe.permute import plan_permutation
from moefold.ops.quantization.formats import dequantize, quantize

TOKEN_BYTES = 2
"""Bytes of an element: DeepEP sends bfloat16."""


MaybeQuantizedTokens = Tensor | tuple[Tensor, Tensor]


class Buffer(Protocol):
    """Interface of `deep_ep.Buffer`, as far as it is used. Calls are synchronous: the current stream waits for them."""

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        """Count the destinations of the tokens.

        Args:
            topk_idx: chosen experts, int64 [T, K]. -1 means none.
            num_experts: E.

        Returns:
            (num_tokens_per_rank [ranks], num_tokens_per_rdma_rank, None within a node, num_tokens_per_expert [E],
            is_token_in_rank bool [T, ranks], event).
        """
        ...

    def dispatch(
        self, x: MaybeQuantizedTokens, handle: Any = None, **layout: Any
    ) -> tuple[MaybeQuantizedTokens, Tensor | None, Tensor | None, list[int] | None, Any, Any]:
        """Send each token to the ranks of its experts.

        Args:
            x: [T, H], or e4m3 [T, H] with float32 scales [T, H/128]. Received tokens have the same form.
            handle: handle of an earlier dispatch, whose layout is reused. Then no layout is given.
            layout: topk_idx, topk_weights float32 [T, K], and the results of `get_dispatch_layout`.

        Returns:
            (recv_x [N, H], recv_topk_idx: local indices of this rank's experts [N, K], -1 for experts of other ranks,
            recv_topk_weights [N, K], tokens of each expert of this rank, handle, event). With a handle only the first
            and the last are given.
        """
        ...

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        """Sum the rows of each token over the ranks that received it, on the token's rank.

        Args:
            x: a row for each received token, [N, H].
            handle: handle of the dispatch that received them.
            topk_weights: weights that are summed in the same way, [N, K].

        Returns:
            (combined_x [T, H], combined_topk_weights [T, K] or None, event).
        """
        ...


@dataclass
class DeepEPMetadata(DispatchState):
    """Dispatch state of one micro-batch. The handle is known once the tokens have arrived."""

    probs_TK: Tensor
    layout: dict[str, Any]
    handle: Any = None


class DeepEPDispatcher(PartialSumDispatcher[DeepEPMetadata]):
    """Dispatcher over a DeepEP buffer. etp is 1.

    Unlike in other dispatchers, the counts of received tokens arrive with the tokens, so that `dispatch_communicate`
    synchronises with the device too.

    Args:
        buffer: a `deep_ep.Buffer` over the ranks of ep. Member i holds the i-th part of the experts.
        num_experts: E, over all ranks.
    """

    def __init__(self, buffer: Buffer, num_experts: int, *, fp8_dispatch: bool = False) -> None:
        self._buffer = buffer
        self._fp8_dispatch = fp8_dispatch
        self._num_experts = num_experts

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, DeepEPMetadata]:
        """Count the destinations of the tokens, on the device."""
        assert routing_map.padded_capacity is None, "DeepEP does not pad"
        ids_TK = routing_map.ids_TK.contiguous()
        probs_TK = routing_map.probs_TK
        if routing_map.kept_TK is not None:
            ids_TK = ids_TK.masked_fill(~routing_map.kept_TK, -1)
        if x_TH.dtype == torch.bfloat16:
            probs_TK = probs_TK.float()
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(ids_TK, self._num_experts)
        layout = {
            "topk_idx": ids_TK,
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_rdma_rank,
            "is_token_in_rank": is_in_rank,
            "num_tokens_per_expert": per_expert,
        }
        return x_TH, DeepEPMetadata(probs_TK, layout)

    def dispatch_communicate(self, rows: Tensor, metadata: DeepEPMetadata) -> Tensor:
        """Send each token and its probabilities to the ranks of its experts: [T, H] -> [N, H]."""
        rows, probs_NK = _Dispatch.apply(rows, metadata.probs_TK, metadata, self._buffer, self._fp8_dispatch)
        # Autograd tracks the probabilities only after `apply`.
        metadata.arrived = replace(metadata.received, probs_NK=probs_NK)
        return rows

    def combine_communicate(self, rows: Tensor, metadata: DeepEPMetadata) -> Tensor:
        """Sum the partial sums of all ranks on the token's rank: [N, H] -> [T, H]."""
        return _Combine.apply(rows, metadata.handle, self._buffer)


def open_buffer(ep: Group, hidden_size: int) -> Buffer:
    """Allocate DeepEP's communication buffers, of the size that DeepEP recommends. It is collective over ep.

    Args:
        ep: ranks that hold different experts, on CUDA.
        hidden_size: H.

    Raises:
        ConfigError: DeepEP has no configuration for this number of ranks.
    """
    import deep_ep

    buffer_class = deep_ep.Buffer
    try:
        configs = (buffer_class.get_dispatch_config(ep.size), buffer_class.get_combine_config(ep.size))
    except AssertionError:
        raise ConfigError(
            f"parallel.ep={ep.size}: deep_ep has no configuration for this number of ranks; choose another ep, "
            "such as 8, or parallel.dispatcher='alltoall'"
        ) from None
    hidden_bytes = hidden_size * TOKEN_BYTES
    num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, ep.size) for config in configs)
    num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, ep.size) for config in configs)
    return buffer_class(ep.handle, num_nvl_bytes, num_rdma_bytes)


class _Dispatch(torch.autograd.Function):
    """DeepEP dispatch, which fills the metadata. Its adjoint is a combine, without probabilities."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, probs_TK: Tensor, metadata: DeepEPMetadata, buffer: Buffer, fp8_dispatch: bool
    ) -> tuple[Tensor, Tensor]:
        sent_tokens = quantize(x_TH) if fp8_dispatch else x_TH.contiguous()
        received, ids_NK, probs_NK, counts, handle, _ = buffer.dispatch(
            sent_tokens, topk_weights=probs_TK.contiguous(), **metadata.layout
        )
        x_NH = received if isinstance(received, Tensor) else dequantize(*received, x_TH.dtype)
        assert ids_NK is not None
        assert probs_NK is not None
        assert counts is not None
        metadata.handle = handle
        permutation = plan_permutation(ids_NK.long(), len(counts), ids_NK >= 0, num_rows=sum(counts))
        metadata.arrived = ReceivedTokens(permutation, None, counts)
        ctx.handle = handle
        ctx.buffer = buffer
        return x_NH, probs_NK

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor, grad_NK: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_TH, grad_TK, _ = ctx.buffer.combine(grad_NH.contiguous(), ctx.handle, topk_weights=grad_NK.contiguous())
        return grad_TH, grad_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, handle: Any, buffer: Buffer) -> Tensor:
        ctx.handle = handle
        ctx.buffer = buffer
        return buffer.combine(y_NH.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        grad_NH, *_ = ctx.buffer.dispatch(grad_TH.contiguous(), handle=ctx.handle)
        return grad_NH, None, None
