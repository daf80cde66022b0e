"""The outer optimizer, driven by hand: no processes, no model."""

import math

import pytest
import torch
from torch import nn

from moefold.comm.wire_codes import make_wire_code
from moefold.config.sections.sites import SitesConfig
from moefold.optim.outer import OuterOptimizer
from moefold.optim.states import StateStore
from tests.optim.outer_site import SHAPES, Site, assert_residual, assert_same_shard, gradients


def exchange(sites: list[Site]) -> None:
    own = [site.outer.difference() for site in sites]
    mean = torch.zeros_like(own[0])
    for values in own:
        mean.add_(values, alpha=1 / len(sites))
    for site, values in zip(sites, own, strict=True):
        site.outer.step(values, mean)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_mean_of_sgd_steps_is_a_step_on_the_joined_batch(count):
    """With SGD inside and a round after each step, the sites are one job whose gradient is the mean of theirs."""
    sites = [Site(SitesConfig(count=count)) for _ in range(count)]
    joined = Site(SitesConfig(count=count))
    for step in range(20):
        for number, site in enumerate(sites):
            site.move(gradients(number, step))
        exchange(sites)
        each = [gradients(number, step) for number in range(count)]
        joined.move({name: sum(g[name] for g in each) / count for name in SHAPES})
    for site in sites:
        assert torch.equal(site.flat(), sites[0].flat())
        torch.testing.assert_close(site.flat(), joined.flat(), rtol=1e-12, atol=1e-12)


def test_mean_of_adam_steps_is_not_a_step_of_the_mean_gradient():
    """The control of the test above: an inner optimizer that is not linear in the gradient differs."""
    sites = [Site(SitesConfig(count=2)) for _ in range(2)]
    joined = Site(SitesConfig(count=2))
    for number, site in enumerate(sites):
        site.move({name: g.sign() for name, g in gradients(number, 0).items()})
    exchange(sites)
    joined.move({name: (gradients(0, 0)[name] + gradients(1, 0)[name]).sign() for name in SHAPES})
    assert (sites[0].flat() - joined.flat()).abs().max() > 0.05


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_equals_torch_sgd(nesterov):
    settings = SitesConfig(count=2, lr=0.7, momentum=0.9, nesterov=nesterov)
    sites = [Site(settings) for _ in range(2)]
    reference = [nn.Parameter(p.detach().clone()) for p in sites[0].parameters.values()]
    sgd = torch.optim.SGD(reference, lr=0.7, momentum=0.9, nesterov=nesterov)
    for round_ in range(5):
        before = [p.detach().clone() for p in sites[0].parameters.values()]
        for number, site in enumerate(sites):
            site.move(gradients(number, round_))
        moved = [[p.detach().clone() for p in site.parameters.values()] for site in sites]
        exchange(sites)
        for parameter, phi, *theta in zip(reference, before, *moved, strict=True):
            parameter.grad = torch.zeros_like(phi)
            for values in theta:
                parameter.grad.add_(phi - values, alpha=0.5)
        sgd.step()
        for ours, theirs in zip(sites[0].parameters.values(), reference, strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(sites[0].flat(), sites[1].flat())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_of_one_site_with_the_plain_mean_changes_no_bit(dtype):
    site = Site(SitesConfig(count=2), dtype)
    site.move({name: 1e3 * g.to(dtype) for name, g in gradients(0, 0).items()})
    before = site.flat().clone()
    own = site.outer.difference()
    site.outer.step(own, own)
    assert torch.equal(site.flat(), before)
    assert torch.equal(torch.cat([w.flatten() for w in site.outer.weights.values()]), before)


def test_sites_with_the_same_samples_stay_one_site():
    sites = [Site(SitesConfig(count=4)) for _ in range(4)]
    alone = Site(SitesConfig(count=4))
    for step in range(12):
        for site in (*sites, alone):
            site.move(gradients(0, step))
        if step % 3 == 2:
            exchange(sites)
    torch.testing.assert_close(sites[0].flat(), alone.flat(), rtol=4 * 2**-52, atol=4 * 2**-52)


def test_rounds_that_are_not_applied_are_one_longer_round():
    """`difference` changes nothing, so that the next round sends the longer drift."""
    sites, rare = ([Site(SitesConfig(count=2)) for _ in range(2)] for _ in range(2))
    for step in range(4):
        for group in (sites, rare):
            for number, site in enumerate(group):
                site.move(gradients(number, step))
        for site in sites:
            site.outer.difference()
    exchange(sites)
    exchange(rare)
    assert torch.equal(sites[0].flat(), rare[0].flat())


def test_floating_point_buffers_are_averaged_and_counts_stay():
    sites = [Site(SitesConfig(count=2)) for _ in range(2)]
    sites[1].buffers["bias"].copy_(torch.tensor([1.5, 3.0]))
    sites[1].buffers["counts"].copy_(torch.tensor([7, 8]))
    exchange(sites)
    assert sites[0].buffers["bias"].tolist() == sites[1].buffers["bias"].tolist() == [1.0, 1.0]
    assert sites[0].buffers["counts"].tolist() == [3, 4]
    assert sites[1].buffers["counts"].tolist() == [7, 8]


def test_norms_count_each_logical_element_once():
    site = Site(SitesConfig(count=2))
    other = OuterOptimizer(site.parameters, {}, SitesConfig(count=2), StateStore(), replicas={"a": 2, "b": 0})
    other.start()
    site.move(gradients(0, 0), lr=1.0)
    own = other.difference()
    norms = other.step(own, 0.5 * own)
    found = gradients(0, 0)
    expected = float(found["a"].square().sum() / 2 + found["c"].square())
    assert math.isclose(norms.difference, expected, rel_tol=1e-12)
    assert math.isclose(norms.mean, expected / 4, rel_tol=1e-12)
    assert math.isclose(norms.product, expected / 2, rel_tol=1e-12)


def test_entries_restore_the_state():
    settings = SitesConfig(count=2, lr=0.7, momentum=0.9)
    sites = [Site(settings) for _ in range(2)]
    for number, site in enumerate(sites):
        site.move(gradients(number, 0))
    exchange(sites)
    resumed = Site(settings, seed=5)
    for name, parameter in resumed.parameters.items():
        parameter.data.copy_(sites[0].parameters[name])
    sites[0].outer.num_rounds = 1

    def load(entries):
        for name, tensor in entries.items():
            tensor.copy_(sites[0].outer.checkpoint_entries()[name])

    resumed.outer.restore(sites[0].outer.state(), load, lambda step: (0,))
    assert resumed.outer.num_rounds == 1
    for site in (sites[0], resumed):
        site.move(gradients(0, 1))
    assert torch.equal(resumed.outer.difference(), sites[0].outer.difference())
    for site in (sites[0], resumed):
        site.outer.step(site.outer.difference(), torch.linspace(-1, 1, 20, dtype=torch.float64))
    assert torch.equal(resumed.flat(), sites[0].flat())


@pytest.mark.parametrize("broken", ["sign", "sum", "momentum not saved", "weights stay"])
def test_a_wrong_outer_step_is_noticed(broken):
    """The tests above would fail for each of these."""
    settings = SitesConfig(count=2, lr=0.7, momentum=0.9)
    right, wrong = ([Site(settings) for _ in range(2)] for _ in range(2))
    for round_ in range(2):
        for group in (right, wrong):
            for number, site in enumerate(group):
                site.move(gradients(number, round_))
        exchange(right)
        own = [site.outer.difference() for site in wrong]
        mean = (own[0] + own[1]) / {"sign": -2, "sum": 1}.get(broken, 2)
        for site, values in zip(wrong, own, strict=True):
            before = site.flat().clone()
            if broken == "momentum not saved":
                for tensor in site.outer.entries(("momentum",)).values():
                    tensor.zero_()
            site.outer.step(values, mean)
            if broken == "weights stay":
                for parameter, part in zip(site.parameters.values(), before.split([12, 5, 0, 1]), strict=True):
                    parameter.data.copy_(part.view_as(parameter))
    assert (right[0].flat() - wrong[0].flat()).abs().max() > 1e-3


def test_weights_that_are_not_finite_leave_nothing_behind():
    """A site whose weights are damaged sends them, is not read, and takes the outer weights of the others."""
    settings = SitesConfig(count=2, precision="int8", residual=0.5, overlap=1, keep_local=0.5)
    site = Site(settings)
    code = make_wire_code("int8", torch.float64)
    with torch.no_grad():
        site.parameters["a"][0, 0] = math.nan
    own = site.outer.difference()
    num_coded = site.outer.num_coded((0,))
    decoded = own.clone()
    decoded[:num_coded] = code.decode(code.encode(own[:num_coded]), own[:num_coded])
    site.outer.keep_residual((0,), own, decoded)
    site.outer.step(own, torch.zeros_like(own), keep_local=0.5)
    assert site.flat().isfinite().all()
    assert all(e.isfinite().all() for e in site.outer.residual.values())
    assert site.parameters["a"][0, 0] == site.outer.weights["a"][0, 0]


def test_fragments_are_exchanged_separately():
    parameters = {f"layers.{i}.w": nn.Parameter(torch.full((2,), float(i))) for i in range(4)}
    parameters["embedding.weight"] = nn.Parameter(torch.zeros(3))
    buffers = {"layers.2.ffn.router.expert_bias": torch.ones(2)}
    settings = SitesConfig(count=2, fragment_layers=2, overlap=1, keep_local=0.5)
    outer = OuterOptimizer(parameters, buffers, settings, StateStore(), num_fragments=2)
    outer.start()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(1.0)
    own = outer.difference((0,))
    assert (len(own), outer.num_coded((0,))) == (6, 4)
    assert own.tolist() == [-1.0] * 4 + [1.0, 1.0]
    outer.step(own, 2 * own, (0,), keep_local=0.5)
    # phi moves by 2; half of the site's own movement stays.
    assert [float(outer.weights[f"layers.{i}.w"][0]) for i in range(4)] == [2.0, 1.0, 4.0, 3.0]
    assert [float(parameters[f"layers.{i}.w"].detach()[0]) for i in range(4)] == [1.5, 2.0, 3.5, 4.0]
    assert buffers["layers.2.ffn.router.expert_bias"].tolist() == [1.5, 1.5]
    assert outer.difference((1,)).tolist() == [-1.0] * 7


CODES = ("bfloat16", "int8", "fp4")


@pytest.mark.parametrize("precision", CODES[1:])
def test_ranks_with_the_same_shard_decode_the_same_values(precision):
    assert_same_shard({"precision": precision})


@pytest.mark.parametrize("precision", CODES)
@pytest.mark.parametrize("beta", [1.0, 0.9])
def test_residual_keeps_the_loss_of_codes(precision, beta):
    assert_residual(SitesConfig(count=2, residual=beta, precision=precision))
