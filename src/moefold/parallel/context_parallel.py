"""Context parallelism: attention over full samples whose tokens are sharded, S/cp per rank.

The kinds are parts (`parts/context/`) with one signature, `(q [S/cp, B, A/tp, D], k [S/cp, B, G/tp, D], v of the same
shape) -> [S/cp, B, A/tp, D]`. With tokens sharded by `sequence_positions`, the result equals `CausalAttention` on the
full sequence. Keys and values are sent with their own G/tp heads, not expanded to the query heads. Every rank has the
document bounds of the full sample, so each rank knows the keys that its own queries attend to.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, differentiable_all_reduce
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import BALANCED, ContextPart, zigzag
from moefold.config.sections.parallel import ParallelConfig
from moefold.model.attention import CausalAttention, CoreAttention, SelfAttention
from moefold.model.module_wrapper import set_on_modules
from moefold.model.tp_interface import ContextParallel, SampleShards
from moefold.model.transformer import Transformer

if TYPE_CHECKING:
    from moefold.parallel.planned_attention import AttentionPlanner


def apply_context_parallel(stage: Transformer, parallel: ParallelConfig, groups: ParallelGroups) -> None:
    """Replace the core attention of each layer, the segments of linear attention, and the head's sum over the ranks."""
    cp = groups.attn.cp
    context = chosen_in(parallel, ContextPart)
    if stage.is_last:
        stage.head.context_parallel = ContextParallelSum(cp)
    planner = _attention_planner(parallel, groups)
    for module in stage.modules():
        if isinstance(module, SelfAttention):
            if planner is not None:
                module.core_attention = planner.core_attention(module.window)
            else:
                module.core_attention = context_parallel_attention(context, cp, module.window, module.chunk_size)
            module.attends_in_blocks = planner is not None or (cp.size > 1 and not context.shards_heads)
    if cp.size > 1:
        set_on_modules(stage, "shards", ContextShards(context, cp))


def _attention_planner(parallel: ParallelConfig, groups: ParallelGroups) -> "AttentionPlanner | None":
    """Return the attention planner of the layers, or None if nothing is planned, or nothing must be sent."""
    context = chosen_in(parallel, ContextPart)
    plan = context.plan
    moves_work = plan.balances_compute_ranks and (plan.pool or groups.attn.dp_cp.size) > 1
    if not context.is_planned or not (groups.attn.cp.size > 1 or moves_work or plan.placement == BALANCED):
        return None
    from moefold.parallel.planned_attention import AttentionPlanner, nodes_of_set
    from moefold.topology.attention_plan import plan_attention

    if not plan.balances_compute_ranks:
        return AttentionPlanner(groups)
    nodes = nodes_of_set(groups)
    return AttentionPlanner(
        groups, partial(plan_attention, tolerance=plan.tolerance, block=plan.block, pool=plan.pool, nodes=nodes)
    )


class ContextParallelSum(ContextParallel):
    """Sum over the ranks of a group."""

    def __init__(self, cp: Group) -> None:
        self._cp = cp
        self.size = cp.size

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Sum over the members (all-reduce), with its adjoint."""
        return differentiable_all_reduce(x, self._cp)


def context_parallel_attention(context: ContextPart, cp: Group, window: int = 0, chunk_size: int = 0) -> CoreAttention:
    """Return the core attention of a context-parallel rank without a plan, `CausalAttention` if cp is 1."""
    if cp.size == 1:
        return CausalAttention(window, chunk_size)
    return context.build(cp, window, chunk_size)


def sequence_positions(context: ContextPart | type[ContextPart], seq_len: int, cp: int, rank: int) -> Tensor:
    """Return the positions of the tokens of a context-parallel rank, in its order.

    The sequence is split into cp contiguous parts, or into 2*cp chunks. Rank r has the chunks r and 2*cp-1-r, one early
    and one late, so that every rank has the same number of (query, earlier key) pairs (arXiv:2407.21783 sec. 3.3.2).

    Args:
        context: the recipe's context part, or its class.
        seq_len: tokens of a sample, S, divisible by cp, and by 2*cp if it is split into chunks.

    Returns:
        Ascending positions, int64 [S/cp].
    """
    if cp == 1 or not context.splits_in_chunks:
        assert seq_len % cp == 0, (seq_len, cp)
        return torch.arange(rank * (seq_len // cp), (rank + 1) * (seq_len // cp))
    assert seq_len % (2 * cp) == 0, (seq_len, cp)
    size = seq_len // (2 * cp)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in zigzag(cp, rank)])


class ContextShards(SampleShards):
    """Tokens of a context-parallel rank, in any order of the ranks' tokens.

    A segment of linear attention turns the state S before it into T S + U. So each rank computes T and U of its
    segments, all ranks gather them, and each composes T and U of the earlier segments. The bytes sent do not depend on
    the length of the sequence: D * (D + Dv) numbers for each head, sample and segment, and K-1 tokens for the
    convolution. All segments are computed at the same time, so the zigzag order of ring attention, with two segments on
    a rank, is as good as any.
    """

    def __init__(self, context: ContextPart, cp: Group) -> None:
        self._cp = cp
        self._context = context
        segments_of_ranks = [zigzag(cp.size, rank) if context.splits_in_chunks else (rank,) for rank in range(cp.size)]
        self._segments = segments_of_ranks[cp.rank]
        # Index of each segment in the gathered tensor, in the order of the sequence.
        gathered = [number for numbers in segments_of_ranks for number in numbers]
        self._places = [gathered.index(number) for number in range(len(gathered))]
        self.num_segments = len(self._segments)
        self.initial_state: Callable[[Tensor, Tensor], Tensor] | None = self._compose

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """See base class."""
        size = self._cp.size
        return sequence_positions(self._context, num_tokens * size, size, self._cp.rank).to(device)

    def gather(self, x: Tensor) -> Tensor:
        """See base class. It is an all-gather over cp."""
        gathered = all_gather(x.contiguous(), self._cp)
        if not self._context.splits_in_chunks:
            return gathered
        chunks = gathered.chunk(2 * self._cp.size)
        return torch.cat([chunks[place] for place in self._places])

    def previous_tokens(self, x_SBC: Tensor, num_tokens: int) -> Tensor:
        """See base class. It is an all-gather over cp."""
        by_segment = x_SBC[len(x_SBC) - num_tokens :].unflatten(1, (self.num_segments, -1)).transpose(0, 1).contiguous()
        gathered = all_gather(by_segment, self._cp)
        zeros = _connected_zeros(gathered[0])
        pieces = [gathered[self._places[number - 1]] if number else zeros for number in self._segments]
        return torch.stack(pieces, 1).flatten(1, 2)

    def _compose(self, transition: Tensor, update: Tensor) -> Tensor:
        """Return the states before this rank's segments, by an all-gather over cp. See `InitialState`."""
        value_size = update.shape[-1]
        joint = torch.cat((update, transition), -1).unflatten(0, (self.num_segments, -1))
        gathered = all_gather(joint.contiguous(), self._cp)
        state = _connected_zeros(gathered[0, ..., :value_size])
        states = [state]
        for place in self._places[: max(self._segments)]:
            new, through = gathered[place].split((value_size, gathered.shape[-1] - value_size), -1)
            state = through @ state + new
            states.append(state)
        return torch.cat([states[number] for number in self._segments])


def _connected_zeros(x: Tensor) -> Tensor:
    """Return zeros that depend on x: the rank of the first segment takes part in the adjoint of the all-gather."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
