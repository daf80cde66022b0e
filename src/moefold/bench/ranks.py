"""Where the ranks of a recipe spend a step: CPU time of products, attention, other tensor work, communication, Python.

CPU time and not the clock: ranks share cores, and wait for each other and for other work. Operations are timed in steps
of their own, one by one, so that what the timing costs is in none of the numbers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.kernels.c_gate import CGate
from moefold.kernels.c_product import CGemm
from moefold.model.core_attention import CausalAttention
from moefold.model.linear import FullProducts
from moefold.model.norm import RMSNorm
from moefold.model.transformer import Transformer
from moefold.parallel.collectives import all_gather
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import TrainingStep
from moefold.work_progress import Say, say_nothing

GEMMS, ATTENTION, TENSORS, COMMUNICATION, PYTHON = "GEMMs", "attention", "other tensor work", "communication", "Python"
KINDS = (GEMMS, ATTENTION, TENSORS, COMMUNICATION, PYTHON)
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_linear_pointwise", "_grouped_mm", "linear")
COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class RankTimes:
    """One rank's step, in seconds: medians over the steps."""

    cpu_s: dict[str, float]
    """CPU time of each of `KINDS`."""
    wall_s: float
    """By the clock."""
    thread_s: float
    """CPU time of the thread that trains; the rest of `wall_s` it waited, for others or for a core."""


def measure_ranks(cfg: Config, groups: ParallelGroups, steps: int, say: Say = say_nothing) -> list[RankTimes]:
    """Train some steps and say what each rank spent on them; the same answer on every rank. Collective."""
    say("building the model")
    rank = _Rank(cfg, groups)
    say("first steps")
    for _ in range(2):
        rank.step()
    plain, timed = [], []
    for i in range(steps):
        say(f"step {i + 1} of {steps}, twice each")
        plain.append(rank.step())
        with OperationClock() as rank.clock:
            rank.step()
        timed.append(rank.clock.cpu_s)
        rank.clock = None
    wall_s, thread_s, process_s = (statistics.median(column) for column in zip(*plain, strict=True))
    inside = {kind: statistics.median(found[kind] for found in timed) for kind in KINDS[:-1]}
    python_s = max(0.0, thread_s - sum(inside.values()))
    # Threads beside the one that trains: those of gloo.
    inside[COMMUNICATION] += max(0.0, process_s - thread_s)
    mine = torch.tensor([*inside.values(), python_s, wall_s, thread_s], dtype=torch.float64, device=groups.device)
    rows = all_gather(mine.unsqueeze(0), groups.world).tolist()
    return [RankTimes(dict(zip(KINDS, row[:5], strict=True)), row[5], row[6]) for row in rows]


def shares(ranks: list[RankTimes]) -> dict[str, float]:
    """Part of each kind of the CPU time of all ranks."""
    totals = {kind: sum(rank.cpu_s[kind] for rank in ranks) for kind in KINDS}
    everything = sum(totals.values())
    return {kind: total / everything for kind, total in totals.items()}


def slowest_s(ranks: list[RankTimes]) -> float:
    """The step by the clock."""
    return max(rank.wall_s for rank in ranks)


class OperationClock(TorchDispatchMode):
    """Inside, adds up the CPU time of every operation of this thread by its kind, in `cpu_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s = dict.fromkeys(KINDS, 0.0)

    def charge(self, kind: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what torch does not see, and count its time beside that of the operations in it."""
        before_s, started_s = sum(self.cpu_s.values()), time.thread_time()
        result = compute(*args, **kwargs)
        self.cpu_s[kind] += max(0.0, time.thread_time() - started_s - (sum(self.cpu_s.values()) - before_s))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at the clock."""
        if DTensor in types:
            # It takes itself apart, and its local operations come here.
            return NotImplemented
        started_s = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.cpu_s[kind_of(func.namespace, func._schema.name.split("::")[1])] += time.thread_time() - started_s
        return result


def kind_of(namespace: str, name: str) -> str:
    """What an operation counts as."""
    if namespace in COLLECTIVES:
        return COMMUNICATION
    if name in PRODUCTS:
        return GEMMS
    return ATTENTION if name.startswith("_scaled_dot_product") else TENSORS


class _Charged:
    """A kernel in C, whose time counts while a clock is there."""

    def __init__(self, kernel: Any, kind: str, rank: "_Rank") -> None:
        self._kernel, self._kind, self._rank = kernel, kind, rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel."""
        if self._rank.clock is None:
            return self._kernel(*args, **kwargs)
        return self._rank.clock.charge(self._kind, self._kernel, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Of the kernel."""
        found = getattr(self._kernel, name)
        if name not in ("forward", "backward") or self._rank.clock is None:
            return found
        return partial(self._rank.clock.charge, self._kind, found)


class _ChargedGemm(CGemm):
    """The same of products in C."""

    def __init__(self, rank: "_Rank") -> None:
        self._rank = rank
        super().__init__()

    def _multiply(self, *args: Any, **kwargs: Any) -> None:
        if self._rank.clock is None:
            super()._multiply(*args, **kwargs)
        else:
            self._rank.clock.charge(GEMMS, super()._multiply, *args, **kwargs)


class _Rank:
    """This rank's training."""

    clock: OperationClock | None = None
    """What counts now."""

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        model = parallelize(cfg, groups)
        self._gemm: CGemm | None = None
        data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        for stage in model.stages:
            self._charge_kernels(stage)
        self._training = TrainingStep(model, cfg)
        self._batches = BatchLoader(data.train, cfg, groups, model.positions)
        self._batch_size = cfg.train.global_batch_size
        self._num_steps = 0

    def _charge_kernels(self, stage: Transformer) -> None:
        module: Any
        for module in stage.modules():
            if isinstance(getattr(module, "gemm", None), CGemm):
                module.gemm = self._charged_gemm
            products = getattr(module, "products", None)
            if isinstance(products, FullProducts) and isinstance(products.gemm, CGemm):
                module.products = FullProducts(self._charged_gemm)
            core = getattr(module, "core", None)
            if isinstance(core, CausalAttention) and core.kernel is not None:
                core.kernel = _Charged(core.kernel, ATTENTION, self)
            if isinstance(module, RMSNorm) and module.kernel is not None:
                module.kernel = _Charged(module.kernel, TENSORS, self)
        for layer in stage.moe_layers().values():
            if isinstance(layer.experts.gate, CGate):
                layer.experts.gate = _Charged(layer.experts.gate, TENSORS, self)
        if stage.rotation is not None and stage.rotation.kernel is not None:
            stage.rotation = replace(stage.rotation, kernel=_Charged(stage.rotation.kernel, TENSORS, self))

    @property
    def _charged_gemm(self) -> CGemm:
        """One for all layers: they share its memory."""
        self._gemm = self._gemm or _ChargedGemm(self)
        return self._gemm

    def step(self) -> tuple[float, float, float]:
        """Train once: (clock, CPU time of this thread, of all threads), without the loading of data."""
        batch = self._batches.batch(self._num_steps * self._batch_size)
        self._num_steps += 1
        started = time.perf_counter(), time.thread_time(), time.process_time()
        self._training.run(batch, self._num_steps)
        return (
            time.perf_counter() - started[0],
            time.thread_time() - started[1],
            time.process_time() - started[2],
        )
