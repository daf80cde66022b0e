"""Per-rank profile of a training step: CPU time of GEMMs, attention, other tensor ops, communication and Python.

It measures CPU time, not wall time, because ranks share cores and wait for each other. Operations are timed one by one
in separate steps, so that the overhead of timing is not included in the totals.

`python -m benchmarks.rank_times --help` explains the options.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks.program import add_report_options, check_counts, check_report_options, run_program, write_report
from benchmarks.torch_operators import operator_name
from moefold.cli.command_parser import CommandParser
from moefold.comm.collectives import all_gather
from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import TorchDispatchMode
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.dataset import DataRequest
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import choose_device, init_distributed, spawn_ranks
from moefold.model.attention import CausalAttention
from moefold.model.kernels import Kernels
from moefold.model.linear import UnquantizedLinear
from moefold.model.transformer import Transformer
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.cpu.gemm import CGemm
from moefold.ops.cpu.swiglu import CSwiGLU
from moefold.parallel.parallelize import parallelize
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress
from moefold.recipe import load_config
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config

FOLDED_MAPPING = ("parallel.world_size=8", "parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=4")
DEFAULT_OVERRIDES = (
    "model.preset=quickstart",
    *FOLDED_MAPPING,
    "run.device=cpu",
    "run.dtype=float32",
    "train.seq_len=256",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
)
MS_PER_S = 1e3
GEMMS = "GEMMs"
ATTENTION = "attention"
TENSOR_OPS = "other tensor work"
COMMUNICATION = "communication"
PYTHON = "Python"
CATEGORIES = (GEMMS, ATTENTION, TENSOR_OPS, COMMUNICATION, PYTHON)
GEMM_OPS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_linear_pointwise", "_grouped_mm", "linear")
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class RankCpuTimes:
    """Times of one rank's step in seconds, medians over the steps."""

    cpu_s: dict[str, float]
    """CPU time of each of `CATEGORIES`."""
    wall_s: float
    """Wall time."""
    thread_s: float
    """CPU time of the training thread; for the rest of `wall_s` it waited for other ranks or for a core."""


def measure_ranks(
    cfg: Config, groups: ParallelGroups, steps: int, on_progress: ProgressCallback = ignore_progress
) -> list[RankCpuTimes]:
    """Train some steps and return the times of each rank. Collective; the result is equal on every rank."""
    on_progress("building the model")
    trainer = _RankTrainer(cfg, groups)
    on_progress("first steps")
    for _ in range(2):
        trainer.step()
    untimed = []
    timed = []
    for i in range(steps):
        on_progress(f"step {i + 1} of {steps}, twice each")
        untimed.append(trainer.step())
        with OpCpuTimer() as trainer.timer:
            trainer.step()
        timed.append(trainer.timer.cpu_s)
        trainer.timer = None
    wall_s, thread_s, process_s = (statistics.median(column) for column in zip(*untimed, strict=True))
    op_s = {kind: statistics.median(cpu_s[kind] for cpu_s in timed) for kind in CATEGORIES[:-1]}
    python_s = max(0.0, thread_s - sum(op_s.values()))
    # The other threads of the process are gloo's.
    op_s[COMMUNICATION] += max(0.0, process_s - thread_s)
    own_s = torch.tensor([*op_s.values(), python_s, wall_s, thread_s], dtype=torch.float64, device=groups.device)
    rows = all_gather(own_s.unsqueeze(0), groups.world).tolist()
    return [RankCpuTimes(dict(zip(CATEGORIES, row[:5], strict=True)), row[5], row[6]) for row in rows]


def time_shares(ranks: list[RankCpuTimes]) -> dict[str, float]:
    """Return the fraction of each category in the CPU time of all ranks."""
    totals = {kind: sum(rank.cpu_s[kind] for rank in ranks) for kind in CATEGORIES}
    total_s = sum(totals.values())
    return {kind: category_s / total_s for kind, category_s in totals.items()}


class OpCpuTimer(TorchDispatchMode):
    """Dispatch mode that sums the CPU time of every operation of this thread by category, in `cpu_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s = dict.fromkeys(CATEGORIES, 0.0)

    def time_call(self, category: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call that is not dispatched by torch, and add its time without the time of operations inside it."""
        before_s = sum(self.cpu_s.values())
        started_s = time.thread_time()
        result = compute(*args, **kwargs)
        self.cpu_s[category] += max(0.0, time.thread_time() - started_s - (sum(self.cpu_s.values()) - before_s))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and time an operation."""
        if DTensor in types:
            # DTensor redispatches on its local tensors, which are timed.
            return NotImplemented
        started_s = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.cpu_s[op_category(func.namespace, operator_name(func))] += time.thread_time() - started_s
        return result


def op_category(namespace: str, name: str) -> str:
    """Return the category of an operation."""
    if namespace in COLLECTIVE_NAMESPACES:
        return COMMUNICATION
    if name in GEMM_OPS:
        return GEMMS
    return ATTENTION if name.startswith("_scaled_dot_product") else TENSOR_OPS


class _TimedKernel:
    """Wrapper of a C kernel that times its calls while the trainer has a timer."""

    def __init__(self, kernel: Any, category: str, rank: "_RankTrainer") -> None:
        self._kernel = kernel
        self._category = category
        self._rank = rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel, timed if the trainer has a timer."""
        if self._rank.timer is None:
            return self._kernel(*args, **kwargs)
        return self._rank.timer.time_call(self._category, self._kernel, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the kernel; its forward and backward are timed."""
        attribute = getattr(self._kernel, name)
        if name not in ("forward", "backward") or self._rank.timer is None:
            return attribute
        return partial(self._rank.timer.time_call, self._category, attribute)


class _TimedGemm(CGemm):
    """C GEMM that times its calls while the trainer has a timer."""

    def __init__(self, rank: "_RankTrainer") -> None:
        self._rank = rank
        super().__init__()

    def _multiply(self, *args: Any, **kwargs: Any) -> None:
        if self._rank.timer is None:
            super()._multiply(*args, **kwargs)
        else:
            self._rank.timer.time_call(GEMMS, super()._multiply, *args, **kwargs)


class _RankTrainer:
    """Training of this rank with wrapped kernels."""

    timer: OpCpuTimer | None = None
    """Active timer, if any."""

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        model = parallelize(cfg, groups)
        self._gemm: CGemm | None = None
        data = DataRequest.of(cfg).open()
        for stage in model.stages:
            self._wrap_kernels(stage)
        self._training = TrainingStep(model, cfg)
        self._batches = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
        self._batch_size = cfg.train.global_batch_size
        self._num_steps = 0

    def _wrap_kernels(self, stage: Transformer) -> None:
        module: Any
        for module in stage.modules():
            if isinstance(getattr(module, "gemm", None), CGemm):
                module.gemm = self._timed_gemm
            core = getattr(module, "core_attention", None)
            if isinstance(core, CausalAttention) and core.kernel is not None:
                core.kernel = _TimedKernel(core.kernel, ATTENTION, self)
            if isinstance(getattr(module, "kernels", None), Kernels):
                module.kernels = self._timed_kernels(module.kernels)
        for layer in stage.moe_layers().values():
            expert_ops = layer.experts.ops
            if isinstance(expert_ops, SequentialExpertOps) and isinstance(expert_ops.gemm, CGemm):
                layer.experts.ops = SequentialExpertOps(self._timed_gemm)
            if isinstance(layer.experts.activation, CSwiGLU):
                layer.experts.activation = _TimedKernel(layer.experts.activation, TENSOR_OPS, self)
        if stage.rope is not None and stage.rope.kernel is not None:
            stage.rope = replace(stage.rope, kernel=_TimedKernel(stage.rope.kernel, TENSOR_OPS, self))

    def _timed_kernels(self, kernels: Kernels) -> Kernels:
        linear_backend = kernels.linear_backend
        if isinstance(linear_backend, UnquantizedLinear) and isinstance(linear_backend.gemm, CGemm):
            linear_backend = UnquantizedLinear(self._timed_gemm)
        norm: Any = None if kernels.norm is None else _TimedKernel(kernels.norm, TENSOR_OPS, self)
        return replace(kernels, linear_backend=linear_backend, norm=norm)

    @property
    def _timed_gemm(self) -> CGemm:
        """Timed GEMM, shared by all layers as they share its buffers."""
        self._gemm = self._gemm or _TimedGemm(self)
        return self._gemm

    def step(self) -> tuple[float, float, float]:
        """Run one step; return (wall time, CPU time of this thread, of all threads), without data loading."""
        batch = self._batches.batch(self._num_steps * self._batch_size)
        self._num_steps += 1
        started = time.perf_counter(), time.thread_time(), time.process_time()
        self._training.run(batch, self._num_steps)
        return (
            time.perf_counter() - started[0],
            time.thread_time() - started[1],
            time.process_time() - started[2],
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; return 0, and 2 for wrong options."""
    return run_program(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    check_counts(args, "steps")
    check_report_options(args)
    words = list(args.words)
    recipe = Path(words.pop(0)) if words and "=" not in words[0] else None
    cfg = load_config(recipe, [*(() if recipe else DEFAULT_OVERRIDES), "data.kind=synthetic", *words])
    check_config(cfg)
    if cfg.run.device == "cuda" or choose_device(cfg.run.device, cfg.parallel.world_size, None) != "cpu":
        raise ConfigError(f"this benchmark counts CPU time, and run.device={cfg.run.device!r}; set run.device=cpu")
    return spawn_ranks(partial(_measure, cfg, args), cfg.parallel.world_size, "cpu")


def _measure(cfg: Config, args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type, cfg.faults.timeout_s) as device,
        WorkProgress("rank_times", is_shown=rank_env.rank == 0) as progress,
    ):
        times = measure_ranks(cfg, ParallelGroups.create(check_config(cfg), device), args.steps, progress.report)
    if rank_env.rank == 0:
        shares = time_shares(times)
        report = {
            "kind": "ranks",
            "steps": args.steps,
            "tokens": cfg.train.tokens_per_step,
            "shares": shares,
            "step_s": max(rank.wall_s for rank in times),
            "per_rank": [rank.cpu_s for rank in times],
            "waiting_s": [rank.wall_s - rank.thread_s for rank in times],
        }
        write_report(args, report, _table(cfg.run, cfg.parallel, cfg.train, args, times, shares))
    return 0


def _table(
    run: RunConfig,
    p: ParallelConfig,
    train: TrainConfig,
    args: argparse.Namespace,
    ranks: list[RankCpuTimes],
    time_shares: dict[str, float],
) -> str:
    kinds = list(time_shares)
    lines = [
        f"{p.world_size} ranks, tp={p.tp} cp={p.cp} pp={p.pp} ep={p.ep} etp={p.etp}, "
        f"{train.tokens_per_step:,} tokens a step, {run.dtype}; CPU time in ms, medians of {args.steps} steps after 2",
        "rank  " + "".join(f"{kind:>18}" for kind in (*kinds, "waiting", "step by the clock")),
    ]
    for i, rank in enumerate(ranks):
        numbers = (*rank.cpu_s.values(), rank.wall_s - rank.thread_s, rank.wall_s)
        lines.append(f"{i:4}  " + "".join(f"{seconds * MS_PER_S:18.1f}" for seconds in numbers))
    lines.append(" all  " + "".join(f"{share:18.1%}" for share in time_shares.values()))
    outside = time_shares["communication"] + time_shares["Python"]
    lines.append(f"communication and Python: {outside:.1%} of the CPU time of a step")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.rank_times",
        description="Train some steps on CPU ranks and break the CPU time of each rank down: matrix products, "
        "attention, other tensor work, communication (gloo's threads and the calls), Python and the rest. Without a "
        "recipe: the quickstart's model on eight ranks, tp=2 cp=2 pp=2 and ep=4. Data are random tokens.",
    )
    parser.add_argument("words", nargs="*", metavar="[RECIPE.toml] section.key=value", help="what to train")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each of two kinds (default 5)")
    add_report_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
