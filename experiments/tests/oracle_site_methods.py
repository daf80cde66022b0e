"""Oracles of methods of sites, each in plain loops over whole tensors: pairs, whole rounds, owned experts.

The formulas are from arXiv:2506.10911, arXiv:2401.16265 and arXiv:2602.11543. They share no code
with the outer optimizers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.launch.site_round import pair_members
from moefold.verify.oracle import Weights
from tests.train.oracle_sites import OracleSites, copies


class OracleOfPairs(OracleSites):
    """Sites that exchange in random pairs; the distance of the outer weights to their mean is added to g."""

    methods = ("noloco",)

    def _groups(self, members: tuple[int, ...]) -> list[tuple[int, ...]]:
        return pair_members(self.cfg.run.seed, self._num_rounds, members)

    def _mean_difference(self, site: int, name: str, shares: dict[int, float]) -> Tensor:
        g = super()._mean_difference(site, name, shares)
        for j, share in shares.items():
            g = g + share * (self.outer[site][name] - self.outer[j][name])
        return g

    def _end(self) -> None:
        self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        """Set all sites to the mean of their weights and buffers."""
        shares = self._shares(range(len(self.sites)), list(range(self._num_fragments)))
        for name in [*self.outer[0], *self.sites[0].router.biases]:
            is_weight = name in self.outer[0]
            tensors = [site.weights[name] if is_weight else site.router.biases[name] for site in self.sites]
            mean = torch.stack([shares[j] * tensor.double() for j, tensor in enumerate(tensors)]).sum(0)
            for number, tensor in enumerate(tensors):
                tensor.copy_(mean)
                if is_weight:
                    self.outer[number][name] = mean.clone()


class OracleOfWholeRounds(OracleSites):
    """Sites that exchange a round during the whole next one."""

    methods = ("co2",)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self._whole_round: tuple[Weights, list[Weights]] | None = None
        self._last_update = 0.0

    def _exchange(self, step: int) -> None:
        sites = self.cfg.sites
        assert sites.overlap == sites.every
        if step == self.cfg.run.steps or (step > sites.first and step % sites.every == 0):
            self._end_whole_round(is_last=step == self.cfg.run.steps)

    @torch.no_grad()
    def _end_whole_round(self, *, is_last: bool) -> None:
        """Take the outer step of the round before (CO2), send the differences of this one, and begin the next at phi.

        A bias, which has no outer value, goes on from its own value, corrected by the error of its mean a round ago.
        """
        shares = list(self._shares(range(len(self.sites)), list(range(self._num_fragments))).values())
        mean_differences: Weights = {
            name: torch.stack([r * (phi - site.weights[name]) for r, site in zip(shares, self.sites, strict=True)]).sum(
                0
            )
            for name, phi in self.outer[0].items()
        }
        before = self._whole_round
        last_update = self._last_update
        self._last_update = 0.0
        if before is not None:
            self._last_update = self._outer_step(before[0], last_update)
            for site, corrections in zip(self.sites, before[1], strict=True):
                for name, correction in corrections.items():
                    site.router.biases[name] += correction
        means = {
            name: torch.stack([r * s.router.biases[name] for r, s in zip(shares, self.sites, strict=True)]).sum(0)
            for name in self._biases()
        }
        off = [{name: mean - site.router.biases[name] for name, mean in means.items()} for site in self.sites]
        self._whole_round = None if is_last else (mean_differences, off)
        if is_last:
            self._outer_step(mean_differences, self._last_update)
        self.outer = [copies(self.outer[0]) for _ in self.sites]
        self.momentum = [copies(self.momentum[0]) for _ in self.sites]
        for site in self.sites:
            for name, phi in self.outer[0].items():
                site.weights[name].copy_(phi)
            for name, mean in means.items() if is_last else ():
                site.router.biases[name].copy_(mean)

    def _biases(self) -> list[str]:
        return list(self.sites[0].router.biases)

    def _outer_step(self, mean: Weights, last_update: float) -> float:
        """Take the outer step of CO2; return its norm."""
        sites = self.cfg.sites
        norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
        gap = last_update / norm if self._method.penalty else 0.0
        square = 0.0
        for name, g in mean.items():
            momentum = sites.momentum * self.momentum[0][name] + g / (1 + gap)
            self.momentum[0][name] = (
                momentum.clamp(-self._method.clip, self._method.clip) if self._method.clip else momentum
            )
            update = sites.lr * self.momentum[0][name]
            if sites.nesterov:
                update = sites.lr * (g / (1 + gap) + sites.momentum * self.momentum[0][name])
            self.outer[0][name] = self.outer[0][name] - update
            square += float(update.square().sum())
        return math.sqrt(square)


class OracleOfOwners(OracleSites):
    """Sites that each train experts of their own, which are merged in the warm-up."""

    methods = ("spes",)

    def _exchange(self, step: int) -> None:
        super()._exchange(step)
        method = self._method
        if method.merge_experts and step % method.merge_every == 0:
            self._merge_experts(method.merge_experts * max(0.0, 1 - step / method.merge_until))

    def _is_frozen_on(self, number: int) -> Callable[[int], bool] | None:
        return lambda expert: expert % self.cfg.sites.count != number

    def _mean_difference(self, site: int, name: str, shares: dict[int, float]) -> Tensor:
        g = super()._mean_difference(site, name, shares)
        for expert in range(len(g) if ".experts." in name else 0):
            owner = expert % len(self.sites)
            g[expert] = self.outer[site][name][expert] - self.sites[owner].weights[name][expert]
        return g

    @torch.no_grad()
    def _merge_experts(self, share: float) -> None:
        """Move each expert towards the four that are most similar in w_gate, by the weights before."""
        for gate in [name for name in self.outer[0] if name.endswith(".experts.w_gate")]:
            rows = self.outer[0][gate].flatten(1).clone()
            before = {
                name: w.clone() for name, w in self.outer[0].items() if name.startswith(gate.removesuffix("w_gate"))
            }
            for expert, row in enumerate(rows):
                others = [other for other in range(len(rows)) if other != expert]
                cosines = {i: float(row @ rows[i] / (row.norm() * rows[i].norm())) for i in others}
                nearest = sorted(others, key=lambda i: -cosines[i])[:4]
                for name, weights in before.items():
                    change = sum((weights[i] - weights[expert]) / 4 for i in nearest) + 0 * weights[expert]
                    for outer, site in zip(self.outer, self.sites, strict=True):
                        outer[name][expert] = weights[expert] + share * change
                        site.weights[name][expert] = outer[name][expert]


def oracle_of(cfg: Config) -> OracleSites:
    """Return the oracle of the method of a recipe."""
    found: Any = next(
        (one for one in (OracleOfPairs, OracleOfWholeRounds, OracleOfOwners) if str(cfg.sites.method) in one.methods),
        OracleSites,
    )
    return found(cfg)
