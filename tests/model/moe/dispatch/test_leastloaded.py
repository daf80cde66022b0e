"""Least-loaded dispatch gives the results of one rank, whatever the load, on ranks of nearly equal load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.comm.groups import ParallelGroups
from moefold.model.moe.dispatch import Dispatcher, LocalDispatcher, RoutingMap
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.parts.dispatcher.leastloaded import module as least_loaded
from moefold.parts.dispatcher.leastloaded.module import RebalanceRule
from moefold.topology.layout import Layout, fold
from tests.model.moe.dispatch.building import make_dispatcher
from tests.verify.covering import few_else_slow

E, H, F = 8, 6, 8
T = 40
RULE = RebalanceRule(1.3, 1.1, 1)
WEIGHTS = ("w_gate", "w_up", "w_down")

LAYOUTS = [
    {"world_size": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 4, "tp": 2, "ep": 2, "etp": 2},
    {"world_size": 4, "cp": 2, "ep": 2, "etp": 2, "moe_order": "pp-edp-etp-ep"},
    {"world_size": 4, "ep": 2},
]


@dataclass(frozen=True)
class Case:
    """How the copies of every rank are routed."""

    skew: float = 0.0
    """Part of the tokens whose first choice is expert `hot`; the others choose in turn."""
    hot: int = 5
    top_k: int = 1
    tokens: tuple[int, ...] = (T, T, T, T)
    """Tokens of each rank."""
    kept: float = 1.0
    """Part of the copies that are not dropped."""
    min_tokens: int = 1
    moves: bool = True
    """Return whether any copy must leave the rank of its expert on four ranks of ep."""

    def ids(self, rank: int) -> Tensor:
        """Chosen experts of a rank's tokens, int64 [T, K]."""
        token = torch.arange(self.tokens[rank])
        first = torch.where(token < round(self.skew * self.tokens[rank]), self.hot, (token + rank) % E)
        return torch.stack([(first + k * (1 + token % 3)) % E for k in range(self.top_k)], 1)

    def assignment(self, rank: int) -> RoutingMap:
        """Routing of a rank, with weights and drops of its own."""
        generator = torch.Generator().manual_seed(100 + rank)
        ids = self.ids(rank)
        probs = torch.rand(ids.shape, dtype=torch.float64, generator=generator)
        kept = None if self.kept == 1 else torch.rand(ids.shape, generator=generator) < self.kept
        return RoutingMap(ids, probs.requires_grad_(), kept)

    def tokens_and_grad(self, rank: int) -> tuple[Tensor, Tensor]:
        """A rank's tokens and the gradient of their outputs."""
        generator = torch.Generator().manual_seed(rank)
        x, grad = torch.randn(2, self.tokens[rank], H, dtype=torch.float64, generator=generator)
        return x.requires_grad_(), grad


CASES = {
    "balanced": Case(moves=False),
    "30 %": Case(0.3),
    "50 %": Case(0.5),
    "80 %": Case(0.8),
    "95 %": Case(0.95),
    "all to one": Case(1.0),
    "all to the last, top 2": Case(1.0, hot=7, top_k=2),
    "top 2": Case(0.8, top_k=2, hot=0),
    "ranks without tokens": Case(0.8, tokens=(0, T, 0, T)),
    "one rank with tokens": Case(1.0, tokens=(0, 0, 7, 0)),
    "no tokens at all": Case(tokens=(0, 0, 0, 0), moves=False),
    "dropping": Case(0.8, kept=0.6),
    "all dropped": Case(0.8, kept=0.0, moves=False),
    "chunks": Case(0.8, min_tokens=25),
    "chunks too large": Case(0.8, min_tokens=1000, moves=False),
}


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(77)
    shapes = {"w_gate": (E, H, F), "w_up": (E, H, F), "w_down": (E, F, H)}
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}


def _slices(layout: Layout, rank: int) -> dict[str, tuple[slice, ...]]:
    experts, width = E // layout.ep, F // layout.etp
    ep, etp = layout.moe.coordinate(rank, "ep"), layout.moe.coordinate(rank, "etp")
    mine, part = slice(ep * experts, (ep + 1) * experts), slice(etp * width, (etp + 1) * width)
    return {"w_gate": (mine, slice(None), part), "w_up": (mine, slice(None), part), "w_down": (mine, part)}


def _experts(layout: Layout, rank: int) -> Experts:
    experts = Experts(E // layout.ep, H, F // layout.etp).double()
    weights = _weights()
    for name, index in _slices(layout, rank).items():
        setattr(experts, name, nn.Parameter(weights[name][index].clone()))
    return experts


def _apply(dispatcher: Dispatcher[Any], experts: Experts, x: Tensor, assignment: RoutingMap) -> tuple[Tensor, Any, int]:
    rows, plan = dispatcher.dispatch(x, assignment)
    y = dispatcher.combine(
        experts(ExpertInput(rows, plan.tokens_per_expert, migration=dispatcher.migration(plan))), plan
    )
    return y, plan, len(rows)


def _run_case(case: Case, name: str, groups: ParallelGroups) -> dict[str, Any]:
    """Run one layer forward and backward; return all that can be compared, and the moved rows."""
    rule = RebalanceRule(RULE.threshold, RULE.capacity, case.min_tokens)
    dispatcher = make_dispatcher(name, groups.moe, E, rule)
    experts = _experts(groups.layout, groups.rank)
    x, grad = case.tokens_and_grad(groups.rank)
    assignment = case.assignment(groups.rank)
    y, plan, rows = _apply(dispatcher, experts, x, assignment)
    y.backward(grad)
    tensors = {"y": y.detach(), "x": x.grad, "probs": assignment.probs_TK.grad}
    tensors |= {name: getattr(experts, name).grad for name in WEIGHTS}
    return {key: value.numpy() for key, value in tensors.items()} | {"rows": rows, "moved": plan.migration is not None}


def _run_cases(sizes: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    return {
        (case, name): _run_case(CASES[case], name, groups) for case in CASES for name in ("leastloaded", "alltoall")
    }


def _reference(case: Case, layout: Layout) -> list[dict[str, Tensor]]:
    """Return the results that each rank must give: all tokens on one rank that holds all experts."""
    experts = Experts(E, H, F).double()
    for name, weight in _weights().items():
        setattr(experts, name, nn.Parameter(weight))
    found = []
    for rank in range(layout.world_size):
        x, grad = case.tokens_and_grad(rank)
        assignment = case.assignment(rank)
        y, _, _ = _apply(LocalDispatcher(E), experts, x, assignment)
        y.backward(grad)
        found.append({"y": y.detach(), "x": x.grad, "probs": assignment.probs_TK.grad})
    for rank, record in enumerate(found):
        record |= {name: getattr(experts, name).grad[index] for name, index in _slices(layout, rank).items()}
    return found


def _assert_equal(ranks: Sequence[dict[str, Any]], layout: Layout, reference: list[dict[str, Tensor]]) -> None:
    for rank, expected in enumerate(reference):
        replicas = layout.moe.group(rank, "edp")
        for key, value in expected.items():
            holders = replicas if key in WEIGHTS else [rank]
            total = sum(torch.from_numpy(ranks[holder][key]) for holder in holders)
            torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture(scope="module")
def run_cases(pool):
    """Return the results of each rank in all cases under a layout; each layout is run once."""
    found = {}

    def run(sizes: dict[str, Any]) -> Any:
        name = str(sizes)
        if name not in found:
            found[name] = pool.run(sizes["world_size"], _run_cases, sizes)
        return found[name]

    return run


@pytest.mark.parity
@pytest.mark.parametrize("sizes", few_else_slow(LAYOUTS, [LAYOUTS[1], LAYOUTS[3]]))
def test_equal_to_one_rank_and_to_the_all_to_all(run_cases, sizes):
    layout = fold(**sizes)
    ranks = run_cases(sizes)
    for name, case in CASES.items():
        reference = _reference(case, layout)
        for dispatcher in ("leastloaded", "alltoall"):
            _assert_equal([rank[name, dispatcher] for rank in ranks], layout, reference)
        mine = [rank[name, "leastloaded"] for rank in ranks]
        assert not any(rank[name, "alltoall"]["moved"] for rank in ranks)
        if layout.ep == 4:
            assert [record["moved"] for record in mine] == [case.moves] * 4, name
        if not case.moves:
            assert not any(record["moved"] for record in mine)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["30 %", "50 %", "80 %", "95 %", "all to one", "all to the last, top 2", "dropping"])
def test_no_rank_holds_many_more_rows_than_the_mean(run_cases, name):
    ranks = run_cases({"world_size": 4, "tp": 2, "cp": 2, "ep": 4})
    rows = [rank[name, "leastloaded"]["rows"] for rank in ranks]
    plain = [rank[name, "alltoall"]["rows"] for rank in ranks]
    assert sum(rows) == sum(plain)
    mean = sum(rows) / 4
    assert max(plain) > 1.35 * mean
    assert max(rows) <= 1.1 * mean + 1


def _run_with_broken_return(case: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """As if the gradients of lent experts came home doubled."""
    exchange, calls = least_loaded.all_to_all, []

    def broken(rows: Tensor, *args: Any) -> Tensor:
        calls.append(rows)
        return exchange(rows, *args) * (2 if len(calls) == 2 else 1)

    least_loaded.all_to_all = broken
    return _run_case(CASES[case], "leastloaded", ParallelGroups.create(fold(**sizes), torch.device("cpu")))


@pytest.mark.parity
def test_wrong_gradients_of_lent_experts_are_noticed(fresh_pool):
    sizes = {"world_size": 2, "ep": 2}
    layout = fold(**sizes)
    ranks = fresh_pool.run(2, _run_with_broken_return, "80 %", sizes)
    with pytest.raises(AssertionError, match="w_gate: "):
        _assert_equal(ranks, layout, _reference(CASES["80 %"], layout))


def _travel(sizes: dict[str, Any], name: str) -> tuple[bool, bool, bool]:
    """Tokens that say who they are: each at an expert that it chose, back at its place, and nothing lent in vain."""
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    case = CASES[name]
    dispatcher = make_dispatcher("leastloaded", groups.moe, E, RULE)
    num_tokens = case.tokens[groups.rank]
    x = (groups.rank * 1000 + torch.arange(num_tokens)).double().unsqueeze(1).repeat(1, 3).requires_grad_()
    ids = case.ids(groups.rank)
    assignment = RoutingMap(ids, torch.full(ids.shape, 1 / case.top_k, dtype=torch.float64))
    rows, plan = dispatcher.dispatch(x, assignment)
    here = torch.arange(E).view(groups.moe.ep.size, -1)[groups.moe.ep.rank].double()
    if plan.migration is not None:
        # Weights that say whose they are.
        (own,), (borrowed,) = plan.migration.migrate([here.unsqueeze(1)])
        here = torch.cat((own, borrowed)).squeeze(1)
    at = here.long().repeat_interleave(torch.tensor(plan.tokens_per_expert))
    tags = zip(rows[:, 0].long().tolist(), at.tolist(), strict=True)
    chosen = all(expert in case.ids(tag // 1000)[tag % 1000] for tag, expert in tags)
    is_needed = all(plan.tokens_per_expert[E // groups.moe.ep.size :])
    home = dispatcher.combine(rows / groups.moe.etp.size, plan)
    home.backward(x.detach())
    came_home = torch.equal(home, x) and torch.equal(x.grad, x)
    return chosen, came_home, is_needed


def _travel_in(sizes: dict[str, Any], names: tuple[str, ...]) -> dict[str, tuple[bool, bool, bool]]:
    return {name: _travel(sizes, name) for name in names}


@pytest.mark.parity
@pytest.mark.parametrize("sizes", few_else_slow(LAYOUTS, [LAYOUTS[0], LAYOUTS[3]]))
def test_each_token_meets_its_experts_and_returns_to_its_owner(pool, sizes):
    """In the cases with one expert for a token, and with two."""
    expected = {"80 %": (True, True, True), "top 2": (True, True, True)}
    assert pool.run(sizes["world_size"], _travel_in, sizes, tuple(expected)) == [expected] * sizes["world_size"]


def _counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counting(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return function(*args, **options)

    return counting


def _count_exchanges(case: str) -> dict[str, int]:
    groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    calls: list[int] = []
    dist.all_to_all_single = _counted(dist.all_to_all_single, calls)
    found = {}
    for name in ("alltoall", "leastloaded"):
        calls.clear()
        _run_case(CASES[case], name, groups)
        found[name] = len(calls)
    return found


@pytest.mark.parity
def test_within_the_threshold_nothing_is_sent_that_the_all_to_all_would_not_send(pool):
    assert pool.run(2, _count_exchanges, "balanced") == [{"alltoall": 4, "leastloaded": 4}] * 2


@pytest.mark.parity
def test_a_loan_costs_one_exchange_forth_and_one_back(pool):
    assert pool.run(2, _count_exchanges, "80 %") == [{"alltoall": 4, "leastloaded": 6}] * 2


def _under_way_together(sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two micro-batches, the second one forth before the first one is back, as in a pipeline."""
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    dispatcher = make_dispatcher("leastloaded", groups.moe, E, RULE)
    experts = _experts(groups.layout, groups.rank)
    under_way = []
    for case in (CASES["80 %"], CASES["all to the last, top 2"]):
        x, grad = case.tokens_and_grad(groups.rank)
        assignment = case.assignment(groups.rank)
        under_way.append((x, assignment, dispatcher.dispatch(x, assignment), grad))
    results = []
    for x, assignment, (rows, plan), grad in under_way:
        y = dispatcher.combine(
            experts(ExpertInput(rows, plan.tokens_per_expert, migration=dispatcher.migration(plan))), plan
        )
        results.append((x, assignment, y, grad))
    for _, _, y, grad in results:
        y.backward(grad)
    gradients = {name: getattr(experts, name).grad.numpy() for name in WEIGHTS}
    return [
        {"y": y.detach().numpy(), "x": x.grad.numpy(), "probs": assignment.probs_TK.grad.numpy()} | gradients
        for x, assignment, y, _ in results
    ]


@pytest.mark.parity
def test_two_micro_batches_may_be_under_way(pool):
    sizes = {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}
    layout = fold(**sizes)
    ranks = pool.run(4, _under_way_together, sizes)
    first, second = (_reference(CASES[name], layout) for name in ("80 %", "all to the last, top 2"))
    for one, other in zip(first, second, strict=True):
        for name in WEIGHTS:
            one[name] = other[name] = one[name] + other[name]
    for i, reference in enumerate((first, second)):
        _assert_equal([rank[i] for rank in ranks], layout, reference)


def _evaluate(case: str) -> bool:
    groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    x, _ = CASES[case].tokens_and_grad(groups.rank)
    assignment = CASES[case].assignment(groups.rank)
    outputs = []
    with torch.no_grad():
        for name in ("leastloaded", "alltoall"):
            dispatcher = make_dispatcher(name, groups.moe, E, RULE)
            outputs.append(_apply(dispatcher, _experts(groups.layout, groups.rank), x, assignment)[0])
    return torch.allclose(*outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parity
def test_evaluation_needs_no_backward(pool):
    assert pool.run(2, _evaluate, "95 %") == [True, True]


def _bfloat16_gradient() -> float:
    """Rank 0 lends its expert to the three others: it has a gradient of 256 for it, and each of them of 1."""
    groups = ParallelGroups.create(fold(world_size=4, ep=4), torch.device("cpu"))
    shares_PE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]).numpy()
    weight = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (own,), (borrowed,) = least_loaded.MigratedExperts.from_assignment(shares_PE, groups.moe.ep).migrate([weight])
    (own.sum() * 256 + borrowed.sum()).backward()
    assert weight.grad is not None
    return weight.grad[0, 0].item()


def test_bfloat16_gradients_of_many_borrowers_are_rounded_once(pool):
    # One after another, 256 + 1 would be 256 each time: bfloat16 has 8 bits.
    assert pool.run(4, _bfloat16_gradient) == [260.0, 256.0, 256.0, 256.0]
