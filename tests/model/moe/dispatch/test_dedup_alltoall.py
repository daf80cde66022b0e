"""The all-to-all without duplicates equals the all-to-all in results, gradients and overlap, and sends less."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.parts.dispatcher.dedup_alltoall.module import DedupAllToAllDispatcher, DedupMetadata
from moefold.topology.layout import fold
from tests.model.moe.dispatch.building import make_dispatcher
from tests.model.moe.dispatch.dispatched_layer import CASES, LAYOUTS, E, H, K, T, draw_routing, run_layer
from tests.slow import slow


def _groups(sizes: dict[str, Any]) -> ParallelGroups:
    return ParallelGroups.create(fold(**sizes), torch.device("cpu"))


def _both(
    sizes: dict[str, Any], cases: tuple[str, ...], packs: bool
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    groups = _groups(sizes)
    width = 256 if packs else H
    found = {}
    for case in cases:
        for weighs_early in (False, True):
            found[f"{case}, {weighs_early}"] = tuple(
                run_layer(make_dispatcher(name, groups.moe, E, fp8_dispatch=packs), case, groups, weighs_early, width)
                for name in ("dedup_alltoall", "alltoall")
            )
    return found


def _assert_equal(ranks: list[dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]]) -> None:
    for results in ranks:
        for name, (found, expected) in results.items():
            for key, value in expected.items():
                message = f"{name}, {key}"
                torch.testing.assert_close(
                    found[key], value, rtol=1e-12, atol=1e-12, msg=lambda text, message=message: f"{message}: {text}"
                )


@pytest.mark.parity
@pytest.mark.parametrize("sizes", [LAYOUTS[0], *slow([(layout,) for layout in LAYOUTS[1:]])])
def test_it_equals_the_all_to_all(pool, sizes):
    """Also if the routing probabilities are applied inside the experts."""
    _assert_equal(pool.run(sizes["world_size"], _both, sizes, CASES, False))


@pytest.mark.parity
def test_rows_in_8_bits_equal_the_rows_of_the_all_to_all(pool):
    _assert_equal(pool.run(2, _both, LAYOUTS[0], ("dropped", "empty rank"), True))


def _sent_of_cases() -> list[tuple[int, int]]:
    groups = _groups(LAYOUTS[0])
    return [_sent(case, groups) for case in CASES]


def _sent(case: str, groups: ParallelGroups) -> tuple[int, int]:
    """Rows that this rank sends, and pairs of a token and a rank with any of its experts."""
    dispatcher = make_dispatcher("dedup_alltoall", groups.moe, E)
    routing_map = draw_routing(case, groups.rank, torch.Generator().manual_seed(groups.rank))
    rows, metadata = dispatcher.dispatch_preprocess(torch.randn(T, H, dtype=torch.float64), routing_map)
    kept = torch.ones(T, K, dtype=torch.bool) if routing_map.kept_TK is None else routing_map.kept_TK
    ranks = routing_map.ids_TK // (E // 2)
    pairs = sum(len(set(row[keep].tolist())) for row, keep in zip(ranks, kept, strict=True))
    assert len(rows) == sum(metadata.input_splits)
    return len(rows), pairs


@pytest.mark.parity
def test_a_token_is_sent_to_a_rank_once(pool):
    for found in pool.run(2, _sent_of_cases):
        for case, (rows, pairs) in zip(CASES, found, strict=True):
            assert rows == pairs <= 2 * T, case


class _ForgetsAPartialSum(DedupAllToAllDispatcher):
    def combine_postprocess(self, rows: Tensor, metadata: DedupMetadata) -> Tensor:
        kept = metadata.to_ranks.kept_TK
        assert kept is not None
        first_only = kept & (kept.cumsum(1) == 1)
        return super().combine_postprocess(
            rows, replace(metadata, to_ranks=replace(metadata.to_ranks, kept_TK=first_only))
        )


def _forgetful() -> tuple[bool, bool]:
    groups = _groups(LAYOUTS[0])
    found = run_layer(_ForgetsAPartialSum(groups.moe.ep, E), "spread", groups)
    expected = run_layer(make_dispatcher("alltoall", groups.moe, E), "spread", groups)
    return torch.allclose(found["rows"], expected["rows"]), torch.allclose(found["y"], expected["y"])


@pytest.mark.parity
def test_a_lost_partial_sum_is_noticed(pool):
    assert pool.run(2, _forgetful) == [(True, False)] * 2
