"""Planned attention of any legal placement equals attention over the whole samples, and sends the planned bytes."""

from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.ops.documents import DocumentBounds, PackedDocuments
from moefold.parallel import planned_attention
from moefold.parallel.planned_attention import AttentionPlanner, PlanAttention, PlannedAttention
from moefold.planner.cost_model.attention_load import exchange_bytes
from moefold.topology.attention_plan import plan_attention
from moefold.topology.layout import fold
from moefold.topology.token_placement import MicroBatchSetShape, Placement, document_bounds, place_tokens
from tests.model.attention_reference import (
    random_attention,
    random_sinks,
    reference_attention,
    relative_errors,
    with_gradients,
)
from tests.topology.micro_batch_sets import any_placement

SIZES = {"world_size": 4, "cp": 2}
SHAPE = MicroBatchSetShape(dp=2, cp=2, micro_batch_size=2, seq_len=24)
DOCUMENTS = (
    document_bounds(SHAPE, [[0, 1, 9], [0], [0, 12, 13, 14, 20], [0, 23]]),
    document_bounds(SHAPE, [[0, 4, 8, 12, 16, 20]] * 3 + [[0]]),
)
HEADS = (4, 2, 5)


@dataclass(frozen=True)
class MicroBatchSet:
    """A placement, how it is planned, and a sliding window."""

    placement: Placement
    plan: PlanAttention
    window: int = 0


def _sets() -> list[MicroBatchSet]:
    """Placements of all kinds, and random ones, with hosts at home and balanced."""
    found = []
    for i, bounds_N in enumerate(DOCUMENTS):
        for kind in ("samples", "documents", "balanced"):
            placement = place_tokens(kind, SHAPE, bounds_N, 1 + i)
            found.append(
                MicroBatchSet(
                    placement, partial(plan_attention, tolerance=None if kind == "balanced" else 0.0, block=2)
                )
            )
        for seed in range(3):
            plan = partial(plan_attention, tolerance=(None, 0.0, 0.3)[seed], block=1 + seed, pool=(0, 2, 4)[seed])
            found.append(MicroBatchSet(any_placement(SHAPE, bounds_N, seed + i), plan, window=(0, 5, 1)[seed]))
    return found


def _columns() -> list[torch.Tensor]:
    """[grad_out, q, k, v] of all tokens of the micro-batch set, by their numbers, [tokens, 1, heads, D]."""
    given = random_attention(0, SHAPE.seq_len, SHAPE.num_samples, HEADS)
    return [x.transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in given]


class _CountedAllToAll:
    """All-to-all that counts the rows and bytes that this rank sends."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self._all_to_all = planned_attention.all_to_all

    def __call__(self, x, group, input_splits, output_splits):
        assert input_splits[group.rank] == 0, "a rank sends a row to itself"
        self.calls.append((len(x), x.nbytes))
        return self._all_to_all(x, group, input_splits, output_splits)


def _attend(sets: list[MicroBatchSet], order: str = "pp-dp-cp-tp") -> list[tuple]:
    """For each micro-batch set: the tokens of this rank, [out, dq, dk, dv, dsinks] of them, and its sent values."""
    groups = ParallelGroups.create(fold(**SIZES, order=order), torch.device("cpu"))
    number = groups.attn.dp.rank * SHAPE.cp + groups.attn.cp.rank
    results = []
    for each in sets:
        tokens = each.placement.slots(number)
        bounds = DocumentBounds(((0,),), each.placement)
        documents = PackedDocuments(bounds, torch.zeros(len(tokens), 1, dtype=torch.int64))
        planner = AttentionPlanner(groups, each.plan)
        core = PlannedAttention(planner, each.window)
        shards = [x[tokens] for x in _columns()]

        def attend(q, k, v, sinks, core=core, documents=documents):
            return core(q, k, v, documents, sinks)

        with mock.patch.object(planned_attention, "all_to_all", _CountedAllToAll()) as counted:
            found = with_gradients(attend, *shards, random_sinks(0, HEADS[0]))
        results.append((tokens, [x.numpy() for x in found], counted.calls, planner.statistics))
    return results


def _expected(each: MicroBatchSet) -> list[torch.Tensor]:
    """[out, dq, dk, dv, dsinks] of all tokens of the micro-batch set by the definition."""
    bounds_N = each.placement.bounds_N
    given = random_attention(0, SHAPE.seq_len, SHAPE.num_samples, HEADS)
    numbers = np.arange(SHAPE.num_tokens)
    starts = bounds_N[np.searchsorted(bounds_N, numbers, "right") - 1] % SHAPE.seq_len
    starts_SB = torch.from_numpy(starts.reshape(SHAPE.num_samples, -1).T.copy())
    positions = torch.arange(SHAPE.seq_len)

    def attend(q, k, v, sinks):
        return reference_attention(q, k, v, positions, positions, starts_SB, each.window, sinks)

    *tensors, sinks_grad = with_gradients(attend, *given, random_sinks(0, HEADS[0]))
    return [*(x.transpose(0, 1).flatten(0, 1) for x in tensors), sinks_grad]


def _assemble(ranks: list[tuple]) -> list[torch.Tensor]:
    """Return tensors of all tokens, joined from the ranks' tensors, and the sum of the gradients of the sinks."""
    tokens = np.concatenate([rank[0] for rank in ranks])
    assert sorted(tokens) == list(range(SHAPE.num_tokens))
    order = np.argsort(tokens)
    columns = [np.concatenate([rank[1][i] for rank in ranks])[order].squeeze(1) for i in range(4)]
    return [torch.from_numpy(x) for x in (*columns, sum(rank[1][4] for rank in ranks))]


@pytest.fixture(scope="module")
def attended(pool) -> list[tuple[MicroBatchSet, list[tuple]]]:
    """Every micro-batch set with the results of its ranks."""
    sets = _sets()
    return list(zip(sets, map(list, zip(*pool.run(4, _attend, sets), strict=True)), strict=True))


def test_the_result_does_not_depend_on_the_placement(attended):
    for each, ranks in attended:
        assert max(relative_errors(_assemble(ranks), _expected(each))) < 1e-12


def test_members_of_a_group_need_not_be_in_the_order_of_the_axes(pool):
    each = _sets()[-1]
    ranks = [results[0] for results in pool.run(4, _attend, [each], "pp-cp-dp-tp")]
    assert max(relative_errors(_assemble(ranks), _expected(each))) < 1e-12


def test_ranks_send_the_rows_of_the_exchange(attended):
    """And as many bytes as the cost model prices."""
    query_heads, kv_heads, size = HEADS
    for each, ranks in attended:
        exchange = each.plan(each.placement, window=each.window).exchange()
        num_queries, num_keys = exchange.queries.num_rows, exchange.keys.num_rows
        widths = {"query_width": 2 * query_heads * size, "kv_width": 2 * kv_heads * size}
        forward, backward = exchange_bytes(num_queries, num_keys, **widths, value_bytes=8)
        sent_bytes = forward + backward
        assert sum(num_bytes for rank in ranks for _, num_bytes in rank[2]) == sent_bytes
        assert sum(rank[3].sent_bytes for rank in ranks) == sent_bytes
        assert sum(rank[3].moved_rows for rank in ranks) == num_queries
        pairs = each.plan(each.placement, window=each.window).pairs_of_ranks
        assert sorted(rank[3].pairs[0] for rank in ranks) == sorted(pairs.tolist())
        assert len({rank[3].plans_crc for rank in ranks}) == 1
        assert num_keys <= (SHAPE.num_ranks - 1) * SHAPE.num_tokens


def _sent_in_bfloat16() -> int:
    groups = ParallelGroups.create(fold(**SIZES), torch.device("cpu"))
    core = PlannedAttention(AttentionPlanner(groups))
    shards = [x[:12].bfloat16() for x in random_attention(groups.rank, SHAPE.seq_len, 2, HEADS)]
    with_gradients(core, *shards)
    return core.planner.statistics.sent_bytes


def test_gradients_of_keys_are_sent_in_float32(pool):
    query_heads, kv_heads, size = HEADS
    # Rank 0 of two has chunks 0 and 3 of 6 tokens, and rank 1 the two between: 12 and 6 rows of two samples.
    expected = sum(
        exchange_bytes(
            0, 2 * 2 * (12 + 6), query_width=2 * query_heads * size, kv_width=2 * kv_heads * size, value_bytes=2
        )
    )
    assert sum(pool.run(4, _sent_in_bfloat16)) == expected


def _attend_with_a_wrong_row(sets: list[MicroBatchSet]) -> list[tuple]:
    """The same, but a rank sends its last row instead of the first."""
    build = planned_attention.RowTransfer.__init__

    def build_wrong(self, *args) -> None:
        build(self, *args)
        self._sent_rows[:1] = self._sent_rows[-1:]

    with mock.patch.object(planned_attention.RowTransfer, "__init__", build_wrong):
        return _attend(sets)


def _attend_without_sums(sets: list[MicroBatchSet]) -> list[tuple]:
    """The same, but gradients that ranks return replace a rank's own instead of being added."""

    def scatter(self, x):
        total = x.new_zeros((self._num_own, x.shape[1]))
        total[self._own_rows] = x[self._own_places]
        if self._communicates:
            returned = planned_attention.all_to_all(
                x[self._received_places], self._group, self._output_splits, self._input_splits
            )
            total[self._sent_rows] = returned
        return total

    with mock.patch.object(planned_attention.RowTransfer, "scatter_sum", scatter):
        return _attend(sets)


@pytest.mark.parametrize(
    ("attend", "wrong"), [(_attend_with_a_wrong_row, (0, 1, 2, 3)), (_attend_without_sums, (2, 3))]
)
def test_a_wrong_exchange_is_noticed(pool, attend, wrong):
    each = MicroBatchSet(place_tokens("samples", SHAPE, DOCUMENTS[0]), plan_attention)
    ranks = [sets[0] for sets in pool.run(4, attend, [each])]
    errors = relative_errors(_assemble(ranks), _expected(each))
    assert all((error > 1e-3) == (i in wrong) for i, error in enumerate(errors[:4])), errors


def _nodes(order: str) -> tuple[int, ...] | None:
    groups = ParallelGroups.create(fold(**SIZES, order=order), torch.device("cpu"))
    with mock.patch("socket.gethostname", return_value=f"host{groups.rank // 2}"):
        return planned_attention.nodes_of_set(groups)


def test_ranks_know_which_of_them_share_a_machine(pool):
    # Ranks 0 and 1 are on one machine: the cp ranks of the first sample, or the first cp ranks of two samples.
    assert pool.run(4, _nodes, "pp-dp-cp-tp") == [(0, 0, 2, 2)] * 4
    assert pool.run(4, _nodes, "pp-cp-dp-tp") == [(0, 2, 0, 2)] * 4
