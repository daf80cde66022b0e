"""Experts owned by sites, driven by hand: optimizers on views of rows, and the outer step; no processes, no model."""

import math

import pytest
import torch
from torch import Tensor, nn

from moefold.comm.wire_codes import make_wire_code
from moefold.config.base.part import make_part
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig
from moefold.optim.outer_round import PendingRound
from moefold.optim.states import StateStore, named_moments
from moefold.parallel.gradients import clip_gradients, local_norm_sq
from moefold_experiments.spes.module import OuterOfOwners
from moefold_experiments.spes.owned_experts import OwnedExperts, select_owned
from tests.optim.alone import build_alone
from tests.verify.recipes import tiny

MODEL = tiny(model={"ffn.moe.bias": True}).model
"""Has the names of the weights, which say which of them decay; their sizes are smaller here."""
W_UP = "layers.0.ffn.experts.w_up"
B_UP = "layers.0.ffn.experts.b_up"
SHARED = "layers.0.attention.wq"
SHAPES = {W_UP: (6, 3, 2), SHARED: (4, 3), B_UP: (6, 2)}
EXPERTS = (W_UP, B_UP)


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw)) for name, shape in SHAPES.items()}


def set_gradients(weights: dict[str, nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in weights.values():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=draw)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_own_experts_get_the_updates_of_adamw_and_the_others_none(number, moment_dtype):
    """The fused kernel rounds the end of a tensor otherwise than its start, so that a few last bits may differ."""
    cfg = TrainConfig(optimizer=make_part("optimizer", "adamw", weight_decay=0.3, moment_dtype=moment_dtype, beta2=0.9))
    whole, ours = parameters(torch.float32), parameters(torch.float32)
    before = {name: p.detach().clone() for name, p in ours.items()}
    owned = OwnedExperts(ours, EXPERTS, 3, number)
    expected, optimizer = build_alone(whole, cfg, model=MODEL), build_alone(owned.parameters, cfg, model=MODEL)
    for step in range(3):
        set_gradients(whole, step)
        set_gradients(ours, step)
        owned.take_gradients()
        expected.step()
        optimizer.step()
        optimizer.zero_grad()
        owned.drop_gradients()
        assert all(p.grad is None for p in (*ours.values(), *owned.parameters.values()))
    assert torch.equal(ours[SHARED], whole[SHARED])
    for name in EXPERTS:
        for expert in range(6):
            if expert % 3 == number:
                torch.testing.assert_close(ours[name][expert], whole[name][expert], rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(ours[name][expert], before[name][expert])
    for name, moment in named_moments(optimizer, owned.parameters).items():
        theirs = named_moments(expected, whole)[name]
        theirs = theirs if name.startswith(SHARED) else theirs[number::3]
        assert moment.shape == theirs.shape
        torch.testing.assert_close(moment, theirs, rtol=1e-6, atol=1e-6)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_norm_and_clipping_read_only_the_gradients_of_own_experts():
    ours = parameters()
    set_gradients(ours, 0)
    gradients = {name: p.grad.clone() for name, p in ours.items()}
    owned = OwnedExperts(ours, EXPERTS, 2, 1)
    owned.take_gradients()
    norm = local_norm_sq(owned.parameters).sqrt()
    counted = [gradients[SHARED], *(gradients[name][1::2] for name in EXPERTS)]
    assert math.isclose(norm, math.sqrt(sum(g.square().sum() for g in counted)), rel_tol=1e-12)
    clip_gradients(owned.parameters, norm, 0.1)
    torch.testing.assert_close(owned.parameters[W_UP].grad, gradients[W_UP][1::2] * 0.1 / norm)


class Site:
    def __init__(self, number: int, settings: dict[str, object]) -> None:
        self.settings = SitesConfig(count=3, number=number, method="spes", **settings)
        self.parameters = parameters()
        self.outer = OuterOfOwners(
            self.parameters, {"bias": torch.ones(2)}, self.settings, StateStore(), experts=EXPERTS
        )
        self.outer.start()
        self.code = make_wire_code(self.settings.precision, torch.float64)

    def train(self, seed: int) -> None:
        """Move the shared weights and the site's own experts."""
        draw = torch.Generator().manual_seed(seed + 10 * self.settings.number)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                own = select_owned(parameter.data, 3, self.settings.number) if name in EXPERTS else parameter.data
                own.add_(torch.randn(own.shape, dtype=own.dtype, generator=draw), alpha=0.1)


def exchange(sites: list[Site], members: list[int], *, wrong: str = "") -> None:
    """A round of some sites, as `SiteLinks` does it."""
    own = [sites[number].outer.difference() for number in members]
    first = sites[0].outer
    coded, gathered = first.num_coded((0,)), first.num_gathered((0,))
    decoded = []
    for vector in own:
        values = vector.clone()
        values[:coded] = sites[0].code.decode(sites[0].code.encode(vector[:coded]), vector[:coded])
        decoded.append(values)
    mean = sum(decoded) / len(members)
    of_members = torch.stack([values[coded - gathered : coded] for values in decoded])
    order = members[::-1] if wrong == "owner" else members
    for number, vector, values in zip(members, own, decoded, strict=True):
        outer = sites[number].outer
        if outer.residual:
            outer.keep_residual((0,), vector, values)
        g = outer.assemble((0,), mean, of_members, order)
        outer.step(vector, g, keep_local=sites[number].settings.keep_local)


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


@pytest.mark.parametrize("wrong", ["", "owner"])
def test_each_expert_is_copied_from_its_owner(wrong):
    sites = [Site(number, {}) for number in range(3)]
    for site in sites:
        site.train(1)
    expected = {SHARED: sum(site.parameters[SHARED].detach() for site in sites) / 3}
    for name in EXPERTS:
        expected[name] = torch.stack([sites[e % 3].parameters[name][e].detach() for e in range(6)])
    exchange(sites, [0, 1, 2], wrong=wrong)
    error = max(largest(site.parameters, expected) for site in sites)
    assert (error > 1e-3) if wrong else (error < 1e-15)
    assert largest(sites[0].outer.weights, sites[1].outer.weights) == 0
    assert largest(sites[0].outer.weights, sites[0].parameters) == 0


def test_experts_of_an_absent_site_stay():
    sites = [Site(number, {}) for number in range(3)]
    before = parameters()
    for site in sites:
        site.train(1)
    exchange(sites, [0, 2])
    for name in EXPERTS:
        assert torch.equal(sites[0].outer.weights[name][1::3], before[name][1::3])
        assert not torch.equal(sites[0].outer.weights[name][2::3], before[name][2::3])
    assert largest(sites[0].parameters, sites[2].parameters) == 0


def test_a_share_of_own_experts_stays_and_none_of_the_others():
    sites = [Site(number, {"overlap": 1, "keep_local": 0.5, "lr": 0.5}) for number in range(3)]
    for site in sites:
        site.train(1)
    trained = {name: p.detach().clone() for name, p in sites[1].parameters.items()}
    exchange(sites, [0, 1, 2])
    weights = sites[1].outer.weights
    for name in EXPERTS:
        mixed = 0.5 * trained[name] + 0.5 * weights[name]
        torch.testing.assert_close(sites[1].parameters[name][1::3], mixed[1::3], rtol=1e-14, atol=1e-14)
        for other in (0, 2):
            assert torch.equal(sites[1].parameters[name][other::3], weights[name][other::3])


def test_the_residual_is_of_own_experts_and_keeps_the_loss_of_the_code():
    sites = [Site(number, {"precision": "int8", "residual": 1.0}) for number in range(3)]
    moved = torch.zeros(2, 3, 2, dtype=torch.float64)
    for round_ in range(4):
        for site in sites:
            site.train(round_)
        own = sites[1].parameters[W_UP].detach()[1::3]
        moved += own - sites[1].outer.weights[W_UP][1::3]
        exchange(sites, [0, 1, 2])
    residual = sites[1].outer.residual[W_UP]
    assert residual.shape == (2, 3, 2)
    sent = sites[1].outer.weights[W_UP][1::3] - parameters()[W_UP].detach()[1::3]
    assert float(residual.abs().max()) > 0
    torch.testing.assert_close(sent - residual, moved, rtol=1e-12, atol=1e-12)
    assert largest(sites[0].outer.weights, sites[2].outer.weights) == 0


def test_a_pending_round_is_restored():
    """The checkpoint has g of all experts: the step after a resume has the same bits."""
    sites = [Site(number, {"momentum": 0.5}) for number in range(3)]
    resumed = Site(1, {"momentum": 0.5})
    for site in sites:
        site.train(1)
    resumed.train(1)
    own = [site.outer.difference() for site in sites]
    coded, gathered = sites[0].outer.num_coded((0,)), sites[0].outer.num_gathered((0,))
    of_members = torch.stack([values[coded - gathered : coded] for values in own])
    mean = sites[1].outer.assemble((0,), sum(own) / 3, of_members, [0, 1, 2])
    sites[1].outer.pending = PendingRound(1, 2, (0,), own[1], mean)
    saved = sites[1].outer.checkpoint_entries()
    entries = {name: entry for name, entry in saved.items() if name.startswith("outer.pending.")}
    assert entries[f"outer.pending.{W_UP}"].shape == (6, 3, 2)
    again = resumed.outer.pending_mean(entries)
    assert torch.equal(again, mean)
    norms = sites[1].outer.step(own[1], mean)
    assert resumed.outer.step(own[1], again) == norms
    assert largest(sites[1].parameters, resumed.parameters) == 0
    assert sites[1].outer.state()["experts.owner"] == 1
