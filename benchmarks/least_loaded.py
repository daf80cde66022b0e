"""Compare least-loaded dispatch with the plain all-to-all under skewed routing to one expert.

`python -m benchmarks.least_loaded --help` explains the options.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.program import check_counts, run_program
from moefold.bench.timing import StorageMeter, time_interleaved
from moefold.cli.command_parser import CommandParser
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.base.part_registry import find_part
from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.model.moe.dispatch import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.parallel.expert_parallel import build_dispatcher
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress
from moefold.terminal import print_escaped
from moefold.topology.layout import fold

NUM_EXPERTS = 16
NUM_RANKS = (2, 4, 8, 16)
MIB = 2**20
HOT_EXPERT = 0
NUM_MEASUREMENTS = 3
"""Measurements of a rank's experts and of its memory. The minimum counts: the excess is other work on the machine, or a
gloo thread that releases a tensor late."""


@dataclass(frozen=True)
class SkewedWorkload:
    """Sizes of one MoE layer in float32 with top-1 routing, so that tokens equal routed tokens."""

    tokens: int
    """Tokens of each rank."""
    hidden_size: int = 256
    ffn_hidden_size: int = 512
    num_experts: int = 16
    min_tokens: int = 64
    """Minimum tokens of an expert whose weights are sent."""

    def dispatchers(self) -> dict[str, DispatcherPart]:
        """Return the plain dispatcher and the least-loaded one, by kind."""
        least_loaded = find_part(DispatcherPart.group, "leastloaded")
        parts = default_part(DispatcherPart), least_loaded(threshold=1.3, capacity=1.1, min_tokens=self.min_tokens)
        return {part.kind: part for part in parts}


@dataclass(frozen=True)
class DispatchMeasurement:
    """Measurement of one dispatcher under one skew; maxima over the ranks unless noted."""

    skew: float
    """Fraction of all tokens that chose the hot expert."""
    dispatcher: str
    step_s: float
    """Median time of forward and backward of dispatch, experts and combine, until the last rank has finished."""
    rows: int
    """Routed tokens on the most loaded rank."""
    mean_rows: float
    """Routed tokens per rank, mean."""
    peak_bytes: int
    """Peak bytes of the tensors of a step on a rank: activations, gradients, received expert weights."""
    experts_cpu_s: float
    """CPU time of forward and backward of a rank's experts while the other ranks wait: the critical path if each rank
    had its own core and communication were free."""
    experts_moved: int
    """Experts sent to another rank, summed over all ranks."""


def measure_dispatchers(
    workload: SkewedWorkload,
    skews: Sequence[float],
    steps: int,
    groups: ParallelGroups,
    on_progress: ProgressCallback = ignore_progress,
) -> list[DispatchMeasurement]:
    """Time the dispatchers in interleaved rounds under each skew. Collective. The result is equal on every rank.

    Args:
        workload: sizes of the layer.
        skews: fractions of the tokens that choose expert 0; the rest is spread evenly over the other experts.
        steps: timed steps.
        groups: process groups; ep is the whole world.
        on_progress: called with progress messages.
    """
    measurements = []
    for skew in skews:
        on_progress(f"skew {skew:g}")
        layers = {name: _SkewedLayer(workload, part, skew, groups) for name, part in workload.dispatchers().items()}
        times_s = time_interleaved({name: layer.timed_step for name, layer in layers.items()}, warmup=2, rounds=steps)
        for name, layer in layers.items():
            measurements.append(_measurement(layer, skew, name, statistics.median(times_s[name])))
    return measurements


class _SkewedLayer:
    """One rank's MoE layer and tokens, with a fixed skewed routing."""

    def __init__(self, workload: SkewedWorkload, part: DispatcherPart, skew: float, groups: ParallelGroups) -> None:
        self.ep_group: Group = groups.moe.experts
        self.workload = workload
        sizes = DispatchSizes(
            num_experts=workload.num_experts, max_rows=workload.tokens, width=workload.hidden_size, item_bytes=4
        )
        self._dispatcher: Dispatcher[Any] = build_dispatcher(part, groups.moe, sizes)
        self._num_local_experts = workload.num_experts // groups.moe.ep.size
        self._experts = _experts(workload, self._num_local_experts)
        generator = torch.Generator().manual_seed(groups.rank)
        self._x = torch.randn(workload.tokens, workload.hidden_size, generator=generator).requires_grad_()
        ids = skewed_choices(workload.tokens, workload.num_experts, skew, generator)
        self._routing_map = RoutingMap(ids, torch.rand(ids.shape, generator=generator).requires_grad_())

    def timed_step(self) -> None:
        """Run forward and backward, and wait for all ranks."""
        self.step()
        self.gather([0.0])

    def step(self) -> Sequence[int]:
        """Run forward and backward. Return the routed tokens of each expert computed on this rank."""
        rows, plan = self._dispatcher.dispatch(self._x, self._routing_map)
        y = self._experts(ExpertInput(rows, plan.tokens_per_expert, migration=self._dispatcher.migration(plan)))
        y = self._dispatcher.combine(y, plan)
        torch.autograd.backward(y, y.detach())
        for leaf in (*self._experts.parameters(), self._x, self._routing_map.probs_TK):
            leaf.grad = None
        rows_per_expert: Sequence[int] = plan.tokens_per_expert
        return rows_per_expert

    def num_received_experts(self, rows_per_expert: Sequence[int]) -> int:
        """Return the number of experts received from other ranks."""
        return len(rows_per_expert) - self._num_local_experts

    def gather(self, numbers: Sequence[float]) -> Tensor:
        """Gather numbers from all ranks, [ranks, numbers]. Collective over ep."""
        return all_gather(torch.tensor([list(numbers)], dtype=torch.float64), self.ep_group)


def skewed_choices(num_tokens: int, num_experts: int, skew: float, generator: torch.Generator) -> Tensor:
    """Return one expert per token, int64 [T, 1], in random order: expert 0 with fraction `skew`, else round-robin."""
    token = torch.arange(num_tokens)
    ids = torch.where(token < round(skew * num_tokens), HOT_EXPERT, 1 + token % (num_experts - 1))
    return ids[torch.randperm(num_tokens, generator=generator)].unsqueeze(1)


def _measurement(layer: _SkewedLayer, skew: float, name: str, step_s: float) -> DispatchMeasurement:
    rows_per_expert = layer.step()
    peak_bytes = min(_peak_bytes(layer) for _ in range(NUM_MEASUREMENTS))
    cpu_s = _one_rank_at_a_time(layer, lambda: _experts_cpu_s(layer.workload, rows_per_expert))
    numbers = [step_s, sum(rows_per_expert), peak_bytes, cpu_s, layer.num_received_experts(rows_per_expert)]
    all_numbers = layer.gather(numbers)
    maxima = all_numbers.amax(0).tolist()
    return DispatchMeasurement(
        skew=skew,
        dispatcher=name,
        step_s=maxima[0],
        rows=int(maxima[1]),
        mean_rows=float(all_numbers[:, 1].mean()),
        peak_bytes=int(maxima[2]),
        experts_cpu_s=maxima[3],
        experts_moved=int(all_numbers[:, 4].sum()),
    )


def _peak_bytes(layer: _SkewedLayer) -> int:
    with StorageMeter() as meter:
        layer.step()
    layer.gather([0.0])
    peak_bytes: int = meter.peak_bytes
    return peak_bytes


def _one_rank_at_a_time(layer: _SkewedLayer, function: Callable[[], float]) -> float:
    """Call a function on one rank after another, while the others wait."""
    result = 0.0
    for rank in range(layer.ep_group.size):
        if rank == layer.ep_group.rank:
            result = function()
        layer.gather([0.0])
    return result


def _experts_cpu_s(workload: SkewedWorkload, rows_per_expert: Sequence[int]) -> float:
    experts = _experts(workload, len(rows_per_expert))
    x = torch.randn(sum(rows_per_expert), workload.hidden_size, requires_grad=True)
    grad = torch.ones(x.shape)
    times_s = []
    for _ in range(1 + NUM_MEASUREMENTS):
        started_s = time.process_time()
        torch.autograd.backward(experts(ExpertInput(x, rows_per_expert)), grad)
        times_s.append(time.process_time() - started_s)
    return min(times_s)


def _experts(workload: SkewedWorkload, count: int) -> Experts:
    experts = Experts(count, workload.hidden_size, workload.ffn_hidden_size)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return experts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables. Return 0, and 2 for wrong options."""
    return run_program(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    check_counts(args, "steps", "tokens")
    for skew in args.skew:
        if not 0 <= skew <= 1:
            raise ConfigError(f"--skew {skew:g} must lie in [0, 1]: it is a fraction of the tokens")
    return spawn_ranks(partial(_measure, args), args.ranks, "cpu")


def _measure(args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("least_loaded", is_shown=rank_env.rank == 0) as progress,
    ):
        groups = ParallelGroups.create(fold(world_size=args.ranks, ep=args.ranks), device)
        rows = measure_dispatchers(
            SkewedWorkload(args.tokens, num_experts=NUM_EXPERTS), args.skew, args.steps, groups, progress.report
        )
    if rank_env.rank == 0:
        print_escaped(_json(args, rows) if args.json else _table(args, rows), flush=True)
    return 0


def _json(args: argparse.Namespace, measurements: list[DispatchMeasurement]) -> str:
    report = {"ranks": args.ranks, "tokens_per_rank": args.tokens, "steps": args.steps}
    return json.dumps(report | {"measurements": [asdict(measurement) for measurement in measurements]})


def _table(args: argparse.Namespace, measurements: list[DispatchMeasurement]) -> str:
    lines = [
        f"{args.ranks} ranks, {args.tokens} tokens each, {NUM_EXPERTS} experts, top-1, float32, medians of "
        f"{args.steps} steps in turn, after 2",
        "maximum over the ranks; experts: forward and backward while the other ranks wait",
        "",
        "hot expert  dispatcher   step ms  rows  rows/mean  peak MiB   experts CPU ms  loans",
    ]
    for row in measurements:
        lines.append(
            f"{row.skew:9.0%}   {row.dispatcher:11} {row.step_s * 1e3:8.1f} {row.rows:5}  "
            f"{row.rows / row.mean_rows:9.2f}  {row.peak_bytes / MIB:8.1f}  "
            f"{row.experts_cpu_s * 1e3:16.1f}  {row.experts_moved:5}"
        )
    lines += ["", "leastloaded against alltoall", "hot expert  step time  peak memory  experts CPU"]
    for plain, ours in zip(measurements[::2], measurements[1::2], strict=True):
        ratios = (plain.step_s / ours.step_s, plain.peak_bytes / ours.peak_bytes)
        cpu = plain.experts_cpu_s / ours.experts_cpu_s
        lines.append(f"{plain.skew:9.0%}   {ratios[0]:8.2f}x  {ratios[1]:10.2f}x  {cpu:10.2f}x")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.least_loaded",
        description="Time one MoE layer, forward and backward, on CPU ranks when one expert receives most of the "
        "tokens: parallel.dispatcher=leastloaded compared with alltoall. Ranks that share cores also use the idle "
        "ranks' time: there the step time differs less than the rows and the CPU time of the experts do.",
    )
    parser.add_argument("--ranks", type=int, choices=NUM_RANKS, default=4, help="ranks of ep (default 4)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per rank (default 1024)")
    parser.add_argument(
        "--skew",
        type=float,
        nargs="+",
        default=[0.3, 0.5, 0.8, 0.95],
        metavar="PART",
        help="fractions of the tokens that one expert receives (default 0.3 0.5 0.8 0.95)",
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
