"""The symmetric-memory dispatcher against a stand-in for torch's operators: it has not been run on hardware."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.comm.row_exchange import RowExchange
from moefold.model.moe.dispatch import RoutingMap
from moefold.model.moe.dispatch.validating import ValidatingDispatcher
from moefold.parts.dispatcher.symm_mem.module import SymmMemDispatcher
from moefold.topology.layout import fold
from tests.model.moe.dispatch.building import make_dispatcher
from tests.model.moe.dispatch.dispatched_layer import CASES, LAYOUTS, E, H, K, T, draw_routing, run_layer
from tests.model.moe.dispatch.symm_mem_stand_in import StandInOps
from tests.slow import slow

ROW_BYTES = 8 * H


def _groups(sizes: dict[str, Any]) -> ParallelGroups:
    return ParallelGroups.create(fold(**sizes), torch.device("cpu"))


def _dispatcher(groups: ParallelGroups, capacity: int) -> tuple[SymmMemDispatcher, StandInOps]:
    ops = StandInOps(groups.moe.ep.handle)
    exchange = RowExchange(ops, E, T * K, capacity, ROW_BYTES)
    dispatcher = SymmMemDispatcher(groups.moe.ep, exchange, E)
    return dispatcher, ops


def _both(
    sizes: dict[str, Any], case: str, weighs_early: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    groups = _groups(sizes)
    mine, ops = _dispatcher(groups, T * K * groups.moe.ep.size)
    # Twice: buffers are used again, with the values of the first time in them.
    for _ in range(2):
        ops.calls.clear()
        found = run_layer(mine, case, groups, weighs_early)
    expected = run_layer(make_dispatcher("alltoall", groups.moe, E), case, groups)
    return found, expected, ops.calls


@pytest.mark.parity
@pytest.mark.parametrize("weighs_early", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [LAYOUTS[0], *slow([(layout,) for layout in LAYOUTS[1:]])])
def test_it_equals_the_all_to_all(pool, sizes, case, weighs_early):
    for found, expected, calls in pool.run(sizes["world_size"], _both, sizes, case, weighs_early):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
        passes = 2 if weighs_early else 1
        assert calls == ["dispatch"] * passes + ["combine"] + ["dispatch"] + ["combine"] * passes


def _receive_loads(case: str, capacity: int) -> tuple[float, float | None, list[int]]:
    groups = _groups({"world_size": 2, "ep": 2})
    dispatcher, _ = _dispatcher(groups, capacity)
    generator = torch.Generator().manual_seed(groups.rank)
    routing = draw_routing(case, groups.rank, generator)
    x = torch.randn(T, H, dtype=torch.float64, generator=generator)
    rows, metadata = dispatcher.dispatch(x, routing)
    dispatcher.combine(rows, metadata)
    # A dispatcher from outside may have a buffer and be checked.
    load = ValidatingDispatcher(dispatcher, groups.moe, 0, x.device).take_receive_load()
    assert load is not None
    return float(load), dispatcher.take_receive_load(), list(metadata.tokens_per_expert)


@pytest.mark.parity
def test_a_rank_without_room_gets_nothing_and_the_load_says_so(pool):
    # All tokens of both ranks go to rank 0: 2 * T * K rows.
    exact, too_small = 2 * T * K, 2 * T * K - 1
    for load, again, _ in pool.run(2, _receive_loads, "empty rank", exact):
        assert (load, again) == (1.0, None)
    for rank, (load, _, counts) in enumerate(pool.run(2, _receive_loads, "empty rank", too_small)):
        assert load == exact / too_small
        assert sum(counts) == 0, rank


def test_symmetric_memory_refuses_padded_rows():
    routing = RoutingMap(torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K), padded_capacity=4)
    dispatcher = SymmMemDispatcher.__new__(SymmMemDispatcher)
    with pytest.raises(AssertionError, match="padded rows need no counts"):
        dispatcher.dispatch_preprocess(torch.ones(T, H), routing)


class _StaleOps(StandInOps):
    """Returns the rows of the combine in the wrong order."""

    def combine(self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        super().combine(rows, out, splits_offsets, out_splits_offsets)
        out.copy_(out.flip(0))


def _stale() -> bool:
    groups = _groups({"world_size": 2, "ep": 2})
    exchange = RowExchange(_StaleOps(groups.moe.ep.handle), E, T * K, 2 * T * K, ROW_BYTES)
    mine = run_layer(SymmMemDispatcher(groups.moe.ep, exchange, E), "spread", groups)
    return torch.allclose(mine["y"], run_layer(make_dispatcher("alltoall", groups.moe, E), "spread", groups)["y"])


@pytest.mark.parity
def test_rows_in_a_wrong_order_are_noticed(pool):
    assert pool.run(2, _stale) == [False, False]
