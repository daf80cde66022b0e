"""The outer optimizer of random pairs, driven by hand: no processes, no model."""

import math

import pytest
import torch

from moefold.config.sections.sites import SitesConfig
from moefold.launch.site_round import pair_members
from moefold_experiments.noloco.module import add_pull
from tests.optim.outer_site import Site, gradients

NOLOCO = SitesConfig(count=4, method="noloco", lr=0.7, momentum=0.5, nesterov=False)


def exchange_in_pairs(sites: list[Site], pairs: list[tuple[int, ...]], pull_sign: float = 1.0) -> None:
    for pair in pairs:
        own = [sites[number].outer.difference() for number in pair]
        outer = [sites[number].outer.outer_vector((0,)) for number in pair]
        mean = sum((torch.cat(parts) / 2 for parts in zip(own, outer, strict=True)), torch.zeros(()))
        for number, values, phi in zip(pair, own, outer, strict=True):
            pulled = add_pull(mean, phi)
            if pull_sign < 0:
                pulled = 2 * mean[: len(pulled)] - pulled
            sites[number].outer.step(values, pulled)


@pytest.mark.parametrize("pull_sign", [1.0, -1.0])
def test_pairs_take_the_step_of_noloco(pull_sign):
    """delta = a delta + (b/n) sum(theta - phi) - g (phi - mean(phi)); phi = phi + delta, with b = g as in its code.

    Negative control: with the other sign of the pull, the outer weights differ.
    """
    sites = [Site(NOLOCO) for _ in range(4)]
    phi = [site.flat().clone() for site in sites]
    delta = [torch.zeros_like(values) for values in phi]
    for round_ in range(6):
        pairs = pair_members(0, round_, range(4))
        for number, site in enumerate(sites):
            site.move(gradients(number, round_))
        moved = [site.flat().clone() for site in sites]
        for i, j in pairs:
            pushed = (moved[i] - phi[i] + moved[j] - phi[j]) / 2
            middle = (phi[i] + phi[j]) / 2
            for number in (i, j):
                delta[number] = 0.5 * delta[number] + 0.7 * pushed - 0.7 * (phi[number] - middle)
            for number in (i, j):
                phi[number] = phi[number] + delta[number]
        exchange_in_pairs(sites, pairs, pull_sign)
    errors = [float((site.flat() - values).abs().max()) for site, values in zip(sites, phi, strict=True)]
    assert all(error < 1e-12 for error in errors) if pull_sign > 0 else min(errors) > 1e-3
    assert (sites[0].flat() - sites[1].flat()).abs().max() > 1e-3


def test_last_round_of_pairs_is_the_mean_of_all_sites():
    sites = [Site(NOLOCO) for _ in range(3)]
    for number, site in enumerate(sites):
        site.move(gradients(number, 0))
        site.buffers["bias"].fill_(number)
    exchange_in_pairs(sites, [(0, 2)])
    for number, site in enumerate(sites):
        site.move(gradients(number, 1))
        site.buffers["bias"].fill_(number)
    own = [site.outer.difference() for site in sites]
    local = [site.outer.local_vector((0,)) for site in sites]
    expected = sum(site.flat() for site in sites) / 3
    mean = local[0] / 3 + local[1] / 3 + local[2] / 3
    norms = [site.outer.merge(values, mean, (0,)) for site, values in zip(sites, own, strict=True)]
    for site, found, values in zip(sites, norms, own, strict=True):
        assert torch.equal(site.flat(), sites[0].flat())
        torch.testing.assert_close(site.flat(), expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(torch.cat([w.flatten() for w in site.outer.weights.values()]), site.flat())
        torch.testing.assert_close(site.buffers["bias"], torch.ones(2))
        assert math.isclose(found.difference, float(values[:-2].square().sum()), rel_tol=1e-12)
