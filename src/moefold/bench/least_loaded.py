"""What least-loaded dispatch saves and costs beside the plain all-to-all, when one expert draws most of the tokens."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.bench.timing import StorageMeter, time_interleaved
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group, ParallelGroups
from moefold.model.moe.dispatch import Dispatcher, RoutingMap, make_dispatcher
from moefold.model.moe.dispatch.least_loaded import RebalanceRule
from moefold.model.moe.experts import Experts
from moefold.progress import ProgressCallback, ignore_progress

DISPATCHERS = ("alltoall", "leastloaded")
HOT_EXPERT = 0
NUM_MEASUREMENTS = 3
"""Measurements of a rank's experts, and of its memory. The least counts: all above it is other work, or a thread
of gloo that lets go of a tensor late."""


@dataclass(frozen=True)
class SkewedWorkload:
    """One MoE layer in float32; each token has one expert, so that a part of the tokens is that part of the copies."""

    tokens: int
    """Of each rank."""
    hidden_size: int = 256
    ffn_hidden_size: int = 512
    num_experts: int = 16
    rule: RebalanceRule = RebalanceRule(threshold=1.3, capacity=1.1, min_tokens=64)


@dataclass(frozen=True)
class DispatchMeasurement:
    """One dispatcher under one skew; every number is that of the rank with the most."""

    skew: float
    """Part of all tokens that chose one expert."""
    dispatcher: str
    step_s: float
    """Median of forward and backward of dispatch, experts and combine, until the last rank is done."""
    rows: int
    """Copies on the busiest rank."""
    mean_rows: float
    """Copies on a rank, mean."""
    peak_bytes: int
    """Most memory that the tensors of a step take at once on a rank: activations, gradients, borrowed weights."""
    experts_cpu_s: float
    """CPU time of forward and backward of a rank's experts while the other ranks wait: the critical path, were each
    rank to have a core of its own and communication to cost nothing."""
    experts_moved: int
    """Loans of an expert to a rank, over all ranks."""


def measure_dispatchers(
    workload: SkewedWorkload,
    skews: Sequence[float],
    steps: int,
    groups: ParallelGroups,
    on_progress: ProgressCallback = ignore_progress,
) -> list[DispatchMeasurement]:
    """Time the dispatchers in turn under each skew. Collective; the answer is the same on every rank.

    Args:
        workload: sizes.
        skews: parts of the tokens that choose expert 0; the others spread evenly over the other experts.
        steps: steps that count.
        groups: ep is the whole world.
        on_progress: takes what the measurement is at.
    """
    found = []
    for skew in skews:
        on_progress(f"skew {skew:g}")
        layers = {name: _SkewedLayer(workload, name, skew, groups) for name in DISPATCHERS}
        times_s = time_interleaved({name: layer.timed_step for name, layer in layers.items()}, warmup=2, rounds=steps)
        for name, layer in layers.items():
            found.append(_measurement(layer, skew, name, statistics.median(times_s[name])))
    return found


class _SkewedLayer:
    """One layer on one rank, with tokens that are routed already."""

    def __init__(self, workload: SkewedWorkload, name: str, skew: float, groups: ParallelGroups) -> None:
        self.ep_group: Group = groups.moe.experts
        self.workload = workload
        self._dispatcher: Dispatcher[Any] = make_dispatcher(name, groups.moe, workload.num_experts, workload.rule)
        self._num_local_experts = workload.num_experts // groups.moe.ep.size
        self._experts = _experts(workload, self._num_local_experts)
        generator = torch.Generator().manual_seed(groups.rank)
        self._x = torch.randn(workload.tokens, workload.hidden_size, generator=generator).requires_grad_()
        ids = skewed_choices(workload.tokens, workload.num_experts, skew, generator)
        self._routing_map = RoutingMap(ids, torch.rand(ids.shape, generator=generator).requires_grad_())

    def timed_step(self) -> None:
        """Forward and backward, and the wait for the last rank."""
        self.step()
        self.gather([0.0])

    def step(self) -> Sequence[int]:
        """Forward and backward; returns the rows of each expert that computed here."""
        rows, plan = self._dispatcher.dispatch(self._x, self._routing_map)
        y = self._experts(rows, plan.tokens_per_expert, self._dispatcher.migration(plan))
        y = self._dispatcher.combine(y, plan)
        torch.autograd.backward(y, y.detach())
        for leaf in (*self._experts.parameters(), self._x, self._routing_map.probs_TK):
            leaf.grad = None
        rows_per_expert: Sequence[int] = plan.tokens_per_expert
        return rows_per_expert

    def num_received_experts(self, rows_per_expert: Sequence[int]) -> int:
        """Experts of others that computed here."""
        return len(rows_per_expert) - self._num_local_experts

    def gather(self, numbers: Sequence[float]) -> Tensor:
        """The numbers of all ranks, [ranks, numbers]; collective."""
        return all_gather(torch.tensor([list(numbers)], dtype=torch.float64), self.ep_group)


def skewed_choices(num_tokens: int, num_experts: int, skew: float, generator: torch.Generator) -> Tensor:
    """One expert for each token, int64 [T, 1]: expert 0 for that part of them, the others in turn, in random order."""
    token = torch.arange(num_tokens)
    ids = torch.where(token < round(skew * num_tokens), HOT_EXPERT, 1 + token % (num_experts - 1))
    return ids[torch.randperm(num_tokens, generator=generator)].unsqueeze(1)


def _measurement(layer: _SkewedLayer, skew: float, name: str, step_s: float) -> DispatchMeasurement:
    rows_per_expert = layer.step()
    peak_bytes = min(_peak_bytes(layer) for _ in range(NUM_MEASUREMENTS))
    cpu_s = _one_rank_at_a_time(layer, lambda: _experts_cpu_s(layer.workload, rows_per_expert))
    numbers = [step_s, sum(rows_per_expert), peak_bytes, cpu_s, layer.num_received_experts(rows_per_expert)]
    of_all = layer.gather(numbers)
    most = of_all.amax(0).tolist()
    return DispatchMeasurement(
        skew=skew,
        dispatcher=name,
        step_s=most[0],
        rows=int(most[1]),
        mean_rows=float(of_all[:, 1].mean()),
        peak_bytes=int(most[2]),
        experts_cpu_s=most[3],
        experts_moved=int(of_all[:, 4].sum()),
    )


def _peak_bytes(layer: _SkewedLayer) -> int:
    with StorageMeter() as meter:
        layer.step()
    layer.gather([0.0])
    peak_bytes: int = meter.peak_bytes
    return peak_bytes


def _one_rank_at_a_time(layer: _SkewedLayer, function: Callable[[], float]) -> float:
    """Call a function on one rank after another, while the others wait."""
    answer = 0.0
    for rank in range(layer.ep_group.size):
        if rank == layer.ep_group.rank:
            answer = function()
        layer.gather([0.0])
    return answer


def _experts_cpu_s(workload: SkewedWorkload, rows_per_expert: Sequence[int]) -> float:
    experts = _experts(workload, len(rows_per_expert))
    x = torch.randn(sum(rows_per_expert), workload.hidden_size, requires_grad=True)
    grad = torch.ones(x.shape)
    times_s = []
    for _ in range(1 + NUM_MEASUREMENTS):
        started_s = time.process_time()
        torch.autograd.backward(experts(x, rows_per_expert), grad)
        times_s.append(time.process_time() - started_s)
    return min(times_s)


def _experts(workload: SkewedWorkload, count: int) -> Experts:
    experts = Experts(count, workload.hidden_size, workload.ffn_hidden_size)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return experts
