"""`faults.check_dispatch`: nothing changes while ranks agree, and one message names the disagreement."""

import re
from typing import Any

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.comm.resumable import run_to_end
from moefold.errors import RunError
from moefold.model.moe.dispatch import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.validating import ValidatingDispatcher
from moefold.parts.dispatcher.leastloaded.module import RebalanceRule
from moefold.topology.layout import fold
from tests.model.moe.dispatch.building import make_dispatcher
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity

E, T, H = 8, 6, 4
SPILL = RebalanceRule(1.1, 1.0, 1)
NAMES = ("alltoall", "allgather", "leastloaded")


def _dispatcher(groups: ParallelGroups, name: str, layer: int = 3) -> tuple[Dispatcher[Any], ValidatingDispatcher]:
    inner = make_dispatcher(name, groups.moe, E, SPILL)
    return inner, ValidatingDispatcher(inner, groups.moe, layer, torch.device("cpu"))


def _assignment(rank: int, num_tokens: int = T) -> tuple[torch.Tensor, RoutingMap]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, H, dtype=torch.float64, generator=generator)
    # Most go to expert 1, so that the least-loaded dispatcher lends it.
    ids = torch.stack([torch.ones(num_tokens, dtype=torch.int64), torch.arange(num_tokens) % 6 + 2], 1)
    return x, RoutingMap(ids, torch.rand(num_tokens, 2, dtype=torch.float64, generator=generator))


def _journey(dispatcher: Dispatcher[Any], rank: int) -> tuple[Any, ...]:
    x, assignment = _assignment(rank)
    x.requires_grad_()
    rows, plan = dispatcher.dispatch_preprocess(x, assignment)
    rows, beside = run_to_end(dispatcher.dispatch_async(rows, plan, lambda: x * 2))
    rows = dispatcher.dispatch_postprocess(rows, plan)
    loan = dispatcher.migration(plan)
    home = dispatcher.combine(rows * 3, plan)
    (home.sum() + beside.sum()).backward()
    return rows.detach().numpy(), home.detach().numpy(), x.grad.numpy(), loan is not None


def _both(sizes: dict[str, Any]) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    found = {}
    for name in NAMES:
        inner, checked = _dispatcher(groups, name)
        found[name] = _journey(inner, groups.rank), _journey(checked, groups.rank)
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 2, "ep": 2},
        {"world_size": 4, "tp": 2, "ep": 2, "etp": 2},
        {"world_size": 4, "cp": 2, "ep": 2, "etp": 2, "moe_order": "pp-edp-etp-ep"},
    ],
)
def test_ranks_that_agree_get_the_result_of_the_dispatcher(pool, sizes):
    ranks = pool.run(sizes["world_size"], _both, sizes)
    for found in ranks:
        for plain, checked in found.values():
            assert plain[3] == checked[3]
            for a, b in zip(plain[:3], checked[:3], strict=True):
                assert (a == b).all()
    assert all(found["leastloaded"][0][3] for found in ranks)


def _message(sizes: dict[str, Any], name: str, fault: str) -> str:
    """Return the message on a rank when rank 1 does something else than the others, or empty if there is none."""
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    is_odd = groups.rank == 1
    groups.recorder.begin_step(8 if is_odd and fault == "step" else 7, "forward")
    inner, checked = _dispatcher(groups, name, layer=5 if is_odd and fault == "layer" else 3)
    x, assignment = _assignment(groups.rank, T - 1 if is_odd and fault == "tokens" else T)
    try:
        rows, plan = checked.dispatch_preprocess(x, assignment)
        if is_odd and fault == "count":
            plan.input_splits[1 - groups.moe.ep.rank] += 2
        if is_odd and fault == "phase":
            checked.combine_communicate(rows, plan)
        checked.dispatch_communicate(rows, plan)
    except RunError as error:
        return str(error)
    return ""


TWO = {"world_size": 2, "ep": 2}
FOUR = {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}


def test_a_rank_at_another_place_is_named(pool):
    words = {
        "step": ["before the preprocess of layer 3", "rank 1 is at step 8 and not 7 as rank 0"],
        "layer": ["rank 1 is at layer 5 and not 3 as rank 0"],
        "phase": ["rank 1 is at phase combine and not dispatch as rank 0"],
    }
    asked = [(TWO, name, fault) for name in NAMES for fault in words]
    for (_, name, fault), (first, second) in zip(asked, run_each(pool, 2, _message, *asked), strict=True):
        assert all(word in first for word in words[fault]), (name, first)
        assert second.partition(": ")[2] == first.partition(": ")[2]


@pytest.mark.parametrize(("sizes", "target"), [(TWO, 0), (FOUR, 3)])
def test_a_wrong_count_is_named_with_both_ranks(pool, sizes, target):
    asked = [(sizes, name, "count") for name in ("alltoall", "leastloaded")]
    for found in run_each(pool, sizes["world_size"], _message, *asked):
        assert len(set(found)) == 1
        assert found[0].startswith("ranks disagree before the dispatch of layer 3 in step 7 (faults.check_dispatch): ")
        ((sent, expected),) = re.findall(
            rf": rank 1 sends (\d+) rows to rank {target} over ep, which expects (\d+); nothing was sent$", found[0]
        )
        assert int(sent) == int(expected) + 2


def test_other_numbers_of_tokens_are_found_before_the_routing_is_gathered(pool):
    asked = [(TWO, "allgather", "tokens"), (TWO, "alltoall", "tokens"), *((TWO, name, "") for name in NAMES)]
    found, *others = run_each(pool, 2, _message, *asked)
    assert "rank 0 sends 6 rows to rank 1 over experts, which expects 5" in found[0]
    assert "rank 1 sends 5 rows to rank 0 over experts, which expects 6" in found[0]
    # The all-to-all takes any number of tokens; and nothing is said of ranks that agree.
    assert others == [["", ""]] * 4
