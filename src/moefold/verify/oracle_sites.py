"""Oracle of sites: one oracle for each site, and the outer step in plain loops over whole tensors.

Shares no code with `OuterOptimizer`. The formulas are those of arXiv:2311.08105, arXiv:2501.18512 and arXiv:2401.16265,
for sites of equal batches that send float32.
"""

import math
from collections.abc import Callable
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
        layers = cfg.sites.fragment_layers
        self._num_fragments = math.ceil(cfg.model.num_layers / layers) if layers else 1
        self._pending: tuple[int, Weights] | None = None
        self._whole_round: tuple[Weights, list[Weights]] | None = None
        self._last_update = 0.0
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
        if sites.overlap == sites.every:
            if step == self.cfg.run.steps or (step > sites.first and step % sites.every == 0):
                self._end_whole_round(is_last=step == self.cfg.run.steps)
        elif self._pending and (step == self._pending[0] or step == self.cfg.run.steps):
            self._apply(self._pending[1], sites.keep_local)
            self._pending = None
        if sites.overlap == sites.every:
            pass
        elif step == self.cfg.run.steps:
            self._apply(self._send(lambda name: True), 0.0)
        elif fragments := self._fragments(step):
            mean = self._send(lambda name: self._fragment(name) in fragments)
            if sites.overlap:
                self._pending = (step + sites.overlap, mean)
            else:
                self._apply(mean, 0.0)
        weights = tuple(
            {name: w.detach().clone() for name, w in site.weights.items()}
            | {name: buffer.clone() for name, buffer in site.router.buffers().items()}
            for site in self.sites
        )
        return SitesState(weights, _copies(self.outer), _copies(self.momentum), tuple(losses))

    def _fragment(self, name: str) -> int:
        parts = name.split(".")
        return int(parts[1]) % self._num_fragments if parts[0] == "layers" else self._num_fragments - 1

    def _fragments(self, step: int) -> list[int]:
        every = self.cfg.sites.every
        if step <= self.cfg.sites.first:
            return []
        return [p for p in range(self._num_fragments) if (step - p * every // self._num_fragments) % every == 0]

    @torch.no_grad()
    def _send(self, is_sent: Callable[[str], bool]) -> Weights:
        """Return the mean difference of each weight, and the mean of each buffer, that is sent."""
        mean = {}
        for name, phi in self.outer.items():
            if is_sent(name):
                mean[name] = sum((phi - site.weights[name]) / len(self.sites) for site in self.sites) + 0 * phi
        for name in self.sites[0].router.biases:
            if is_sent(name):
                mean[name] = torch.stack([site.router.biases[name].double() for site in self.sites]).mean(0)
        return mean

    @torch.no_grad()
    def _end_whole_round(self, *, is_last: bool) -> None:
        """Take the outer step of the round before (CO2), send the differences of this one, and begin the next at phi.

        A bias, which has no outer value, goes on from its own, corrected by what its mean was off a round ago.
        """
        differences = {name: sum(phi - site.weights[name] for site in self.sites) for name, phi in self.outer.items()}
        before = self._whole_round
        last_update = self._last_update
        self._last_update = 0.0
        if before is not None:
            self._last_update = self._outer_step(before[0], last_update)
            for site, corrections in zip(self.sites, before[1], strict=True):
                for name, correction in corrections.items():
                    site.router.biases[name] += correction
        means = {name: torch.stack([s.router.biases[name] for s in self.sites]).mean(0) for name in self._biases()}
        off = [{name: mean - site.router.biases[name] for name, mean in means.items()} for site in self.sites]
        mean_differences = {name: total / len(self.sites) + 0 * self.outer[name] for name, total in differences.items()}
        self._whole_round = None if is_last else (mean_differences, off)
        if is_last:
            self._outer_step(mean_differences, self._last_update)
        for site in self.sites:
            for name, phi in self.outer.items():
                site.weights[name].copy_(phi)
            for name, mean in means.items() if is_last else ():
                site.router.biases[name].copy_(mean)

    def _biases(self) -> list[str]:
        return list(self.sites[0].router.biases)

    def _outer_step(self, mean: Weights, last_update: float) -> float:
        """Take the outer step of CO2; return its norm."""
        sites = self.cfg.sites
        norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
        gap = last_update / norm if sites.penalty else 0.0
        square = 0.0
        for name, g in mean.items():
            momentum = sites.momentum * self.momentum[name] + g / (1 + gap)
            self.momentum[name] = momentum.clamp(-sites.clip, sites.clip) if sites.clip else momentum
            update = sites.lr * self.momentum[name]
            if sites.nesterov:
                update = sites.lr * (g / (1 + gap) + sites.momentum * self.momentum[name])
            self.outer[name] = self.outer[name] - update
            square += float(update.square().sum())
        return math.sqrt(square)

    @torch.no_grad()
    def _apply(self, mean: Weights, keep: float) -> None:
        sites = self.cfg.sites
        for name, g in mean.items():
            if name in self.outer:
                self.momentum[name] = sites.momentum * self.momentum[name] + g
                update = g + sites.momentum * self.momentum[name] if sites.nesterov else self.momentum[name]
                self.outer[name] = self.outer[name] - sites.lr * update
            for site in self.sites:
                tensor = site.weights[name] if name in self.outer else site.router.biases[name]
                tensor.copy_(keep * tensor + (1 - keep) * self.outer.get(name, g))


def _copies(tensors: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
