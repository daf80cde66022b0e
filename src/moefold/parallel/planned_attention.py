"""Planned attention: only visible (query, key) pairs are computed, and only the rows that they need are sent.

Every rank computes the plan of a micro-batch set (`topology/attention_plan.py`) from the bounds of its documents, which
the host knows. Keys and values are sent once to each rank that needs them. Where work moves, queries are sent to the
compute rank of their task, and their outputs back. The softmax of a row is computed on one rank, so results of ranks
are not merged, and the placement of the tokens changes only rounding. The backward pass sends the rows again, then the
gradients back, which are added in the order of the ranks.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import all_gather_objects, all_to_all
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.host_copy import copy_to_device
from moefold.ops.block_attention import fold_in_sinks, scale_queries, sink_gradient
from moefold.ops.documents import DocumentBounds, PackedDocuments
from moefold.ops.varlen_attention import TaskAttention
from moefold.topology.attention_plan import AttentionPlan, TokenRanges, Transfers, plan_attention
from moefold.topology.token_placement import Integers, MicroBatchSetShape, document_bounds, place_tokens

if TYPE_CHECKING:
    from moefold.ops.cpu.attention import CAttention

PlanAttention = Callable[..., AttentionPlan]
"""`plan_attention` with its options, of a `Placement` and the `window` of a layer."""


@dataclass
class AttentionStatistics:
    """Attention work of a rank since the last reset, over its layers and passes."""

    sets: list[DocumentBounds] = field(default_factory=list)
    """Documents of each micro-batch set, in the order of the forward passes of the stage."""
    pairs: list[int] = field(default_factory=list)
    """Visible (query, key) pairs of each micro-batch set."""
    moved_rows: int = 0
    """Rows of queries that this rank computed for other ranks."""
    sent_bytes: int = 0
    plans_crc: int = 0
    """Checksum of the plans, which must be equal on all ranks of a micro-batch set."""

    def reset(self) -> None:
        """Reset all counts."""
        self.sets.clear()
        self.pairs.clear()
        self.moved_rows = 0
        self.sent_bytes = 0
        self.plans_crc = 0

    def add_plan(self, plan: AttentionPlan) -> None:
        """Add the tasks of a plan to the checksum."""
        for column in (plan.documents_K, plan.firsts_K, plan.stops_K, plan.compute_ranks_K):
            self.plans_crc = crc32(column.tobytes(), self.plans_crc)

    def begin_set(self, bounds: DocumentBounds) -> int:
        """Return the index of a new micro-batch set."""
        self.sets.append(bounds)
        self.pairs.append(0)
        return len(self.pairs) - 1


class RowTransfer:
    """Exchange of rows in token order: other ranks need rows of this rank's tokens, and it needs rows of theirs.

    Args:
        needed: the tokens that this rank needs. Their rows are the rows of a buffer.
        transfers: sent rows of all members of the group.
        own_tokens: number of the token of each row of this rank, int64 [C].
        rank: this rank, and the device of the rows.
    """

    def __init__(
        self, needed: TokenRanges, transfers: Transfers, own_tokens: Integers, rank: "MicroBatchSetRank"
    ) -> None:
        group = rank.group
        self._group = group
        self._statistics = rank.statistics
        self._num_rows = needed.num_rows
        self._num_own = len(own_tokens)
        self._communicates = transfers.num_rows > 0
        sent_tokens, self._input_splits = transfers.sent_by(group.rank, group.size)
        received, self._output_splits = transfers.received_by(group.rank, group.size)
        by_token = np.argsort(own_tokens)
        places = needed.rows_of(own_tokens)
        ids = np.flatnonzero(places >= 0)
        self._is_identity = (
            not self._communicates and len(ids) == self._num_own and bool((places == np.arange(self._num_own)).all())
        )
        self.num_received = len(received)
        """Rows that this rank receives in `gather`."""
        self._sent_rows = rank.index(by_token[np.searchsorted(own_tokens[by_token], sent_tokens)])
        self._received_places = rank.index(needed.rows_of(received))
        self._own_rows = rank.index(ids)
        self._own_places = rank.index(places[ids])

    def gather(self, x: Tensor) -> Tensor:
        """Communicate, and return the rows of the needed tokens, [C, W] -> [needed tokens, W]."""
        if self._is_identity:
            return x
        gathered = x.new_empty((self._num_rows, x.shape[1]))
        gathered[self._own_places] = x[self._own_rows]
        if self._communicates:
            rows = x[self._sent_rows]
            self._statistics.sent_bytes += rows.nbytes
            gathered[self._received_places] = all_to_all(rows, self._group, self._input_splits, self._output_splits)
        return gathered

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Return the sums over the ranks of the rows of this rank's tokens, [needed tokens, W] -> [C, W].

        It communicates, as the adjoint of `gather`. Sums are added in the order of ranks, after this rank's own.
        """
        if self._is_identity:
            return x
        total = x.new_zeros((self._num_own, x.shape[1]))
        total[self._own_rows] = x[self._own_places]
        if self._communicates:
            sent_rows = x[self._received_places]
            self._statistics.sent_bytes += sent_rows.nbytes
            returned = all_to_all(sent_rows, self._group, self._output_splits, self._input_splits)
            for rows, values in zip(
                self._sent_rows.split(self._input_splits), returned.split(self._input_splits), strict=True
            ):
                total[rows] += values
        return total


@dataclass(frozen=True)
class MicroBatchSetRank:
    """A rank of a micro-batch set.

    Args:
        members: number in the group of each rank of the micro-batch set, as `Placement` numbers the ranks.
        statistics: counts the work and the bytes.
    """

    group: Group
    members: Integers
    device: torch.device
    statistics: AttentionStatistics

    def index(self, values: Integers) -> Tensor:
        """Return indices on the device, without a wait."""
        return copy_to_device(torch.from_numpy(np.ascontiguousarray(values)), self.device)


class RankTasks:
    """Attention of one rank in a micro-batch set: its tasks, and the transfers of queries, keys and values.

    Args:
        num_samples: samples that the rows of a rank are split into, position by position. 1: rows are slots.
        set_index: index of the micro-batch set in the statistics, or None if it is not counted, as all ranks have equal
            work.
    """

    def __init__(self, plan: AttentionPlan, rank: MicroBatchSetRank, num_samples: int, set_index: int | None) -> None:
        number = int(np.flatnonzero(rank.members == rank.group.rank)[0])
        own_tokens = plan.placement.slots(number).reshape(num_samples, -1).T.ravel()
        queries, keys = plan.needed_tokens(number)
        is_own = plan.compute_ranks_K == number
        stops = plan.stops_K[is_own]
        ranges = [
            np.stack((needed.rows_of(firsts[is_own]), needed.rows_of(stops - 1) + 1), 1)
            for needed, firsts in ((queries, plan.firsts_K), (keys, plan.first_keys))
        ]
        exchange = plan.exchange()
        self.tasks = TaskAttention(ranges[0], ranges[1], plan.window, rank.device)
        self.queries = RowTransfer(queries, exchange.queries.between(rank.members), own_tokens, rank)
        self.keys = RowTransfer(keys, exchange.keys.between(rank.members), own_tokens, rank)
        self._pairs = int(plan.pairs_of_ranks[number])
        self._set_index = set_index
        self._statistics = rank.statistics

    def count_pass(self) -> None:
        """Count the forward pass of a layer, also if it is a recomputation."""
        if self._set_index is not None:
            self._statistics.pairs[self._set_index] += self._pairs
            self._statistics.moved_rows += self.queries.num_received


def members_of_set(groups: ParallelGroups) -> Integers:
    """Return the number in dp_cp of each rank of a micro-batch set, int64 [dp * cp]. See `token_placement`."""
    view = groups.layout.attention
    ranks = groups.attn.dp_cp.ranks
    # Members of a group are sorted by rank, for any order of the axes.
    return np.argsort(
        [view.coordinate(rank, "dp") * groups.attn.cp.size + view.coordinate(rank, "cp") for rank in ranks]
    )


def nodes_of_set(groups: ParallelGroups) -> tuple[int, ...] | None:
    """Return the node of each rank of a micro-batch set, or None if one node has all. It is collective over dp_cp."""
    group = groups.attn.dp_cp
    # A rank of a dry run has no peers.
    names = [""] if groups.device.type == "meta" else all_gather_objects(socket.gethostname(), group)
    if len(set(names)) == 1:
        return None
    return tuple(names.index(names[member]) for member in members_of_set(groups).tolist())


class AttentionPlanner:
    """Plans the attention of the micro-batches of a stage. Its layers share the plans."""

    def __init__(self, groups: ParallelGroups, plan: PlanAttention = plan_attention) -> None:
        self._cp = groups.attn.cp
        self._dp_cp = groups.attn.dp_cp
        self._members = members_of_set(groups)
        self._plan = plan
        self.statistics = AttentionStatistics()
        self._without_documents: dict[object, RankTasks] = {}

    def core_attention(self, window: int) -> "PlannedAttention":
        """Return the core attention of a layer with this sliding window. 0: none."""
        return PlannedAttention(self, window)

    def rank_tasks(self, q: Tensor, documents: PackedDocuments | None, window: int) -> RankTasks:
        """Return this rank's tasks for a micro-batch.

        Args:
            q: queries of this rank's tokens, [S/cp, B, A, D].
            documents: their documents, or None if a sample is one document.
            window: sliding window. 0: no limit.
        """
        num_tokens, num_samples = q.shape[:2]
        if documents is None:
            key = num_tokens, num_samples, window
            if key not in self._without_documents:
                bounds = DocumentBounds(((0,),) * num_samples)
                self._without_documents[key] = self._build(q, bounds, window, None)
            return self._without_documents[key]
        bounds = documents.bounds
        set_index = documents.cached("attention micro-batch set", lambda: self.statistics.begin_set(bounds))
        return documents.cached(
            ("attention tasks", window, num_samples), lambda: self._build(q, bounds, window, set_index)
        )

    def _build(self, q: Tensor, bounds: DocumentBounds, window: int, set_index: int | None) -> RankTasks:
        num_tokens, num_samples = q.shape[:2]
        cp = self._cp
        placement = bounds.placement
        if placement is None:
            shape = MicroBatchSetShape(cp=cp.size, micro_batch_size=num_samples, seq_len=num_tokens * cp.size)
            placement = place_tokens("samples", shape, document_bounds(shape, bounds.of_samples))
            plan = plan_attention(placement, window=window)
            rank = MicroBatchSetRank(cp, np.arange(cp.size), q.device, self.statistics)
        else:
            plan = self._plan(placement, window=window)
            rank = MicroBatchSetRank(self._dp_cp, self._members, q.device, self.statistics)
        self.statistics.add_plan(plan)
        return RankTasks(plan, rank, num_samples, set_index)


class PlannedAttention:
    """Core attention by a plan (see the module), for tokens placed as `Placement` says.

    `parallelize` sets `kernel`, used where it supports the tensors.

    Args:
        planner: plans the micro-batches of the stage.
    """

    def __init__(self, planner: AttentionPlanner, window: int = 0) -> None:
        self.planner = planner
        self._window = window
        self.kernel: CAttention | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend. See `CoreAttention` for the arguments. Communicates over cp, or over dp x cp with a placement."""
        tasks = self.planner.rank_tasks(q, documents, self._window)
        tasks.count_pass()
        return _PlannedFunction.apply(scale_queries(q, scale), k, v, sinks, tasks, self.kernel)


class _PlannedFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], k [S/cp, B, G, D], v [S/cp, B, G, Dv], sinks [A] or None) -> [S/cp, B, A, Dv]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tasks: RankTasks, kernel: "CAttention | None"
    ) -> Tensor:
        q_RAD = tasks.queries.gather(_rows(q)).unflatten(1, q.shape[2:])
        k_WGD, v_WGD = _gather_keys(k, v, tasks)
        out_RAD, lse_RA = tasks.tasks.forward(q_RAD, k_WGD, v_WGD, kernel)
        out_RAD, lse_RA = (x.squeeze(1) for x in fold_in_sinks(out_RAD.unsqueeze(1), lse_RA.unsqueeze(1), sinks))
        out = tasks.queries.scatter_sum(out_RAD.flatten(1)).view(*q.shape[:3], v.shape[-1])
        ctx.save_for_backward(q, k, v, sinks, out, lse_RA)
        ctx.tasks = tasks
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse_RA = ctx.saved_tensors
        tasks: RankTasks = ctx.tasks
        k_WGD, v_WGD = _gather_keys(k, v, tasks)
        query_tensors = torch.cat([_rows(x) for x in (grad_out, q, out)], 1)
        sizes = [x.shape[2] * x.shape[3] for x in (grad_out, q, out)]
        grad_RAD, q_RAD, out_RAD = (
            x.unflatten(1, (q.shape[2], -1)) for x in tasks.queries.gather(query_tensors).split(sizes, 1)
        )
        dq_RAD, dk_WGD, dv_WGD = tasks.tasks.backward((grad_RAD, q_RAD, out_RAD, lse_RA), k_WGD, v_WGD, ctx.kernel)
        dq = tasks.queries.scatter_sum(dq_RAD.flatten(1)).view(q.shape)
        dkv = tasks.keys.scatter_sum(torch.cat((dk_WGD.flatten(1), dv_WGD.flatten(1)), 1))
        dk, dv = dkv.split([k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]], 1)
        sinks_grad = sink_gradient(grad_RAD.unsqueeze(1), out_RAD.unsqueeze(1), lse_RA.unsqueeze(1), sinks)
        return dq, dk.reshape(k.shape).to(k.dtype), dv.reshape(v.shape).to(v.dtype), sinks_grad, None, None


def _gather_keys(k: Tensor, v: Tensor, tasks: RankTasks) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the tokens that this rank's tasks need, [W, G, D] and [W, G, Dv]."""
    rows = tasks.keys.gather(torch.cat((_rows(k), _rows(v)), 1))
    keys, values = rows.split([k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]], 1)
    return keys.unflatten(1, k.shape[2:]), values.unflatten(1, v.shape[2:])


def _rows(x: Tensor) -> Tensor:
    """Return [S/cp, B, heads, D] as rows, [S/cp * B, heads * D]."""
    return x.reshape(x.shape[0] * x.shape[1], -1)
