"""Benchmark of a MoE layer's dispatch phases by mapping (arXiv:2504.14960 sec. 4.3)."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather
from moefold.comm.groups import ParallelGroups
from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes
from moefold.config.model import ModelConfig
from moefold.errors import ConfigError
from moefold.model.moe.dispatch import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.parallel.expert_parallel import build_dispatcher
from moefold.progress import ProgressCallback, ignore_progress
from moefold.topology.layout import Layout, divisors, fold

STEER_STRENGTH = 8.0
"""Strength of the steered direction over the noise; large enough that the router chooses the intended experts."""


def orthonormal_directions(num_experts: int, hidden_size: int, generator: torch.Generator) -> Tensor:
    """Return E random orthonormal rows, [E, H]; requires E <= H."""
    assert num_experts <= hidden_size
    matrix = torch.randn(hidden_size, num_experts, generator=generator, device=generator.device)
    return torch.linalg.qr(matrix)[0].t().contiguous()


def balanced_choices(count: int, model: ModelConfig, device: torch.device) -> Tensor:
    """Return balanced choices of K experts for `count` tokens, int64 [count, K]; expert counts differ by at most 1.

    The experts of a token are consecutive, so with group-limited routing they stay within few groups.
    """
    index = torch.arange(count * model.experts.top_k, device=device)
    return (index % model.experts.num_experts).view(count, model.experts.top_k)


@torch.no_grad()
def balanced_states(count: int, routers: Sequence[Tensor], model: ModelConfig, generator: torch.Generator) -> Tensor:
    """Return random states [count, H] with balanced routing; sets the routers' weights accordingly."""
    rows_EH = orthonormal_directions(model.experts.num_experts, model.hidden_size, generator)
    for router in routers:
        router.copy_(rows_EH)
    noise = torch.randn(count, model.hidden_size, generator=generator, device=generator.device)
    return _add_expert_directions(noise, rows_EH, model)


@torch.no_grad()
def steer_embedding(embedding: Tensor, routers: Sequence[Tensor], model: ModelConfig) -> None:
    """Steer the embedding so that each token id routes to fixed experts, balanced over random tokens."""
    generator = torch.Generator(embedding.device).manual_seed(0)
    rows_EH = orthonormal_directions(model.experts.num_experts, model.hidden_size, generator)
    for router in routers:
        router.copy_(rows_EH)
    embedding.copy_(_add_expert_directions(embedding / embedding.std(), rows_EH, model))


def _add_expert_directions(noise_NH: Tensor, rows_EH: Tensor, model: ModelConfig) -> Tensor:
    ids_NK = balanced_choices(len(noise_NH), model, noise_NH.device)
    strength_K = torch.linspace(STEER_STRENGTH + 1.0, STEER_STRENGTH, model.experts.top_k, device=noise_NH.device)
    chosen_NE = torch.zeros(len(noise_NH), model.experts.num_experts, device=noise_NH.device)
    chosen_NE.scatter_(1, ids_NK, strength_K.expand_as(ids_NK).contiguous())
    return noise_NH + chosen_NE @ rows_EH


PHASES = ("permute", "dispatch", "sort", "experts", "unsort", "combine", "unpermute")
"""Phases of a dispatcher with the experts between them; each is timed forward and backward."""
COUPLED_MOE_ORDER = "pp-ep-edp-etp"
"""Axis order, slowest first, of coupled EP, a subgroup of DP: EP neighbours are EDP (at least CP) ranks apart."""


@dataclass(frozen=True)
class Granularity:
    """Granularity of the experts; the compared ones have equal active compute and equal parameters."""

    name: str
    num_experts: int
    top_k: int
    ffn_hidden_size: int

    def __str__(self) -> str:
        return f"{self.num_experts} experts of {self.ffn_hidden_size}, top-{self.top_k}"


@dataclass(frozen=True)
class MappingTime:
    """Phase times of one mapping."""

    study: str
    """"etp" or "context"."""
    grain: str
    experts: str
    name: str
    parts_s: dict[str, float]
    """Seconds of each phase, forward and backward: mean over the ranks, median over the rounds."""
    total_s: float
    """Seconds of all phases: maximum over the ranks, median over the rounds."""


def granularities(hidden_size: int) -> tuple[Granularity, Granularity]:
    """Return coarse-grained experts, and eight times as many fine-grained ones of an eighth of the width."""
    return (
        Granularity("coarse", 8, 2, 2 * hidden_size),
        Granularity("fine", 64, 16, hidden_size // 4),
    )


def expert_layouts(ranks: int) -> Iterator[tuple[str, Layout]]:
    """Yield all ways to divide the ranks between ETP and EP."""
    for etp in divisors(ranks):
        yield f"ETP{etp} EP{ranks // etp}", fold(world_size=ranks, etp=etp, ep=ranks // etp)


def context_layouts(ranks: int) -> Iterator[tuple[str, Layout]]:
    """Yield CP x EP layouts: folded, or coupled, where EP uses DP ranks only and so CP * EP <= ranks."""
    for cp in divisors(ranks)[1:]:
        for ep in divisors(ranks)[1:]:
            yield f"CP{cp} EP{ep} folded", fold(world_size=ranks, cp=cp, ep=ep)
            if cp * ep <= ranks:
                yield f"CP{cp} EP{ep} coupled", fold(world_size=ranks, cp=cp, ep=ep, moe_order=COUPLED_MOE_ORDER)


def measure_mappings(
    ranks: int,
    tokens: int,
    hidden_size: int,
    rounds: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: ProgressCallback = ignore_progress,
) -> list[MappingTime]:
    """Time all mappings of both studies in interleaved rounds. Collective; the result is equal on every rank.

    Args:
        ranks: world size.
        tokens: tokens of each rank.
        hidden_size: H.
        rounds: timed rounds, after one warm-up round.
        dtype: dtype of states and weights.
        device: device of this rank.
        on_progress: called with progress messages.
    """
    on_progress("building the layers")
    layers = []
    for study, layouts in (("etp", expert_layouts(ranks)), ("context", context_layouts(ranks))):
        for name, layout in layouts:
            groups = ParallelGroups.create(layout, device)
            for grain in granularities(hidden_size):
                if _is_legal(layout, grain):
                    layers.append((study, grain, name, _DispatchLayer(groups, grain, tokens, hidden_size, dtype)))
    if not layers:
        raise ConfigError(f"--ranks {ranks}: no mapping shares the experts evenly")
    times: list[list[list[float]]] = [[] for _ in layers]
    for round_ in range(rounds + 1):
        on_progress(f"round {round_ + 1} of {rounds + 1}, {len(layers)} layers each")
        for layer_times, (*_, layer) in zip(times, layers, strict=True):
            seconds = layer.step()
            if round_:
                layer_times.append(seconds)
    return [
        _mapping_time(study, grain, name, layer, layer_times)
        for (study, grain, name, layer), layer_times in zip(layers, times, strict=True)
    ]


def _is_legal(layout: Layout, granularity: Granularity) -> bool:
    return granularity.num_experts % layout.ep == 0 and granularity.ffn_hidden_size % layout.etp == 0


def _mapping_time(
    study: str, granularity: Granularity, name: str, layer: "_DispatchLayer", seconds: list[list[float]]
) -> MappingTime:
    # [rounds, phases] of this rank, then [ranks, rounds, phases].
    own_s = torch.tensor(seconds, dtype=torch.float64, device=layer.device)
    all_s = all_gather(own_s.unsqueeze(0), layer.world).cpu()
    parts = all_s.mean(0).median(0).values.tolist()
    total = statistics.median(all_s.sum(-1).amax(0).tolist())
    return MappingTime(study, granularity.name, str(granularity), name, dict(zip(PHASES, parts, strict=True)), total)


class _DispatchLayer:
    """One rank's MoE layer and tokens, with uniform random routing."""

    def __init__(
        self, groups: ParallelGroups, granularity: Granularity, tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.world = groups.world
        self.device = groups.device
        ep = groups.moe.ep
        etp = groups.moe.etp
        sizes = DispatchSizes(
            num_experts=granularity.num_experts,
            max_rows=tokens * granularity.top_k,
            width=hidden_size,
            item_bytes=dtype.itemsize,
        )
        self._dispatcher: Dispatcher[Any] = build_dispatcher(default_part(DispatcherPart), groups.moe, sizes)
        width = granularity.ffn_hidden_size // etp.size
        self._experts = Experts(granularity.num_experts // ep.size, hidden_size, width).to(
            device=self.device, dtype=dtype
        )
        for weight in self._experts.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        generator = torch.Generator().manual_seed(groups.rank)
        self._x = torch.randn(tokens, hidden_size, generator=generator).to(device=self.device, dtype=dtype)
        scores = torch.rand(tokens, granularity.num_experts, generator=generator)
        probs, ids = scores.topk(granularity.top_k)
        self._routing_map = RoutingMap(ids.to(self.device), probs.to(self.device).requires_grad_())

    def step(self) -> list[float]:
        """Run one step after a barrier; return the seconds of each of `PHASES`, forward and backward."""
        dispatcher = self._dispatcher
        routing_map = self._routing_map
        plan: Any = None

        def preprocess(x: Tensor) -> Tensor:
            nonlocal plan
            rows, plan = dispatcher.dispatch_preprocess(x, routing_map)
            return rows

        phases = (
            preprocess,
            lambda rows: dispatcher.dispatch_communicate(rows, plan),
            lambda rows: dispatcher.dispatch_postprocess(rows, plan),
            lambda rows: self._experts(ExpertInput(rows, plan.tokens_per_expert)),
            lambda rows: dispatcher.combine_preprocess(rows, plan),
            lambda rows: dispatcher.combine_communicate(rows, plan),
            lambda rows: dispatcher.combine_postprocess(rows, plan),
        )
        self._barrier()
        value = self._x
        ends = []
        seconds = []
        for phase in phases:
            leaf = value.detach().requires_grad_()
            started_s = time.perf_counter()
            value = phase(leaf)
            seconds.append(self._elapsed_s(started_s))
            ends.append((leaf, value))
        grad: Tensor | None = torch.ones_like(value)
        for i in reversed(range(len(phases))):
            leaf, value = ends[i]
            started_s = time.perf_counter()
            torch.autograd.backward(value, grad)
            seconds[i] += self._elapsed_s(started_s)
            grad = leaf.grad
        for parameter in (*self._experts.parameters(), routing_map.probs_TK):
            parameter.grad = None
        return seconds

    def _elapsed_s(self, started_s: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started_s

    def _barrier(self) -> None:
        all_gather(torch.zeros(1, device=self.device), self.world)
