"""All-to-all that sends a token once to each ep rank that holds any of its experts, and returns one partial sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.comm.async_collectives import IDENTITY, async_all_to_all
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group
from moefold.comm.host_copy import HostCopy
from moefold.comm.resumable import Resumable, run_to_end
from moefold.model.moe.dispatch.base import RoutingMap, SplitSizes, fp8_permuted_wire_format
from moefold.model.moe.dispatch.partial_sums import DispatchState, PartialSumDispatcher, ReceivedTokens
from moefold.model.moe.permute import as_counts, permute, plan_permutation, truncate_permutation, unpermute
from moefold.ops.expert_ops import Permutation


@dataclass
class DedupMetadata(DispatchState):
    """Dispatch state of one micro-batch."""

    to_ranks: Permutation
    """Permutation of the tokens by destination rank: one row for each pair of token and rank."""
    probs_TK: Tensor
    sent_ids: Tensor
    """Local number of each choice at the destination, int32 [N sent, K], or -1 for experts of other ranks."""
    input_splits: Sequence[int]
    """Tokens sent to each ep member."""
    output_splits: Sequence[int]
    """Tokens received from each ep member."""
    num_routed: int
    """Rows of this rank's experts, one for each choice of a received token."""


class DedupAllToAllDispatcher(PartialSumDispatcher[DedupMetadata]):
    """Dispatcher with an all-to-all over ep that sends no token twice to a rank. It needs etp = 1.

    A token that chose k experts of a rank is sent once instead of k times, with its choices and their probabilities.
    The rank returns the weighted sum of the k outputs, as DeepEP does (github.com/deepseek-ai/DeepEP). Sums over the
    experts of a token are therefore grouped by rank.

    Args:
        ep: ranks that hold different experts. Member i holds the i-th part of them.
        num_experts: E, over all ranks.
    """

    def __init__(self, ep: Group, num_experts: int, *, fp8_dispatch: bool = False) -> None:
        self._ep = ep
        self.num_experts = num_experts
        self._num_local = num_experts // ep.size
        self._fp8_dispatch = fp8_dispatch

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, DedupMetadata]:
        """Permute the tokens by rank. It all-gathers two numbers for each pair of ranks, and waits once for them."""
        assert routing_map.padded_capacity is None, "rows of a token and a rank cannot be padded by expert"
        ids_TK = routing_map.ids_TK
        if routing_map.kept_TK is not None:
            ids_TK = ids_TK.masked_fill(~routing_map.kept_TK, -1)
        num_tokens, top_k = ids_TK.shape
        ranks_P = torch.arange(self._ep.size, device=ids_TK.device)
        is_at_rank_TKP = ids_TK.div(self._num_local, rounding_mode="floor").unsqueeze(2) == ranks_P
        to_ranks = plan_permutation(
            ranks_P.expand(num_tokens, -1),
            self._ep.size,
            is_at_rank_TKP.any(1),
            num_rows=num_tokens * min(top_k, self._ep.size),
        )
        # [source, destination, tokens and routed tokens]
        counts = all_gather(
            torch.stack((to_ranks.tokens_per_expert_E, is_at_rank_TKP.sum((0, 1))), 1).unsqueeze(0), self._ep
        )
        sizes = HostCopy(self._host_sizes(self.host_counts(counts)))
        # The device permutes while the host waits for the sizes.
        permuted = None if self._fp8_dispatch else self.permute_ops.permute(x_TH.detach(), to_ranks)
        sent_counts, received, num_routed = sizes.wait().split([self._ep.size, self._ep.size, 1])
        to_ranks = truncate_permutation(to_ranks, int(sent_counts.sum()))
        metadata = DedupMetadata(
            to_ranks,
            routing_map.probs_TK,
            self._local_ids(ids_TK, to_ranks),
            sent_counts.tolist(),
            received.tolist(),
            int(num_routed),
        )
        if permuted is None:
            return x_TH, metadata
        return permute(x_TH, to_ranks, self.permute_ops, permuted[: len(to_ranks.token_R)]), metadata

    def dispatch_communicate(self, rows: Tensor, metadata: DedupMetadata) -> Tensor:
        """Send each token with its choices to the ranks of its experts, [T, H] -> [N, H]."""
        return run_to_end(self.dispatch_async(rows, metadata))[0]

    def split_sizes(self, metadata: DedupMetadata) -> Sequence[SplitSizes]:
        """Return the split sizes over ep."""
        return (SplitSizes("ep", metadata.input_splits, metadata.output_splits),)

    def dispatch_async(
        self, rows: Tensor, metadata: DedupMetadata, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Send the tokens, yielding during the all-to-all."""
        splits = (metadata.input_splits, metadata.output_splits)
        probs = permute(metadata.probs_TK, metadata.to_ranks, self.permute_ops)
        # The tokens' all-to-all resumes an overlapped forward pass.
        ids_result = async_all_to_all(metadata.sent_ids, self._ep, *splits, resumes_forward=False)
        probs_result = async_all_to_all(probs, self._ep, *splits, resumes_forward=False)
        wire_format = (
            fp8_permuted_wire_format(rows, metadata.to_ranks, self.permute_ops) if self._fp8_dispatch else IDENTITY
        )
        rows_result = async_all_to_all(rows, self._ep, *splits, wire_format)
        computed = None if compute is None else compute()
        received = yield from rows_result.wait_resumable()
        ids_NK = ids_result.wait()
        probs_NK = probs_result.wait()
        permutation = plan_permutation(ids_NK.long(), self._num_local, ids_NK >= 0, num_rows=metadata.num_routed)
        metadata.arrived = ReceivedTokens(permutation, probs_NK, as_counts(permutation.tokens_per_expert_E))
        return received, computed

    def combine_communicate(self, rows: Tensor, metadata: DedupMetadata) -> Tensor:
        """Send the partial sums back to the ranks of their tokens."""
        return run_to_end(self.combine_async(rows, metadata))

    def combine_async(self, rows: Tensor, metadata: DedupMetadata) -> Resumable[Tensor]:
        """Send the partial sums back, yielding meanwhile."""
        result = async_all_to_all(rows, self._ep, metadata.output_splits, metadata.input_splits)
        return (yield from result.wait_resumable())

    def combine_postprocess(self, rows: Tensor, metadata: DedupMetadata) -> Tensor:
        """Sum each token's partial sums over the ranks, [T, H]."""
        return unpermute(rows, metadata.to_ranks, None, self.permute_ops)

    def _host_sizes(self, counts: Tensor) -> Tensor:
        """Return the counts that the host needs: tokens sent to and received from each member, and rows of the experts.

        Args:
            counts: tokens and routed tokens, [source, destination, 2].
        """
        arriving = counts[:, self._ep.rank]
        return torch.cat((counts[self._ep.rank, :, 0], arriving[:, 0], arriving[:, 1].sum().unsqueeze(0)))

    def _local_ids(self, ids_TK: Tensor, to_ranks: Permutation) -> Tensor:
        """Return the local expert of each choice of each row to send, int32, or -1 for experts of other ranks."""
        rank_N1 = (to_ranks.topk_index_R % self._ep.size).unsqueeze(1)
        local_NK = ids_TK.index_select(0, to_ranks.token_R) - rank_N1 * self._num_local
        is_there = (local_NK >= 0) & (local_NK < self._num_local)
        return local_NK.where(is_there, -1).to(torch.int32)
