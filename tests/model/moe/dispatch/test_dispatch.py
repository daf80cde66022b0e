"""Every dispatcher, over every way to cut the experts, equals the textbook; each token returns to its owner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moefold.comm.groups import ParallelGroups
from moefold.comm.resumable import Resumable
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.errors import ConfigError
from moefold.model.moe.dispatch import Dispatcher, LocalDispatcher, RoutingMap, ShardedMicroBatch
from moefold.topology.layout import Layout, fold
from tests.model.moe.dispatch.building import make_dispatcher
from tests.model.moe.layers import moe_layer
from tests.model.moe.reference import Weights, make_weights, moe_reference
from tests.models import edit_model, model_of
from tests.verify.covering import few_else_slow

MODEL = model_of({"hidden_size": 6, "ffn.moe.num_experts": 8, "ffn.moe.top_k": 2, "ffn.moe.intermediate_size": 8})
LOSSES = MoEConfig(aux_loss=0.3, z_loss=0.2)
S, B = 8, 3
DISPATCHERS = ("alltoall", "allgather")


@dataclass(frozen=True)
class Case:
    """A layer, and the numbers that the router adds to the logits of some experts."""

    model: ModelConfig = MODEL
    moe: MoEConfig = LOSSES
    bias: tuple[tuple[int, float], ...] = ()


def _drop(factor: float, policy: str, scope: str, pads: bool = False) -> Case:
    moe = replace(LOSSES, capacity_factor=factor, drop_policy=policy, drop_scope=scope, pad_to_capacity=pads)
    return Case(moe=moe)


CASES = {
    "plain": Case(),
    "pre-softmax, no losses": Case(edit_model(MODEL, {"ffn.moe.router.softmax": "pre"}), MoEConfig(aux_loss=0.0)),
    "every expert": Case(edit_model(MODEL, {"ffn.moe.top_k": 8})),
    "one expert": Case(edit_model(MODEL, {"ffn.moe.top_k": 1}), bias=((5, 100.0),)),
    "two experts of one rank": Case(bias=((6, 100.0), (7, 90.0))),
    "first half empty": Case(bias=tuple((e, -100.0) for e in range(4))),
    "probs full": _drop(0.6, "probs", "full_sequence"),
    "position full": _drop(0.6, "position", "full_sequence"),
    "probs sub": _drop(0.6, "probs", "sub_sequence"),
    "position sub": _drop(0.6, "position", "sub_sequence"),
    "probs sub padded": _drop(0.6, "probs", "sub_sequence", pads=True),
    "position sub padded": _drop(0.6, "position", "sub_sequence", pads=True),
    "roomy padded": _drop(4.0, "probs", "sub_sequence", pads=True),
}
CASES |= {
    f"{name}, weighed in the expert": replace(CASES[name], moe=replace(CASES[name].moe, weight_in_expert=True))
    for name in ("plain", "one expert", "first half empty", "probs full", "position sub padded")
}

LAYOUTS = [
    {"world_size": 1},
    {"world_size": 2, "cp": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "etp": 2},
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 4, "tp": 2, "ep": 2, "etp": 2},
    {"world_size": 4, "cp": 2, "ep": 2, "etp": 2, "moe_order": "pp-edp-etp-ep"},
    {"world_size": 4, "cp": 2, "ep": 2, "moe_order": "pp-ep-edp-etp"},
    {"world_size": 4, "cp": 2, "etp": 4},
]
FEW_LAYOUTS = few_else_slow(LAYOUTS, [LAYOUTS[5], LAYOUTS[7]])
"""In `make test` each axis, ranks that share tokens, and an order that folds."""


def _positions(layout: Layout) -> list[list[int]]:
    """Positions of each rank of a micro-batch: shuffled, as a load-balanced context has them."""
    order = torch.randperm(S, generator=torch.Generator().manual_seed(9))
    return order.view(layout.cp * layout.tp, -1).tolist()


def _data(layout: Layout) -> tuple[Tensor, Tensor]:
    """One micro-batch for each dp rank and the gradient of its output, [dp, S, B, H]; feature 0 is 1."""
    generator = torch.Generator().manual_seed(4)
    x, grad = torch.randn(2, layout.dp, S, B, MODEL.hidden_size, dtype=torch.float64, generator=generator)
    x[..., 0] = 1.0
    return x, grad


def _slices(layout: Layout, rank: int) -> dict[str, tuple[slice, ...]]:
    """The part of each expert weight that a rank holds."""
    experts, width = MODEL.ffn.moe.num_experts // layout.ep, MODEL.ffn.moe.intermediate_size // layout.etp
    ep, etp = layout.moe.coordinate(rank, "ep"), layout.moe.coordinate(rank, "etp")
    mine, part = slice(ep * experts, (ep + 1) * experts), slice(etp * width, (etp + 1) * width)
    return {
        "experts.w_gate": (mine, slice(None), part),
        "experts.w_up": (mine, slice(None), part),
        "experts.w_down": (mine, part),
    }


class _DoubleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def _break(dispatcher: Dispatcher[Any], phase: str) -> None:
    """Double the gradient that leaves one phase."""
    whole = getattr(dispatcher, phase)

    def broken(rows: Tensor, plan: Any, *compute: Any) -> Resumable[Any]:
        found = yield from whole(rows, plan, *compute)
        if phase == "combine_async":
            return _DoubleGradient.apply(found)
        return _DoubleGradient.apply(found[0]), found[1]

    setattr(dispatcher, phase, broken)


def _run_case(case: Case, name: str, groups: ParallelGroups, broken_phase: str = "") -> dict[str, Any]:
    """Train the layer on this rank's tokens once; returns everything that can be compared."""
    layout, sequence = groups.layout, groups.attn.sequence
    weights = make_weights(case.model, bias=dict(case.bias))
    layer = moe_layer(case.model, case.moe, loss_scale=1.0 / layout.dp).double()
    layer.router.weight = nn.Parameter(weights["router.weight"])
    for key, index in _slices(layout, groups.rank).items():
        setattr(layer.experts, key.split(".")[1], nn.Parameter(weights[key][index].clone()))
    positions = torch.tensor(_positions(layout)[sequence.rank])
    layer.micro_batch_group = ShardedMicroBatch(sequence, groups.attn.stage, groups.attn.tp, positions)
    layer.dispatcher = make_dispatcher(name, groups.moe, case.model.ffn.moe.num_experts)
    if broken_phase:
        _break(layer.dispatcher, broken_phase)
    x, grad = (whole[groups.attn.dp.rank, positions] for whole in _data(layout))
    x.requires_grad_()
    y = layer(x).y
    y.backward(grad)
    stats = layer.stats
    result = {name: p.grad for name, p in layer.named_parameters()} | {"y": y.detach(), "x": x.grad}
    result |= {"copies": stats.routed_tokens, "dropped": stats.dropped, "aux": stats.aux, "z": stats.z}
    return {key: value.numpy() for key, value in result.items()}


def _run_cases(sizes: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    return {(case, name): _run_case(CASES[case], name, groups) for case in CASES for name in DISPATCHERS}


def _run_broken(sizes: dict[str, Any], name: str, phase: str) -> dict[str, Any]:
    return _run_case(CASES["plain"], name, ParallelGroups.create(fold(**sizes), torch.device("cpu")), phase)


def _reference(case: Case, layout: Layout) -> dict[str, Tensor]:
    weights: Weights = make_weights(case.model, bias=dict(case.bias))
    x, grad = _data(layout)
    for tensor in (x, *weights.values()):
        tensor.requires_grad_()
    parts = [moe_reference(micro, weights, case.model, case.moe, _positions(layout)) for micro in x]
    y = torch.stack([part.y for part in parts])
    aux = case.moe.aux_loss * sum(part.aux for part in parts) / layout.dp
    z = case.moe.z_loss * sum(part.z for part in parts) / layout.dp
    ((y * grad).sum() + aux + z).backward()
    gradients = {key: weight.grad for key, weight in weights.items()}
    dropped = torch.tensor(sum(len(part.dropped) for part in parts))
    copies = torch.tensor(layout.dp * S * B * case.model.ffn.moe.top_k)
    losses = {"aux": torch.as_tensor(aux).detach(), "z": torch.as_tensor(z).detach()}
    return gradients | losses | {"y": y.detach(), "x": x.grad, "copies": copies, "dropped": dropped}


def _assembled(ranks: Sequence[dict[str, Any]], layout: Layout, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the results of all ranks in the shape of the reference."""
    whole = {key: torch.zeros_like(value) for key, value in reference.items()}
    for rank, parts in enumerate(ranks):
        slices = _slices(layout, rank)
        dp = layout.attention.coordinate(rank, "dp")
        sequence = sorted(layout.attention.group(rank, "cp", "tp")).index(rank)
        for key, value in parts.items():
            if key in ("x", "y"):
                whole[key][dp, _positions(layout)[sequence]] = torch.from_numpy(value)
            else:
                whole[key][slices.get(key, ())] += torch.from_numpy(np.asarray(value))
    return whole


def _assert_equal(ranks: Sequence[dict[str, Any]], layout: Layout, reference: dict[str, Tensor], name: str) -> None:
    for key, value in _assembled(ranks, layout, reference).items():
        message = f"{name}: {key}"
        torch.testing.assert_close(
            value, reference[key], rtol=1e-12, atol=1e-12, msg=lambda text, message=message: f"{message}: {text}"
        )


@pytest.mark.parity
@pytest.mark.parametrize("sizes", FEW_LAYOUTS)
def test_every_dispatcher_equals_the_reference(pool, sizes):
    layout = fold(**sizes)
    ranks = pool.run(layout.world_size, _run_cases, sizes)
    for case in CASES:
        reference = _reference(CASES[case], layout)
        for name in DISPATCHERS:
            _assert_equal([rank[case, name] for rank in ranks], layout, reference, f"{case}, {name}")


@pytest.mark.parity
@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize(
    ("phase", "noticed"),
    [("dispatch_async", "x"), ("combine_async", "(router.weight|experts.w_gate)")],
)
def test_a_wrong_factor_is_noticed(pool, name, phase, noticed):
    sizes = {"world_size": 2, "tp": 2, "ep": 2}
    layout = fold(**sizes)
    ranks = pool.run(2, _run_broken, sizes, name, phase)
    with pytest.raises(AssertionError, match=rf"broken: {noticed}: "):
        _assert_equal(ranks, layout, _reference(CASES["plain"], layout), "broken")


def test_the_cases_drop_and_choose_as_their_names_say():
    layout = fold(world_size=4, tp=2, cp=2, ep=4)
    dropped = {name: int(_reference(case, layout)["dropped"]) for name, case in CASES.items()}
    assert {name for name, count in dropped.items() if count} == {
        name for name, case in CASES.items() if case.moe.capacity_factor == 0.6
    }
    gate = _reference(CASES["one expert"], layout)["experts.w_gate"]
    assert [bool(g.abs().max() > 0) for g in gate] == [e == 5 for e in range(8)]


def _travel_all(sizes: dict[str, Any]) -> dict[str, tuple[bool, bool]]:
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    kinds = ("spread", "crowd", "padded")
    return {f"{name}, {kind}": _travel(groups, name, kind) for name in DISPATCHERS for kind in kinds}


def _travel(groups: ParallelGroups, name: str, kind: str) -> tuple[bool, bool]:
    """Send tokens that say who they are; is each at the right expert, and back at its place, to the last bit?"""
    num_tokens, top_k, experts = 5, 2, MODEL.ffn.moe.num_experts
    dispatcher = make_dispatcher(name, groups.moe, experts)
    token = torch.arange(num_tokens)
    x = (groups.rank * 1000 + token).double().unsqueeze(1).repeat(1, 3).requires_grad_()
    ids = _travel_ids(torch.full_like(token, groups.rank), token, kind)
    slots = num_tokens if kind == "padded" else None
    kept = torch.ones_like(ids, dtype=torch.bool) if kind == "padded" else None
    assignment = RoutingMap(ids, torch.full((num_tokens, top_k), 0.5, dtype=torch.float64), kept, slots)
    rows, plan = dispatcher.dispatch(x, assignment)

    first = groups.moe.ep.rank * (experts // groups.moe.ep.size)
    mine = torch.arange(first, first + len(plan.tokens_per_expert))
    at = mine.repeat_interleave(torch.tensor(plan.tokens_per_expert))
    owner, index = rows[:, 0].long() // 1000, rows[:, 0].long() % 1000
    chosen = (_travel_ids(owner, index, kind) == at.unsqueeze(1)).any(1)
    if kind == "padded":
        chosen |= rows[:, 0] == 0
    home = dispatcher.combine(rows / groups.moe.etp.size, plan)
    home.backward(x.detach())
    return bool(chosen.all()), torch.equal(home, x) and torch.equal(x.grad, x)


def _travel_ids(owner: Tensor, index: Tensor, kind: str) -> Tensor:
    """Choose two experts for each token, only from its owner and index."""
    if kind == "crowd":
        return torch.tensor([6, 1]).expand(len(owner), 2)
    first = (3 * owner + index) % MODEL.ffn.moe.num_experts
    return torch.stack([first, (first + 1 + index % 3) % MODEL.ffn.moe.num_experts], 1)


@pytest.mark.parity
@pytest.mark.parametrize("sizes", FEW_LAYOUTS)
def test_each_token_returns_to_its_owner(pool, sizes):
    for rank, journeys in enumerate(pool.run(sizes["world_size"], _travel_all, sizes)):
        for name, (served_right, came_home) in journeys.items():
            assert served_right, (rank, name)
            assert came_home, (rank, name)


def _local_over_two_ranks() -> tuple[str, bool]:
    alone = ParallelGroups.create(fold(world_size=2), torch.device("cpu"))
    is_local = all(isinstance(make_dispatcher(name, alone.moe, 8), LocalDispatcher) for name in ("local", *DISPATCHERS))
    spread = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    try:
        make_dispatcher("local", spread.moe, 8)
    except ConfigError as error:
        return str(error), is_local
    return "", is_local


@pytest.mark.parity
def test_local_needs_all_experts_on_each_rank(pool):
    for message, is_local in pool.run(2, _local_over_two_ranks):
        assert is_local
        assert message.startswith("parallel.dispatcher='local' needs all experts on each rank, but parallel.ep=2")


def _under_way_together(sizes: dict[str, Any], name: str) -> bool:
    """Two micro-batches with interleaved phases give the same as one after the other."""
    groups = ParallelGroups.create(fold(**sizes), torch.device("cpu"))
    dispatcher = make_dispatcher(name, groups.moe, MODEL.ffn.moe.num_experts)
    generator = torch.Generator().manual_seed(groups.rank)
    tokens = [torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (3, 7)]
    probs = [torch.rand(len(x), 2, dtype=torch.float64, generator=generator) for x in tokens]
    ids = [torch.randint(0, 4, (len(x), 1), generator=generator).repeat(1, 2) for x in tokens]
    assignments = [RoutingMap(i + torch.tensor([0, 4]), p) for i, p in zip(ids, probs, strict=True)]
    sent = [dispatcher.dispatch_preprocess(x, a) for x, a in zip(tokens, assignments, strict=True)]
    arrived = [(dispatcher.dispatch_communicate(rows, plan), plan) for rows, plan in reversed(sent)]
    sorted_rows = [(dispatcher.dispatch_postprocess(rows, plan), plan) for rows, plan in arrived]
    back = [(dispatcher.combine_preprocess(rows / groups.moe.etp.size, plan), plan) for rows, plan in sorted_rows]
    returned = [(dispatcher.combine_communicate(rows, plan), plan) for rows, plan in reversed(back)]
    home = [dispatcher.combine_postprocess(rows, plan) for rows, plan in returned]
    expected = [x * p.sum(1, keepdim=True) for x, p in zip(tokens, probs, strict=True)]
    return all(torch.allclose(h, e, rtol=1e-13, atol=0) for h, e in zip(home, expected, strict=True))


@pytest.mark.parity
@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dispatcher_keeps_no_state_between_phases(pool, name):
    assert pool.run(4, _under_way_together, {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}, name) == [True] * 4
