"""A stand-in for deep_ep: its documented contract in plain tensors over gloo, for tests where DeepEP cannot run.

It knows nothing of the adaptor. Its results follow `deep_ep.Buffer` as documented: one row for each token and
rank, sources in rank order; expert numbers local to the rank, -1 (and weight 0) for the experts of other ranks; a
combine that sums the rows of a token over the ranks; a handle that repeats the way of an earlier dispatch. It checks
the duties of its caller in the contract, so that a wrong call fails here too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Handle:
    """The way of one dispatch."""

    tokens_by_rank: list[Tensor]
    """My tokens that went to each rank."""
    received: list[int]
    """Rows that came from each rank."""
    num_tokens: int


class StandInBuffer:
    """`deep_ep.Buffer`; only its normal (high-throughput) kernels are documented for training."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.sizes = group, (num_nvl_bytes, num_rdma_bytes)
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.calls: list[str] = []

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert num_experts % self.ranks == 0
        self.calls.append("layout")
        present = topk_idx >= 0
        per_expert = torch.bincount(topk_idx[present], minlength=num_experts).int()
        home = topk_idx.div(num_experts // self.ranks, rounding_mode="floor").masked_fill(~present, -1)
        in_rank = (home.unsqueeze(-1) == torch.arange(self.ranks)).any(1)
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, Any]:
        parts = x if isinstance(x, tuple) else (x,)
        assert all(part.is_contiguous() for part in parts)
        if handle is not None:
            assert isinstance(x, Tensor)
            assert topk_idx is None
            assert topk_weights is None
            self.calls.append("dispatch again")
            return self._send(x, handle), None, None, None, None, None
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.shape == topk_idx.shape
        assert topk_weights.is_contiguous()
        if isinstance(x, Tensor):
            assert topk_weights.dtype == (torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
        else:
            values, scales = x
            assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert values.shape == (len(scales), 128 * scales.shape[1])
        self.calls.append("dispatch")
        tokens = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(self.ranks)]
        assert [len(t) for t in tokens] == num_tokens_per_rank.tolist()
        received = self._exchange_counts(num_tokens_per_rank.long())
        handle = Handle(tokens, received, len(parts[0]))
        num_local = len(num_tokens_per_expert) // self.ranks
        local = self._send(topk_idx, handle) - self.rank * num_local
        mine = (local >= 0) & (local < num_local)
        weights = self._send(topk_weights, handle) * mine
        local = local.masked_fill(~mine, -1)
        counts = torch.bincount(local[mine], minlength=num_local)
        # gloo carries bytes of a type that it does not know.
        sent = [self._send(part.view(torch.uint8), handle).view(part.dtype) for part in parts]
        return tuple(sent) if isinstance(x, tuple) else sent[0], local, weights, counts.tolist(), handle, None

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        assert x.is_contiguous()
        assert len(x) == sum(handle.received)
        self.calls.append("combine")
        return self._return(x, handle), None if topk_weights is None else self._return(topk_weights, handle), None

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> "StandInConfig":
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return StandInConfig(100)

    @staticmethod
    def get_combine_config(num_ranks: int) -> "StandInConfig":
        return StandInConfig(10 + StandInBuffer.get_dispatch_config(num_ranks).chunk)

    def _exchange_counts(self, sent: Tensor) -> list[int]:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.tolist()

    def _send(self, x: Tensor, handle: Handle) -> Tensor:
        assert len(x) == handle.num_tokens
        rows = torch.cat([x[tokens] for tokens in handle.tokens_by_rank])
        out = x.new_empty((sum(handle.received), *x.shape[1:]))
        dist.all_to_all_single(
            out, rows, handle.received, [len(tokens) for tokens in handle.tokens_by_rank], group=self.group
        )
        return out

    def _return(self, x: Tensor, handle: Handle) -> Tensor:
        sizes = [len(tokens) for tokens in handle.tokens_by_rank]
        rows = x.new_empty((sum(sizes), *x.shape[1:]))
        dist.all_to_all_single(rows, x, sizes, handle.received, group=self.group)
        home = x.new_zeros((handle.num_tokens, *x.shape[1:]))
        return home.index_add_(0, torch.cat(handle.tokens_by_rank), rows)


@dataclass(frozen=True)
class StandInConfig:
    """`deep_ep.Config`, as far as buffers are sized by it."""

    chunk: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.chunk * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0
