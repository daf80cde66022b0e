"""Oracle of sites: one oracle for each site, and the outer step in plain loops over whole tensors.

Shares no code with `OuterOptimizer`. The formulas are from arXiv:2311.08105, arXiv:2501.18512, arXiv:2506.10911
(pairs), arXiv:2401.16265 and arXiv:2602.11543, for sites of equal batches that send float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.config.sites import SitesConfig
from moefold.launch.site_round import pair_members
from moefold.model.init import init_weights
from moefold.model.transformer import build_model
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

    def __init__(self, cfg: Config) -> None:
        reads = ReadRecord()
        self.cfg = reads.watch(cfg)
        self._in_pairs = _is_in_pairs(self.cfg.sites)
        self._owns_experts = _owns_experts(self.cfg.sites)
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
        """Of them, those that were counted in a round, by fragment."""
        self._pending: tuple[int, list[Weights | None]] | None = None
        self._whole_round: tuple[Weights, list[Weights]] | None = None
        self._last_update = 0.0
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
        if sites.overlap == sites.every:
            if step == self.cfg.run.steps or (step > sites.first and step % sites.every == 0):
                self._end_whole_round(is_last=step == self.cfg.run.steps)
        elif self._pending and (step == self._pending[0] or step == self.cfg.run.steps):
            self._apply(self._pending[1], sites.keep_local)
            self._pending = None
        if sites.overlap == sites.every:
            pass
        elif step == self.cfg.run.steps and self._in_pairs:
            self._merge()
        elif step == self.cfg.run.steps:
            self._apply(self._send(list(range(self._num_fragments))), 0.0)
        elif fragments := self._fragments(step):
            means = self._send(fragments)
            if sites.overlap:
                self._pending = (step + sites.overlap, means)
            else:
                self._apply(means, 0.0)
        if sites.merge_experts and step % sites.merge_every == 0:
            self._merge_experts(sites.merge_experts * max(0.0, 1 - step / sites.merge_until))
        weights = tuple(
            {name: w.detach().clone() for name, w in site.weights.items()}
            | {name: buffer.clone() for name, buffer in site.router.buffers().items()}
            for site in self.sites
        )
        return SitesState(weights, tuple(map(_copies, self.outer)), tuple(map(_copies, self.momentum)), tuple(losses))

    def _fragment(self, name: str) -> int:
        parts = name.split(".")
        return int(parts[1]) % self._num_fragments if parts[0] == "layers" else self._num_fragments - 1

    def _fragments(self, step: int) -> list[int]:
        every = self.cfg.sites.every
        if step <= self.cfg.sites.first:
            return []
        return [p for p in range(self._num_fragments) if (step - p * every // self._num_fragments) % every == 0]

    def _is_frozen_on(self, number: int) -> Callable[[int], bool] | None:
        sites = self.cfg.sites
        return (lambda expert: expert % sites.count != number) if self._owns_experts else None

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
            if self._in_pairs:
                g = g + share * (self.outer[site][name] - self.outer[j][name])
        return g

    def _send(self, fragments: list[int]) -> list[Weights | None]:
        """Return for each site the mean difference of each weight, and the mean of each buffer; None: it rests.

        In pairs, the distance of the outer weights to their mean is added.
        """
        self._num_rounds += 1
        everyone = tuple(range(len(self.sites)))
        groups = pair_members(self.cfg.run.seed, self._num_rounds, everyone) if self._in_pairs else [everyone]
        means: list[Weights | None] = [None] * len(self.sites)
        for group in groups:
            shares = self._shares(group, fragments)
            buffers = {
                name: torch.stack([share * self._buffer(j, name).double() for j, share in shares.items()]).sum(0)
                for name in self.sites[0].router.biases
                if self._fragment(name) in fragments
            }
            for site in group:
                mean = dict(buffers)
                for name in (name for name in self.outer[site] if self._fragment(name) in fragments):
                    g = self._mean_difference(site, name, shares)
                    for expert in range(len(g) if ".experts." in name and self._owns_experts else 0):
                        owner = expert % len(self.sites)
                        g[expert] = self.outer[site][name][expert] - self.sites[owner].weights[name][expert]
                    mean[name] = g
                means[site] = mean
        return means

    @torch.no_grad()
    def _end_whole_round(self, *, is_last: bool) -> None:
        """Take the outer step of the round before (CO2), send the differences of this one, and begin the next at phi.

        A bias, which has no outer value, goes on from its own, corrected by what its mean was off a round ago.
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
        self.outer = [_copies(self.outer[0]) for _ in self.sites]
        self.momentum = [_copies(self.momentum[0]) for _ in self.sites]
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
        gap = last_update / norm if sites.penalty else 0.0
        square = 0.0
        for name, g in mean.items():
            momentum = sites.momentum * self.momentum[0][name] + g / (1 + gap)
            self.momentum[0][name] = momentum.clamp(-sites.clip, sites.clip) if sites.clip else momentum
            update = sites.lr * self.momentum[0][name]
            if sites.nesterov:
                update = sites.lr * (g / (1 + gap) + sites.momentum * self.momentum[0][name])
            self.outer[0][name] = self.outer[0][name] - update
            square += float(update.square().sum())
        return math.sqrt(square)

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


def _is_in_pairs(sites: SitesConfig) -> bool:
    match sites.topology:
        case "pairs":
            return True
        case "all":
            return False
        case unknown:
            unknown_kind("sites.topology", unknown)


def _owns_experts(sites: SitesConfig) -> bool:
    match sites.experts:
        case "own":
            return True
        case "average":
            return False
        case unknown:
            unknown_kind("sites.experts", unknown)


def _copies(tensors: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
