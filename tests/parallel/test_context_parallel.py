"""Context-parallel attention equals attention over the whole sequence, whatever the way of communicating."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.comm.groups import ParallelGroups
from moefold.config.base.part_registry import find_part
from moefold.model.attention import CausalAttention
from moefold.ops.block_attention import BlockedWindow
from moefold.ops.cudnn_attention import CudnnAttention
from moefold.parallel.context_parallel import context_parallel_attention, sequence_positions
from moefold.parallel.planned_attention import AttentionPlanner, PlannedAttention
from moefold.topology.layout import fold
from tests.model.attention_reference import (
    documents,
    random_attention,
    random_sinks,
    random_starts,
    reference_attention,
    relative_errors,
    with_gradients,
)
from tests.ops.reference_cudnn import reference_cudnn
from tests.ops.reference_flash import reference_flash
from tests.slow import slow
from tests.verify.shared_ranks import run_each

KINDS = ["ring", "allgather", "ulysses", "planned"]
HEADS = [(4, 4, 8), (8, 4, 8), (4, 2, 8), (4, 1, 5)]
SEQ_LEN = 24
Case = tuple[tuple[int, int, int], int]
CASES: list[Case] = [(heads, batch) for heads in HEADS for batch in (1, 2)]


@dataclass(frozen=True)
class Limits:
    """Settings by which a query sees fewer keys."""

    documents: bool = False
    window: int = 0
    sinks: bool = False
    seq_len: int = SEQ_LEN


NO_LIMITS = Limits()


def _core(kind: str, groups: ParallelGroups, window: int = 0):
    """The core attention of a kind."""
    if kind == "planned":
        return PlannedAttention(AttentionPlanner(groups), window)
    return context_parallel_attention(find_part("context", kind)(), groups.attn.cp, window)


def _attend_on_shards(
    kind: str, sizes: dict[str, int], cases: list[Case], dtype: torch.dtype, cut_as: str, limits: Limits
) -> list[list[np.ndarray]]:
    """On each rank: [out, dq, dk, dv] in float64 of its positions, for each case. The data differ along tp."""
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    cp = groups.attn.cp
    positions = sequence_positions(find_part("context", cut_as), limits.seq_len, cp.size, cp.rank)
    core = _core(kind, groups, limits.window)
    results = []
    for heads, batch in cases:
        shards = [x[positions].to(dtype) for x in random_attention(groups.attn.tp.rank, limits.seq_len, batch, heads)]
        starts = random_starts(groups.attn.tp.rank, limits.seq_len, batch) if limits.documents else None
        attend = partial(core, documents=documents(starts))
        if limits.sinks:
            shards.append(random_sinks(groups.attn.tp.rank, heads[0]).to(dtype))
            attend = _sinks_last(attend)
        results.append([x.double().numpy() for x in with_gradients(attend, *shards)])
    return results


def _attend_through_flash(*args) -> list[list[np.ndarray]]:
    """The same through the calls of the CUDA kernel, with operators of their schemas that run on a CPU."""
    with reference_flash() as flash:
        results = _attend_on_shards(*args)
    assert {"forward", "backward"} == set(flash.calls)
    return results


def _attend_through_cudnn(*args) -> list[list[np.ndarray]]:
    """The same with the kernel of cuDNN for blocks, whose operators run on a CPU."""

    build = context_parallel_attention

    def with_cudnn(*args):
        core = build(*args)
        core.block_kernel = CudnnAttention()
        return core

    with reference_cudnn() as cudnn, mock.patch(f"{__name__}.context_parallel_attention", with_cudnn):
        results = _attend_on_shards(*args)
    assert {"forward", "backward"} == set(cudnn.calls)
    return results


def _largest_errors(
    pool,
    kinds: Sequence[str],
    sizes: dict[str, int],
    *,
    dtype=torch.float64,
    cut_as: str = "",
    cases=CASES,
    limits: Sequence[Limits] = (NO_LIMITS,),
    attend_on_shards=_attend_on_shards,
) -> dict[tuple[str, Limits], list[float]]:
    """For out, dq, dk and dv of each kind: the largest error over the cases, relative to the tensor's largest value.

    The same ranks compute one kind and one limit after another: their start takes longer.
    """
    pairs = list(itertools.product(kinds, limits))
    each = [(kind, sizes, cases, dtype, cut_as or kind, limit) for kind, limit in pairs]
    found = run_each(pool, sizes["world_size"], attend_on_shards, *each)
    return {
        (kind, limit): _errors(ranks, sizes, cases, dtype, cut_as or kind, limit)
        for (kind, limit), ranks in zip(pairs, found, strict=True)
    }


def _errors(
    ranks: list[list[list[np.ndarray]]],
    sizes: dict[str, int],
    cases: list[Case],
    dtype: torch.dtype,
    cut_as: str,
    limits: Limits,
) -> list[float]:
    layout = fold(**sizes)
    order = torch.cat(
        [sequence_positions(find_part("context", cut_as), limits.seq_len, layout.cp, rank) for rank in range(layout.cp)]
    )
    errors = []
    for tp_rank, (i, (heads, batch)) in itertools.product(range(layout.tp), enumerate(cases)):
        # The reference sees the same values as the rank: numbers of the narrow type.
        inputs = [x.to(dtype).double() for x in random_attention(tp_rank, limits.seq_len, batch, heads)]
        starts = random_starts(tp_rank, limits.seq_len, batch) if limits.documents else None
        attend = partial(_attend_to_whole, document_starts=starts, window=limits.window)
        if limits.sinks:
            inputs.append(random_sinks(tp_rank, heads[0]).to(dtype).double())
            attend = _sinks_last(attend)
        expected = with_gradients(attend, *inputs)
        members = layout.attention.group(tp_rank, "cp")
        found = [np.concatenate(shards) for shards in zip(*(ranks[rank][i] for rank in members), strict=True)]
        whole = [torch.from_numpy(x) for x in found]
        if limits.sinks:
            # Each rank has the part of its queries, or of its heads.
            whole[4] = whole[4].view(layout.cp, -1).sum(0)
        expected = [*(x[order] for x in expected[:4]), *expected[4:]]
        errors.append(relative_errors(whole, expected))
    return [max(column) for column in zip(*errors, strict=True)]


def _attend_to_whole(q, k, v, document_starts=None, window=0, sinks=None) -> torch.Tensor:
    positions = torch.arange(len(q))
    return reference_attention(q, k, v, positions, positions, document_starts, window, sinks)


def _sinks_last(attend):
    return lambda q, k, v, sinks: attend(q, k, v, sinks=sinks)


def _assert_small(errors: dict[tuple[str, Limits], list[float]], tolerance: float) -> None:
    assert {which: max(found) for which, found in errors.items() if max(found) >= tolerance} == {}


@pytest.mark.parametrize("cp", [4, *slow([(1,), (2,)])])
def test_equals_the_whole_sequence_and_documents_do_not_see_each_other(pool, cp):
    limits = (NO_LIMITS, Limits(documents=True))
    _assert_small(_largest_errors(pool, KINDS, {"world_size": cp, "cp": cp}, limits=limits), 1e-10)


EVERYTHING = Limits(documents=True, window=5, sinks=True)
LIMITS = (
    Limits(sinks=True),
    Limits(window=1, sinks=True),
    Limits(window=4),
    Limits(window=7, sinks=True),
    Limits(window=23),
    EVERYTHING,
)
"""At cp = 4 a chunk has three tokens: windows within it, of one more, of several and of nearly all."""


def test_windows_and_sinks(pool):
    cases = [((8, 4, 8), 2), ((4, 1, 5), 1)]
    _assert_small(_largest_errors(pool, KINDS, {"world_size": 4, "cp": 4}, cases=cases, limits=LIMITS), 1e-10)


def test_windows_and_documents_through_the_cuda_operators(pool):
    """No call has a mask in memory: the reference of the operators takes none."""
    cases = [((8, 4, 8), 2), ((4, 1, 8), 1)]
    limits = (Limits(documents=True), Limits(window=7), EVERYTHING)
    errors = _largest_errors(
        pool, KINDS, {"world_size": 4, "cp": 4}, cases=cases, limits=limits, attend_on_shards=_attend_through_flash
    )
    _assert_small(errors, 1e-10)


def test_blocks_through_the_operators_of_cudnn(pool):
    cases = [((8, 4, 8), 2), ((4, 1, 8), 1)]
    sizes = {"world_size": 4, "cp": 4}
    limits = (NO_LIMITS, Limits(sinks=True))
    errors = _largest_errors(
        pool, ("ring", "allgather"), sizes, cases=cases, limits=limits, attend_on_shards=_attend_through_cudnn
    )
    _assert_small(errors, 1e-10)


@pytest.mark.parametrize(
    "limits", [Limits(window=20, sinks=True, seq_len=1040), *slow([(Limits(True, 3, False, 1040),)])], ids=str
)
def test_a_long_sequence_goes_tile_by_tile(pool, limits):
    cases = [((2, 1, 4), 2)]
    assert BlockedWindow.is_worthwhile(limits.window, limits.seq_len // 4)
    _assert_small(_largest_errors(pool, KINDS, {"world_size": 2, "cp": 2}, cases=cases, limits=[limits]), 1e-10)


def test_limits_in_bfloat16(pool):
    sizes = {"world_size": 2, "cp": 2}
    _assert_small(_largest_errors(pool, KINDS, sizes, dtype=torch.bfloat16, limits=[EVERYTHING]), 3e-2)


def test_members_need_not_be_neighbours(pool):
    sizes = {"world_size": 4, "tp": 2, "cp": 2}
    assert fold(**sizes).attention.groups("cp") == ((0, 2), (1, 3))
    _assert_small(_largest_errors(pool, KINDS, sizes), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float32, 1e-5)])
def test_narrow_types(pool, dtype, tolerance):
    _assert_small(_largest_errors(pool, KINDS, {"world_size": 4, "cp": 4}, dtype=dtype), tolerance)


def test_ring_attention_of_three_ranks_equals_one_rank(pool):
    _assert_small(_largest_errors(pool, ["ring"], {"world_size": 3, "cp": 3}), 1e-10)


def test_ulysses_repeats_heads_that_cp_does_not_divide(pool):
    cases = [((6, 3, 8), 2), ((12, 6, 8), 1)]
    _assert_small(_largest_errors(pool, ["ulysses"], {"world_size": 2, "cp": 2}, cases=cases), 1e-10)
    cases = [((12, 6, 8), 2), ((12, 3, 8), 1)]
    _assert_small(_largest_errors(pool, ["ulysses"], {"world_size": 4, "cp": 4}, cases=cases), 1e-10)


@pytest.mark.parametrize(("kind", "cut_as"), [("ring", "ulysses"), ("allgather", "ulysses"), ("ulysses", "ring")])
def test_chunks_of_the_wrong_rank_are_noticed(pool, kind, cut_as):
    errors = _largest_errors(pool, [kind], {"world_size": 2, "cp": 2}, cut_as=cut_as)
    assert min(errors[kind, NO_LIMITS]) > 1e-2


class _CountPairs(TorchDispatchMode):
    """Counts the (query, key) pairs that the kernels are asked for, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_pairs = self.backward_pairs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.forward_pairs += _pairs(args[0], args[1], args[4:5])
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.backward_pairs += _pairs(args[1], args[2], args[7:8])
        return func(*args, **(kwargs or {}))


def _pairs(q: torch.Tensor, k: torch.Tensor, causal: tuple[bool, ...]) -> int:
    """Pairs of one call. An argument that has its default does not reach the dispatcher."""
    rows, columns = q.shape[2], k.shape[2]
    return rows * (rows + 1) // 2 if causal == (True,) else rows * columns


def _count_pairs(kind: str, cp: int, window: int = 0) -> tuple[int, int]:
    group = ParallelGroups.create(fold(world_size=cp, cp=cp), torch.device("cpu")).attn.cp
    positions = sequence_positions(find_part("context", kind), SEQ_LEN, cp, group.rank)
    shards = [x[positions] for x in random_attention(0, SEQ_LEN, 1, HEADS[1])]
    with _CountPairs() as count:
        with_gradients(context_parallel_attention(find_part("context", kind)(), group, window), *shards)
    return count.forward_pairs, count.backward_pairs


@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_only_pairs_of_the_past_are_computed_and_every_rank_has_as_many(pool, kind):
    pairs = SEQ_LEN * (SEQ_LEN + 1) // 2 // 4
    assert pool.run(4, _count_pairs, kind, 4) == [(pairs, pairs)] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_positions_partition_the_sequence(kind, cp):
    parts = [sequence_positions(find_part("context", kind), 48, cp, rank) for rank in range(cp)]
    assert all(part.dtype == torch.int64 and part.shape == (48 // cp,) for part in parts)
    assert all((part.diff() > 0).all() for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(48))


@pytest.mark.parametrize("kind", ["ring", "allgather"])
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_zigzag_balances_the_causal_work_exactly(kind, cp):
    work = {int((sequence_positions(find_part("context", kind), 48, cp, rank) + 1).sum()) for rank in range(cp)}
    assert work == {48 * 49 // 2 // cp}


def test_positions_worked_by_hand():
    assert sequence_positions(find_part("context", "ring"), 8, 2, 0).tolist() == [0, 1, 6, 7]
    assert sequence_positions(find_part("context", "allgather"), 8, 2, 1).tolist() == [2, 3, 4, 5]
    assert sequence_positions(find_part("context", "ulysses"), 8, 2, 1).tolist() == [4, 5, 6, 7]
    assert sequence_positions(find_part("context", "ring"), 5, 1, 0).tolist() == [0, 1, 2, 3, 4]


def _kind_of_core(kind: str) -> str:
    group = ParallelGroups.create(fold(world_size=2, cp=2), torch.device("cpu")).attn
    assert isinstance(context_parallel_attention(find_part("context", kind)(), group.tp), CausalAttention)
    return type(context_parallel_attention(find_part("context", kind)(), group.cp)).__name__


def test_the_core_follows_the_kind(pool):
    names = {"ring": "RingAttention", "allgather": "AllGatherAttention", "ulysses": "UlyssesAttention"}
    found = run_each(pool, 2, _kind_of_core, *((kind,) for kind in names))
    assert found == [[name] * 2 for name in names.values()]


@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_chunks_outside_the_window_are_not_computed(pool, kind):
    four, two = run_each(pool, 4, _count_pairs, (kind, 4, 4), (kind, 4, 2))
    # Each of eight chunks of three tokens has the triangle with itself and the square with the one before it.
    assert four == [(6 + 6 + 9,) * 2, *[(6 + 9 + 6 + 9,) * 2] * 3]
    # The second of two tokens is the neighbour: the square with the chunk before is one pair; within, there is a mask.
    assert two == [(9 + 9 + 1,) * 2, *[(9 + 1 + 9 + 1,) * 2] * 3]
