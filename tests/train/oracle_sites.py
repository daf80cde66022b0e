"""Oracle of sites: one oracle for each site, and the outer step in plain loops over whole tensors.

Shares no code with `OuterOptimizer`. The formulas are from arXiv:2311.08105 and arXiv:2501.18512, for sites of equal
batches that send float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.verify.compare import oracle_batch, token_chunks
from moefold.verify.distributed_run import open_samples
from moefold.verify.no_formula import unknown_kind
from moefold.verify.oracle import Oracle, Weights
from moefold.verify.read_record import ReadRecord


@dataclass(frozen=True)
class SitesState:
    """State of all sites after a step."""

    weights: tuple[Weights, ...]
    """Weights and buffers of each site."""
    outer: tuple[Weights, ...]
    momentum: tuple[Weights, ...]
    losses: tuple[float, ...]
    """Loss of each site."""


class OracleSites:
    """Reference of `sites.count` sites that train on every count-th sample and exchange weights.

    Args:
        cfg: the recipe; its mapping does not matter.
    """

    methods: tuple[str, ...] = ("mean", "diloco", "streaming")
    """Kinds of `sites.method` that the formula is of."""

    def __init__(self, cfg: Config) -> None:
        reads = ReadRecord()
        self.cfg = reads.watch(cfg)
        if (method := self.cfg.sites.method).kind not in self.methods:
            unknown_kind("sites.method", method.kind)
        self._method = method
        model = build_model(cfg)
        init_weights(model, cfg.model, cfg.run.seed)
        initial = {name: p.detach().double() for name, p in model.named_parameters()}
        self.sites = [
            Oracle(
                cfg,
                {name: p.clone() for name, p in initial.items()},
                token_chunks(cfg.parallel, cfg.train),
                is_frozen_expert=self._is_frozen_on(number),
                reads=reads,
            )
            for number in range(cfg.sites.count)
        ]
        self.outer = [{name: p.clone() for name, p in initial.items()} for _ in self.sites]
        self.momentum = [{name: torch.zeros_like(p) for name, p in initial.items()} for _ in self.sites]
        layers = self.cfg.sites.fragment_layers
        self._num_fragments = math.ceil(cfg.model.num_layers / layers) if layers else 1
        self._num_rounds = 0
        self._tokens = [0] * len(self.sites)
        """Input tokens without padding that each site has trained on."""
        self._weighed = [[0] * self._num_fragments for _ in self.sites]
        """The part of these tokens that was counted in a round, by fragment."""
        self._pending: tuple[int, list[Weights | None]] | None = None
        self._data = open_samples(cfg)

    def run(self, num_steps: int) -> list[SitesState]:
        """Train all sites, and return the state after each step.

        Raises:
            NoFormulaError: a key of the recipe that is set has no formula.
        """
        states = [self._step(step) for step in range(1, num_steps + 1)]
        self.sites[0].check_keys(has_rounds=True)
        return states

    def _step(self, step: int) -> SitesState:
        sites = self.cfg.sites
        size = self.cfg.train.global_batch_size
        losses = []
        for number, site in enumerate(self.sites):
            mine = range((step - 1) * size, step * size)
            batch = oracle_batch(self._data.train, self.cfg.train, [number + sites.count * index for index in mine])
            losses.append(site.step(batch).loss)
            self._tokens[number] += int(batch.is_token.sum())
        self._exchange(step)
        weights = tuple(
            {name: w.detach().clone() for name, w in site.weights.items()}
            | {name: buffer.clone() for name, buffer in site.router.buffers().items()}
            for site in self.sites
        )
        return SitesState(weights, tuple(map(copies, self.outer)), tuple(map(copies, self.momentum)), tuple(losses))

    def _exchange(self, step: int) -> None:
        """Apply the round that is due after a step, and begin one."""
        sites = self.cfg.sites
        is_last = step == self.cfg.run.steps
        if self._pending and (step == self._pending[0] or is_last):
            self._apply(self._pending[1], sites.keep_local)
            self._pending = None
        if is_last:
            self._end()
        elif fragments := self._fragments(step):
            means = self._send(fragments)
            if sites.overlap:
                self._pending = (step + sites.overlap, means)
            else:
                self._apply(means, 0.0)

    def _end(self) -> None:
        """Exchange after the last step."""
        self._apply(self._send(list(range(self._num_fragments))), 0.0)

    def _fragment(self, name: str) -> int:
        parts = name.split(".")
        return int(parts[1]) % self._num_fragments if parts[0] == "layers" else self._num_fragments - 1

    def _fragments(self, step: int) -> list[int]:
        every = self.cfg.sites.every
        if step <= self.cfg.sites.first:
            return []
        return [p for p in range(self._num_fragments) if (step - p * every // self._num_fragments) % every == 0]

    def _is_frozen_on(self, number: int) -> Callable[[int], bool] | None:
        """Return whether a site does not train an expert; None: it trains all."""
        return None

    def _groups(self, members: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the sites that exchange with each other in this round."""
        return [members]

    def _shares(self, members: Sequence[int], fragments: Sequence[int]) -> dict[int, float]:
        """Return the share of each member: the tokens since its last round, or the same for each."""
        weights = {
            site: self._tokens[site] - min(self._weighed[site][fragment] for fragment in fragments) for site in members
        }
        if self.cfg.sites.weigh == "even":
            weights = dict.fromkeys(members, 1)
        for site in members:
            for fragment in fragments:
                self._weighed[site][fragment] = self._tokens[site]
        return {site: weights[site] / sum(weights.values()) for site in members}

    def _buffer(self, site: int, name: str) -> Tensor:
        return self.sites[site].router.biases[name]

    @torch.no_grad()
    def _mean_difference(self, site: int, name: str, shares: dict[int, float]) -> Tensor:
        g = torch.zeros_like(self.outer[site][name])
        for j, share in shares.items():
            g = g + share * (self.outer[j][name] - self.sites[j].weights[name])
        return g

    def _send(self, fragments: list[int]) -> list[Weights | None]:
        """Return for each site the mean difference of each weight, and the mean of each buffer; None: it rests."""
        self._num_rounds += 1
        everyone = tuple(range(len(self.sites)))
        means: list[Weights | None] = [None] * len(self.sites)
        for group in self._groups(everyone):
            shares = self._shares(group, fragments)
            buffers = {
                name: torch.stack([share * self._buffer(j, name).double() for j, share in shares.items()]).sum(0)
                for name in self.sites[0].router.biases
                if self._fragment(name) in fragments
            }
            for site in group:
                mean = dict(buffers)
                for name in (name for name in self.outer[site] if self._fragment(name) in fragments):
                    mean[name] = self._mean_difference(site, name, shares)
                means[site] = mean
        return means

    @torch.no_grad()
    def _apply(self, means: list[Weights | None], keep: float) -> None:
        sites = self.cfg.sites
        for number, (site, mean) in enumerate(zip(self.sites, means, strict=True)):
            outer = self.outer[number]
            momentum = self.momentum[number]
            for name, g in ({} if mean is None else mean).items():
                if name in outer:
                    momentum[name] = sites.momentum * momentum[name] + g
                    update = g + sites.momentum * momentum[name] if sites.nesterov else momentum[name]
                    outer[name] = outer[name] - sites.lr * update
                tensor = site.weights[name] if name in outer else self._buffer(number, name)
                mixed = keep * tensor + (1 - keep) * outer.get(name, g)
                if ".experts." in name and (is_frozen := self._is_frozen_on(number)):
                    for expert in filter(is_frozen, range(len(mixed))):
                        mixed[expert] = outer[name][expert]
                tensor.copy_(mixed)


def copies(tensors: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
