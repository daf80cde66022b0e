"""Benchmark of context parallelism on packed documents: core attention and whole training step, by kind of context."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefold.bench.timing import time_interleaved
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.torch_compat import (
    TorchDispatchMode,
    operator_name,
    process_group_rank,
    process_group_size,
    tree_leaves,
)
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler
from moefold.model.attention import SelfAttention
from moefold.parallel.parallelize import parallelize
from moefold.planner.lengths.samples import SampleLengths
from moefold.progress import ProgressCallback, ignore_progress
from moefold.topology.layout import Layout
from moefold.train.batch import BatchSharder
from moefold.train.train_step import TrainingStep

CONTEXT_METHODS: Mapping[str, Mapping[str, Any]] = {
    "ring": {"context": "ring"},
    "allgather": {"context": "allgather"},
    "ulysses": {"context": "ulysses"},
    "planned, home": {"context": "planned"},
    "planned, balanced": {"context": "planned", "attention_hosts": "balanced"},
}
"""Keys of the recipe's [parallel] section, by the name of the method."""

MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 256,
    "layer_pattern": "M",
    "num_experts": 16,
    "top_k": 2,
    "moe_ffn_hidden_size": 256,
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
    """Bytes that the rank with the most sends for `attention_s`."""
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
        device: of this rank.
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
        self._batch = BatchSharder(sampler, cfg.run, cfg.model, cfg.parallel, cfg.train, groups, model.positions).batch(
            0
        )
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


class SentBytesCounter(TorchDispatchMode):
    """Dispatch mode that sums the bytes which this process sends to others in collectives and messages.

    Attributes:
        sent_bytes: bytes sent so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the bytes of one of c10d."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent_bytes += self._sent_bytes(operator_name(func), args)
        return result

    def _sent_bytes(self, name: str, args: tuple[Any, ...]) -> float:
        if name.startswith(("recv", "barrier", "monitored_barrier")):
            return 0.0
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if name == "send":
            return float(sum(x.nbytes for x in tensors))
        size = process_group_size(args)
        if name == "alltoall_base_" and args[4]:
            rows = tensors[1]
            own = args[4][process_group_rank(args)]
            return float(rows.nbytes - own * rows[:1].nbytes)
        return sent_bytes(name, args, size)


def sent_bytes(name: str, args: tuple[Any, ...], size: int) -> float:
    """Return the bytes that a rank sends in a collective of c10d, to others than itself."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    others = (size - 1) / size
    if "alltoall" in name:
        return tensors[1].nbytes * others
    if "allgather" in name:
        return tensors[1].nbytes * (size - 1)
    if "reduce_scatter" in name:
        return tensors[1].nbytes * others
    return 2 * tensors[0].nbytes * others
