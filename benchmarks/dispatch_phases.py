"""Time one MoE layer by phase of its dispatch, over mappings on the ranks of this machine (arXiv:2504.14960 sec. 4.3).

`python -m benchmarks.dispatch_phases --help` explains the options.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.program import add_report_options, check_counts, check_report_options, run_program, write_report
from moefold.bench.timing import describe_device
from moefold.cli.command_parser import CommandParser
from moefold.comm.collectives import all_gather
from moefold.comm.groups import ParallelGroups
from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import DEVICE_NAMES
from moefold.launch.ranks import choose_device, init_distributed, spawn_ranks
from moefold.message_text import spelled_as
from moefold.model.moe.dispatch import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.model.transformer import TORCH_DTYPES
from moefold.parallel.expert_parallel import build_dispatcher
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress
from moefold.topology.layout import Layout, divisors, fold

MS_PER_S = 1e3
TITLES = {"etp": "ETP x EP at a fixed product", "context": "CP x EP, folded and coupled"}
PHASES = ("permute", "dispatch", "sort", "experts", "unsort", "combine", "unpermute")
"""Phases of a dispatcher with the experts between them; each is timed forward and backward."""
COUPLED_MOE_ORDER = "pp-ep-edp-etp"
"""Axis order, slowest first, of coupled EP, a subgroup of DP: the stride of EP is EDP (at least CP) ranks."""


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
    """Return coarse-grained experts, and eight times as many fine-grained experts of an eighth of the width."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; return 0, and 2 for wrong options."""
    return run_program(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    check_counts(args, "ranks", "tokens", "steps")
    if args.hidden < 64 or args.hidden % 64:
        raise ConfigError(f"--hidden {args.hidden} must be a multiple of 64: fine-grained experts have a quarter of it")
    check_report_options(args)
    with spelled_as(DEVICE_NAMES):
        device_type = choose_device(args.device, args.ranks, None)
    return spawn_ranks(partial(_measure, args), args.ranks, device_type)


def _measure(args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    if device_type == "cpu":
        torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("dispatch_phases", is_shown=rank_env.rank == 0) as progress,
    ):
        dtype = TORCH_DTYPES[args.dtype]
        bars = measure_mappings(args.ranks, args.tokens, args.hidden, args.steps, dtype, device, progress.report)
        machine = describe_device(device)
    if rank_env.rank == 0:
        report = {
            "kind": "dispatch",
            "ranks": args.ranks,
            "tokens": args.tokens,
            "hidden_size": args.hidden,
            "dtype": args.dtype,
            "rounds": args.steps,
            "machine": machine,
            "bars": [asdict(bar) for bar in bars],
        }
        write_report(args, report, _tables(args, machine, bars))
    return 0


def _tables(args: argparse.Namespace, machine: str, bars: list[MappingTime]) -> str:
    lines = [
        f"One MoE layer, forward and backward, on {args.ranks} ranks with {args.tokens:,} tokens each, "
        f"H={args.hidden}, {args.dtype}; ms, medians of {args.steps} rounds in turn after 1",
        f"{machine} per rank; parts: mean over the ranks, including waits for other ranks; all: the slowest rank",
    ]
    for study, title in TITLES.items():
        for experts in dict.fromkeys(bar.experts for bar in bars if bar.study == study):
            mine = [bar for bar in bars if (bar.study, bar.experts) == (study, experts)]
            lines += ["", f"{title}: {experts}"]
            lines.append("  " + " " * 18 + "".join(f"{part:>11}" for part in (*mine[0].parts_s, "all")))
            for bar in mine:
                numbers = "".join(f"{s * MS_PER_S:11.2f}" for s in (*bar.parts_s.values(), bar.total_s))
                lines.append(f"  {bar.name:18}{numbers}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.dispatch_phases",
        description="Time one MoE layer by part on ranks of this machine: over all ways to split them between ETP and "
        "EP, and over CP x EP with EP folded over the ranks of CP or coupled to DP, with few large experts and many "
        "small ones. Ranks of one machine are equally close: the benchmark cannot show the savings between nodes.",
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes, or GPUs (default 4)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per rank (default 1024)")
    parser.add_argument("--hidden", type=int, default=256, metavar="H", help="hidden size (default 256)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--steps", type=int, default=7, help="measured rounds (default 7)")
    add_report_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
