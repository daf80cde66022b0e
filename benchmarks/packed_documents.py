"""Time context parallelism on packed documents: core attention and whole training step, by kind of context.

`python -m benchmarks.packed_documents --help` explains the options.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.program import add_report_options, check_counts, check_report_options, run_program, write_report
from benchmarks.sent_bytes import SentBytesCounter
from moefold.bench.timing import describe_device, time_interleaved
from moefold.cli.command_parser import CommandParser
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.base.limits import MAX_MICRO_BATCHES, check_at_most
from moefold.config.keys.annotations import max_integer
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.model.attention import SelfAttention
from moefold.parallel.parallelize import parallelize
from moefold.planner.lengths.distribution import histogram_names, load_distribution
from moefold.planner.lengths.samples import SampleLengths, StreamedSamples, effective_length
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress
from moefold.topology.layout import Layout, fold
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep

MAX_RANKS = 64
"""Most ranks: each is a process on this machine."""
MAX_SEED = 2**32 - 1
"""Largest seed that numpy takes."""
MS_PER_S = 1e3
MIB = 2**20
CONTEXT_METHODS: Mapping[str, Mapping[str, Any]] = {
    "ring": {"context": "ring"},
    "allgather": {"context": "allgather"},
    "ulysses": {"context": "ulysses"},
    "planned, home": {"context": "planned"},
    "planned, balanced": {"context": {"kind": "planned", "hosts": "balanced"}},
}
"""Keys of the recipe's [parallel] section, by the name of the method."""

MODEL = {
    "layers": 2,
    "hidden_size": 256,
    "attention.num_heads": 4,
    "attention.num_kv_heads": 2,
    "vocab_size": 256,
    "ffn.moe.num_experts": 16,
    "ffn.moe.top_k": 2,
    "ffn.moe.intermediate_size": 256,
}
"""The model: small experts, so that a CPU computes a step of some thousand tokens in a second."""
WARMUP = 1


@dataclass(frozen=True)
class MethodTime:
    """Measurements of one kind of context; medians over the rounds."""

    method: str
    attention_s: float
    """Core attention of one layer, forward and backward, of all micro-batches, until the last rank has finished."""
    busiest_cpu_s: float
    """CPU time of the busiest rank's thread in it: the critical path if each rank had its own core and communication
    were free."""
    mean_cpu_s: float
    """CPU time of a rank's thread in it, mean over the ranks."""
    step_s: float
    """Training step until the last rank has finished."""
    sent_bytes: float
    """Bytes of the rank that sends most for `attention_s`."""
    attention_rounds_s: list[float]
    step_rounds_s: list[float]


def documents_config(seq_len: int, micro_batches: int, cp: int, dp: int, method: str) -> Config:
    """Return the recipe of a method: one sample a micro-batch, experts over all ranks, without tensor parallelism."""
    return config_from_dict(
        {
            "run": {"device": "cpu", "dtype": "float32", "seed": 0},
            "model": MODEL,
            "data": {"kind": "program"},
            "parallel": {"world_size": cp * dp, "cp": cp, "ep": cp * dp, **CONTEXT_METHODS[method]},
            "train": {"seq_len": seq_len, "micro_batch_size": 1, "global_batch_size": dp * micro_batches},
        }
    )


class DrawnDocuments(Sampler):
    """Samples of random tokens with documents of given lengths."""

    has_annotations = True

    def __init__(self, samples: Sequence[SampleLengths], vocab_size: int) -> None:
        self._samples = samples
        self._vocab_size = vocab_size
        self.seq_len = sum(samples[0])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index`; the sequence of samples repeats."""
        lengths = self._samples[index % len(self)]
        tokens = np.random.default_rng(index).integers(self._vocab_size, size=self.seq_len + 1)
        # The last target belongs to the last document.
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), [*lengths[:-1], lengths[-1] + 1])
        return Sample(tokens, documents)


def measure_contexts(
    samples: Sequence[SampleLengths],
    layout: Layout,
    methods: Sequence[str],
    rounds: int,
    device: torch.device,
    on_progress: ProgressCallback = ignore_progress,
) -> list[MethodTime]:
    """Time the methods on the same global batch in interleaved rounds. Collective; the result is equal on every rank.

    Args:
        samples: document lengths of the samples of the global batch.
        layout: tp = pp = 1, with the cp ranks of each sample, and ep over all ranks.
        methods: keys of `CONTEXT_METHODS`.
        rounds: timed rounds.
        device: device of this rank.
        on_progress: called with progress messages.
    """
    seq_len = sum(samples[0])
    cp = layout.cp
    dp = layout.dp
    groups = ParallelGroups.create(layout, device)
    trainers = {}
    for method in methods:
        on_progress(f"building {method}")
        cfg = documents_config(seq_len, len(samples) // dp, cp, dp, method)
        trainers[method] = _MethodTrainer(cfg, groups, samples)
    attention_s = time_interleaved(
        {method: trainer.attend for method, trainer in trainers.items()},
        warmup=WARMUP,
        rounds=rounds,
        on_progress=lambda text: on_progress(f"attention, {text}"),
    )
    cpu_s = {
        method: _cpu_of_ranks(trainer.attention_cpu_s[-rounds:], groups.world) for method, trainer in trainers.items()
    }
    sent = {method: trainer.count_sent_bytes() for method, trainer in trainers.items()}
    step_s = time_interleaved(
        {method: trainer.step for method, trainer in trainers.items()},
        warmup=WARMUP,
        rounds=rounds,
        on_progress=lambda text: on_progress(f"steps, {text}"),
    )
    return [
        MethodTime(
            method=method,
            attention_s=statistics.median(attention_s[method]),
            busiest_cpu_s=float(cpu_s[method].amax(0).median()),
            mean_cpu_s=float(cpu_s[method].mean(0).median()),
            step_s=statistics.median(step_s[method]),
            sent_bytes=_maximum(sent[method], groups.world),
            attention_rounds_s=attention_s[method],
            step_rounds_s=step_s[method],
        )
        for method in methods
    ]


def _cpu_of_ranks(seconds: Sequence[float], group: Group) -> Tensor:
    """Gather the CPU times of each rank's rounds, [ranks, rounds]. Collective."""
    return all_gather(torch.tensor([list(seconds)], dtype=torch.float64), group)


def _maximum(value: float, group: Group) -> float:
    return float(all_gather(torch.tensor([value], dtype=torch.float64), group).max())


@dataclass
class _CoreCall:
    """Arguments of one call of a core attention."""

    tensors: tuple[Tensor, ...]
    """Queries, keys and values of this rank, leaves of autograd."""
    rest: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)


class _RecordingCore:
    """Core attention that keeps the arguments of its calls; other attributes are read from the core attention."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.calls: list[_CoreCall] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **keywords: Any) -> Tensor:
        """Attend."""
        tensors = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
        self.calls.append(_CoreCall(tensors, rest, keywords))
        out: Tensor = self._core(q, k, v, *rest, **keywords)
        return out

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the core attention."""
        return getattr(self._core, name)


class _MethodTrainer:
    """Training of this rank under one kind of context."""

    def __init__(self, cfg: Config, groups: ParallelGroups, samples: Sequence[SampleLengths]) -> None:
        self._world = groups.world
        model = parallelize(cfg, groups)
        sampler = DrawnDocuments(samples, cfg.model.vocab_size)
        self._batch = BatchSharder(sampler, cfg.batch_shape, groups, model.positions).batch(0)
        self._training = TrainingStep(model, cfg)
        self._num_steps = 0
        self.attention_cpu_s: list[float] = []
        modules = [module for stage in model.stages for module in stage.modules()]
        attention = next(module for module in modules if isinstance(module, SelfAttention))
        self._core: Any = attention.core_attention
        recorder = _RecordingCore(self._core)
        attention.core_attention = recorder
        self.step()
        attention.core_attention = self._core
        self._calls = recorder.calls

    def step(self) -> None:
        """Train a step on the batch, and wait for all ranks."""
        self._num_steps += 1
        self._training.run(self._batch, self._num_steps)
        self._wait()

    def attend(self) -> None:
        """Run the core attention of a layer, forward and backward, for each micro-batch; wait for all ranks."""
        started_s = time.thread_time()
        for call in self._calls:
            out = self._core(*call.tensors, *call.rest, **call.keywords)
            torch.autograd.backward(out, torch.ones_like(out))
            for tensor in call.tensors:
                tensor.grad = None
        self.attention_cpu_s.append(time.thread_time() - started_s)
        self._wait()

    def count_sent_bytes(self) -> float:
        """Return the bytes that this rank sends in `attend`, without the bytes of the wait at its end."""
        with SentBytesCounter() as counter:
            self._wait()
        waiting = counter.sent_bytes
        with SentBytesCounter() as counter:
            self.attend()
        return counter.sent_bytes - waiting

    def _wait(self) -> None:
        all_gather(torch.zeros(1), self._world)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; return 0, and 2 for wrong options."""
    return run_program(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    check_counts(args, "steps", "seq-len", "cp", "dp", "micro-batches")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be at least 0")
    check_at_most("--seed", args.seed, MAX_SEED)
    check_at_most("--seq-len", args.seq_len, max_integer("train", "seq_len"))
    check_at_most("--cp times --dp", args.cp * args.dp, MAX_RANKS)
    check_at_most("--micro-batches", args.micro_batches, MAX_MICRO_BATCHES)
    if args.seq_len % (2 * args.cp):
        raise ConfigError(
            f"--seq-len {args.seq_len} must be a multiple of 2*cp={2 * args.cp}: ring attention gives each rank two "
            "chunks of a sample"
        )
    if args.cp not in (2, 4):
        raise ConfigError(f"--cp {args.cp} must be 2 or 4, which divides the 4 heads of the model")
    check_report_options(args)
    samples = StreamedSamples(load_distribution(args.lengths)).draw(
        args.seq_len, args.dp * args.micro_batches, args.seed
    )
    return spawn_ranks(partial(_measure, args, samples), args.cp * args.dp, "cpu")


def _measure(args: argparse.Namespace, samples: list[SampleLengths], rank_env: RankEnv, device_type: str) -> int:
    torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("packed_documents", is_shown=rank_env.rank == 0) as progress,
    ):
        ranks = args.cp * args.dp
        layout = fold(world_size=ranks, cp=args.cp, ep=ranks)
        measurements = measure_contexts(samples, layout, tuple(CONTEXT_METHODS), args.steps, device, progress.report)
        machine = describe_device(device)
    if rank_env.rank == 0:
        report = {
            "kind": "documents",
            "lengths": args.lengths,
            "seq_len": args.seq_len,
            "cp": args.cp,
            "dp": args.dp,
            "micro_batches": args.micro_batches,
            "rounds": args.steps,
            "effective_length": effective_length(samples),
            "machine": machine,
            "methods": [asdict(row) for row in measurements],
        }
        write_report(args, report, _table(args, samples, machine, measurements))
    return 0


def _table(args: argparse.Namespace, samples: list[SampleLengths], machine: str, rows: list[MethodTime]) -> str:
    documents = sum(map(len, samples))
    ring = rows[0]
    lines = [
        f"{args.cp * args.dp} ranks, cp={args.cp} dp={args.dp} ep={args.cp * args.dp}, {len(samples)} samples of "
        f"{args.seq_len:,} tokens with {documents} documents of {args.lengths} (effective length "
        f"{effective_length(samples):,.0f})",
        f"{machine} per rank; medians of {args.steps} rounds in turn after 1, until the last rank has finished",
        "attention: core attention of one layer, forward and backward, with its communication; busiest CPU: CPU time "
        "in it of the busiest rank, which is what ranks with cores of their own wait for",
        "",
        f"{'':18}  {'attention ms':>12}  {'of ring':>8}  {'busiest CPU ms':>14}  {'of ring':>8}  {'of mean':>8}  "
        f"{'step ms':>9}  {'of ring':>8}  {'sent MiB':>9}",
    ]
    for row in rows:
        lines.append(
            f"{row.method:18}  {row.attention_s * MS_PER_S:12.1f}  {row.attention_s / ring.attention_s:8.2f}  "
            f"{row.busiest_cpu_s * MS_PER_S:14.1f}  {row.busiest_cpu_s / ring.busiest_cpu_s:8.2f}  "
            f"{row.busiest_cpu_s / row.mean_cpu_s:8.2f}  "
            f"{row.step_s * MS_PER_S:9.1f}  {row.step_s / ring.step_s:8.2f}  {row.sent_bytes / MIB:9.2f}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.packed_documents",
        description="Train a small MoE model on CPU ranks with samples of packed documents, and compare the kinds of "
        "context parallelism: time of the core attention, of the whole step, and bytes sent. Experts are folded over "
        "all ranks, so every layer waits for the rank with the most attention work.",
    )
    add = parser.add_argument
    add(
        "--lengths",
        default="wikipedia",
        metavar="NAME|FILE",
        help=f"lengths of the documents: {', '.join(histogram_names())}, or a file (default wikipedia)",
    )
    add("--seq-len", type=int, default=4096, metavar="S", help="tokens per sample (default 4096)")
    add("--cp", type=int, default=4, help="ranks of a sample (default 4)")
    add("--dp", type=int, default=2, help="data-parallel ranks, of one sample at a time (default 2)")
    add("--micro-batches", type=int, default=2, metavar="N", help="micro-batches of a step (default 2)")
    add("--seed", type=int, default=0, help="seed of the lengths (default 0)")
    add("--steps", type=int, default=5, help="measured rounds (default 5)")
    add_report_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
