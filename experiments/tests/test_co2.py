"""The outer optimizer of rounds that are exchanged during the next one, driven by hand: no processes, no model."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm.site_links import ExchangeResult
from moefold.config.sections.sites import SitesConfig
from moefold.optim.outer_round import PendingRound
from moefold_experiments.co2.module import bits_to_float, float_to_bits
from moefold_experiments.co2.part import CO2
from tests.optim.outer_site import Site, gradients


def settings(*, penalty: bool = True, clip: float = 0.05, **keys: Any) -> SitesConfig:
    method = CO2(penalty=penalty, clip=clip)
    return SitesConfig(count=2, every=3, overlap=3, lr=0.9, momentum=0.5, method=method, **keys)


class WholeRounds:
    """Sites that exchange a round during the next one; the exchange of the round under way is `means`."""

    def __init__(self, settings: SitesConfig) -> None:
        self.sites = [Site(settings) for _ in range(2)]
        self.own: list[Tensor] = []
        self.mean: Tensor | None = None
        self.last_update = 0.0

    def end_round(self, *, fails: bool = False, broken: str = "") -> None:
        """Take the outer step of the round before, unless its exchange has failed, and send this round."""
        update = 0.0
        for number, site in enumerate(self.sites):
            if self.mean is not None and fails:
                site.outer.cancel((0,), self.own[number])
            elif self.mean is not None:
                square = site.outer.mean_square(PendingRound(3, 6, (0,), self.own[number], self.mean))
                norm = math.sqrt(square) or 1.0
                gap = {"no gap": 0.0, "gap of two rounds": 2 * self.last_update}.get(broken, self.last_update)
                mean = -self.mean if broken == "sign" else self.mean
                if broken == "momentum not saved":
                    for tensor in site.outer.entries(("momentum",)).values():
                        tensor.zero_()
                round_ = PendingRound(3, 6, (0,), self.own[number], mean)
                site.outer.step_both(round_, moves_both=broken != "difference lost", penalty=1 + gap / norm)
                update = math.sqrt(site.outer.update_square)
        self.last_update = update
        self.own = [site.outer.difference() for site in self.sites]
        self.mean = (self.own[0] + self.own[1]) / 2
        for site in self.sites:
            if broken != "sent twice":
                site.outer.take_weights(list(site.outer.weights))


@pytest.mark.parametrize("nesterov", [True, False])
def test_co2_is_the_formula_of_its_paper(nesterov):
    """m = mu m + mean / Lambda of the round before, clipped; phi = phi - lr m (arXiv:2401.16265, algorithm 1)."""
    run = WholeRounds(settings(nesterov=nesterov))
    phi = run.sites[0].flat().clone()
    m = torch.zeros_like(phi)
    before = None
    step = torch.zeros_like(phi)
    was_clipped = False
    for round_ in range(5):
        moved = []
        for number, site in enumerate(run.sites):
            assert torch.equal(site.flat(), torch.cat([w.flatten() for w in site.outer.weights.values()]))
            site.move(gradients(number, round_))
            moved.append(0.1 * torch.cat([g.flatten() for g in gradients(number, round_).values()]))
        run.end_round()
        if before is not None:
            g = before / (1 + step.norm() / before.norm())
            was_clipped |= bool(((0.5 * m + g).abs() > 0.05).any())
            m = (0.5 * m + g).clamp(-0.05, 0.05)
            step = 0.9 * (g + 0.5 * m) if nesterov else 0.9 * m
            phi = phi - step
        before = (moved[0] + moved[1]) / 2
        for site in run.sites:
            torch.testing.assert_close(site.flat(), phi, rtol=1e-12, atol=1e-12)
    assert was_clipped


@pytest.mark.parametrize(
    "broken", ["sign", "no gap", "gap of two rounds", "momentum not saved", "difference lost", "sent twice"]
)
def test_a_wrong_step_of_co2_is_noticed(broken):
    right, wrong = (WholeRounds(settings(clip=0.0)) for _ in range(2))
    for round_ in range(4):
        for run, how in ((right, ""), (wrong, broken)):
            for number, site in enumerate(run.sites):
                site.move(gradients(number, round_))
            run.end_round(broken=how)
    assert (right.sites[0].flat() - wrong.sites[0].flat()).abs().max() > 1e-3


@pytest.mark.parametrize("residual", [0.0, 0.9])
def test_a_round_of_co2_that_is_not_applied_goes_into_the_next(residual):
    """The differences of the failed exchange return to the weights, and the residual keeps its bits."""
    coded = settings(penalty=False, clip=0.0, precision="int8", residual=residual)
    run = WholeRounds(coded)
    whole = WholeRounds(coded)
    for site in (*run.sites, *whole.sites):
        for name, e in site.outer.residual.items():
            e.copy_(gradients(7, 7)[name])
    residuals = [e.clone() for e in run.sites[0].outer.residual.values()]
    for step in range(3):
        for group in (run, whole):
            for number, site in enumerate(group.sites):
                site.move(gradients(number, step))
        run.end_round(fails=step == 1)
        if step != 0:
            whole.end_round()
        assert all(torch.equal(e, old) for e, old in zip(run.sites[0].outer.residual.values(), residuals, strict=True))
    torch.testing.assert_close(run.sites[0].flat(), whole.sites[0].flat(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run.own[1], whole.own[1], rtol=1e-12, atol=1e-12)


def test_buffers_of_co2_go_on_from_their_own():
    """The mean of the sent values arrives a round later: each site moves by its own error."""
    sites = [Site(settings()) for _ in range(2)]
    sites[1].buffers["bias"].copy_(torch.tensor([1.5, 3.0]))
    own = [site.outer.difference() for site in sites]
    mean = (own[0] + own[1]) / 2
    for site, values in zip(sites, own, strict=True):
        exchanged = ExchangeResult(mean, values, 0, 0.0)
        sent = site.outer.vector_to_send((0,), values, is_last=False)
        round_ = site.outer.with_received_values(PendingRound(3, 6, (0,), values, mean), sent, exchanged, (0, 1))
        site.buffers["bias"].add_(0.25)
        site.outer.step_both(round_, moves_both=True, penalty=1.0)
    assert sites[0].buffers["bias"].tolist() == sites[1].buffers["bias"].tolist() == [1.25, 1.25]


def test_the_norm_of_the_last_step_is_saved_to_the_bit():
    for number in (0.0, 1e-30, 0.1, 3.5e20):
        assert bits_to_float(float_to_bits(number)) == number
