"""Oracle of sites: one oracle for each site, and the outer step in plain loops over whole tensors.

Shares no code with `OuterOptimizer`: the formulas are those of arXiv:2311.08105, sites of equal batches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.model.init import init_weights
from moefold.model.transformer import build_model
from moefold.verify.compare import oracle_batch, token_chunks
from moefold.verify.distributed_run import open_samples
from moefold.verify.oracle import Oracle, Weights


@dataclass(frozen=True)
class SitesState:
    """State of all sites after a step."""

    weights: tuple[Weights, ...]
    """Weights and buffers of each site."""
    outer: Weights
    momentum: Weights
    losses: tuple[float, ...]
    """Loss of each site."""


class OracleSites:
    """Reference of `sites.count` sites that train on every count-th sample and exchange weights.

    Args:
        cfg: the recipe; its mapping does not matter.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        model = build_model(cfg)
        init_weights(model, cfg.model, cfg.run.seed)
        initial = {name: p.detach().double() for name, p in model.named_parameters()}
        self.sites = [
            Oracle(cfg, {name: p.clone() for name, p in initial.items()}, token_chunks(cfg))
            for _ in range(cfg.sites.count)
        ]
        self.outer = {name: p.clone() for name, p in initial.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in initial.items()}
        self._data = open_samples(cfg)

    def run(self, num_steps: int) -> list[SitesState]:
        """Train all sites, and return the state after each step."""
        return [self._step(step) for step in range(1, num_steps + 1)]

    def _step(self, step: int) -> SitesState:
        sites = self.cfg.sites
        size = self.cfg.train.global_batch_size
        losses = []
        for number, site in enumerate(self.sites):
            mine = range((step - 1) * size, step * size)
            batch = oracle_batch(self._data.train, self.cfg, [number + sites.count * index for index in mine])
            losses.append(site.step(batch).loss)
        if (step > sites.first and step % sites.every == 0) or step == self.cfg.run.steps:
            self._round()
        weights = tuple(
            {name: w.detach().clone() for name, w in site.weights.items()}
            | {name: buffer.clone() for name, buffer in site.router.buffers().items()}
            for site in self.sites
        )
        return SitesState(weights, _copies(self.outer), _copies(self.momentum), tuple(losses))

    @torch.no_grad()
    def _round(self) -> None:
        sites = self.cfg.sites
        for name, phi in self.outer.items():
            mean = torch.zeros_like(phi)
            for site in self.sites:
                mean += (phi - site.weights[name]) / sites.count
            self.momentum[name] = sites.momentum * self.momentum[name] + mean
            update = mean + sites.momentum * self.momentum[name] if sites.nesterov else self.momentum[name]
            self.outer[name] = phi - sites.lr * update
            for site in self.sites:
                site.weights[name].copy_(self.outer[name])
        for name in self.sites[0].router.biases:
            bias = torch.stack([site.router.biases[name].double() for site in self.sites]).mean(0)
            for site in self.sites:
                site.router.biases[name].copy_(bias)


def _copies(tensors: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
