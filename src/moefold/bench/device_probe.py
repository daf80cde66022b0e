"""Measurements of `moefold probe`: the rates of one rank while all ranks of the machine compute or communicate.

Every time is the median of some rounds. Over the ranks, a compute time is the median and a collective's time is the
maximum, because ready ranks wait for the last rank.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from moefold.bench.device_fit import AttentionTime, CollectiveTime, DeviceMeasurements, ExpertsTime, GemmTime
from moefold.bench.timing import synchronized
from moefold.comm.collectives import all_gather, all_to_all
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.schema import Config
from moefold.host.memory import physical_bytes
from moefold.model.attention import CausalAttention
from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts
from moefold.model.transformer import TORCH_DTYPES
from moefold.parallel.kernels.select import select_kernels
from moefold.parallel.kernels.selected import SelectedKernels
from moefold.parallel.kernels.timed import settle_choices
from moefold.progress import ProgressCallback, ignore_progress
from moefold.topology.layout import fold
from moefold.units import GIB

MIN_TIMED_S = 0.02
"""Repetitions of one operation are timed together until they take this long."""
MAX_REPETITIONS = 1000
NUM_LAUNCHES = 1000
HEAD_SIZE = 128


@dataclass(frozen=True)
class ProbeSizes:
    """Sizes of the measured operations."""

    copy_bytes: int
    gemms: tuple[tuple[int, int, int], ...]
    """Sizes of the GEMMs, (rows, columns, depth)."""
    seq_lens: tuple[int, ...]
    attention_tokens: int
    """Tokens of one attention call, over all its sequences."""
    heads: int
    experts: tuple[int, int, int, int]
    """Sizes of the experts, (rows, hidden size, inner width, experts)."""
    collective_bytes: tuple[int, ...]


SIZES = {
    "cpu": ProbeSizes(
        copy_bytes=1 << 26,
        gemms=((512, 512, 64), (512, 512, 512), (256, 1024, 256), (1024, 256, 1024)),
        seq_lens=(256, 512, 1024),
        attention_tokens=1024,
        heads=4,
        experts=(2048, 256, 512, 8),
        collective_bytes=(1 << 12, 1 << 16, 1 << 20, 1 << 23),
    ),
    "cuda": ProbeSizes(
        copy_bytes=1 << 30,
        gemms=((8192, 8192, 512), (8192, 4096, 1024), (8192, 8192, 2048), (4096, 8192, 4096), (8192, 8192, 8192)),
        seq_lens=(2048, 4096, 16384),
        attention_tokens=16384,
        heads=32,
        experts=(32768, 4096, 2048, 8),
        collective_bytes=(1 << 14, 1 << 20, 1 << 24, 1 << 28),
    ),
}


class DeviceProbe:
    """Measurements on the ranks of the default process group. It is collective, every rank runs the same methods.

    Args:
        dtype: compute type of attention and experts: "float32" or "bfloat16".
        rounds: timed rounds of each operation.
        on_progress: called with the name of each part.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        world_size: int,
        local_ranks: int,
        rounds: int,
        sizes: ProbeSizes,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._local_ranks = local_ranks
        self._rounds = rounds
        self._sizes = sizes
        self._on_progress = on_progress
        self._world_size = world_size
        self._world = self._groups(tp=1).world
        cfg = Config()
        settings: dict[str, Any] = {"device": device.type, "dtype": dtype}
        run = replace(cfg.run, **settings)
        self._kernels: SelectedKernels = select_kernels(replace(cfg, run=run), device)
        self.kernel_message = ""
        """The kernels that were chosen by time, and the file that records them, on rank 0."""

    @torch.no_grad()
    def measure(self) -> DeviceMeasurements:
        """Measure everything. The result is equal on every rank."""
        is_cuda = self._device.type == "cuda"
        self._on_progress("copies and launches")
        gap_s, launch_s = self._launch_times()
        copy_s = self._copy_bytes_per_s()
        host_s = self._host_bytes_per_s() if is_cuda else None
        self._on_progress("GEMMs")
        gemms = tuple(self._gemm_times())
        self._on_progress("attention")
        attention = tuple(self._attention_times())
        self._on_progress("experts")
        experts = self._experts_time()
        self.kernel_message = settle_choices(self._kernels.autotuner, self._device, self._world)
        self._on_progress("collectives")
        return DeviceMeasurements(
            dtype=self._dtype,
            memory_gib=self._memory_gib(),
            copy_bytes_per_s=copy_s,
            host_bytes_per_s=host_s,
            multiprocessors=torch.cuda.get_device_properties(self._device).multi_processor_count if is_cuda else None,
            kernel_gap_s=gap_s,
            host_launch_s=launch_s,
            gemms=gemms,
            attention=attention,
            experts=experts,
            local_ranks=self._local_ranks,
            collectives=tuple(self._collective_times()),
        )

    def _memory_gib(self) -> float:
        """Return the memory that one rank can allocate."""
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            return self._median((free_bytes + torch.cuda.memory_reserved(self._device)) / GIB)
        return physical_bytes() / GIB / self._local_ranks

    def _copy_bytes_per_s(self) -> float:
        source = torch.zeros(self._sizes.copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * self._sizes.copy_bytes / self._seconds(lambda: target.copy_(source))

    def _host_bytes_per_s(self) -> float:
        source = torch.zeros(self._sizes.copy_bytes // 4, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=self._device)
        return len(source) / self._seconds(lambda: target.copy_(source, non_blocking=True))

    def _launch_times(self) -> tuple[float, float]:
        """Return the device seconds of a small kernel while the host is ahead, and the host seconds of its launch."""
        small = torch.zeros(16, device=self._device)

        def launches() -> None:
            for _ in range(NUM_LAUNCHES):
                small.add_(1.0)

        launches()
        if self._device.type != "cuda":
            launch_s = self._seconds(launches) / NUM_LAUNCHES
            return launch_s, launch_s
        size = 8192
        ahead = torch.zeros(size, size, device=self._device, dtype=torch.bfloat16)
        gaps = []
        hosts = []
        for _ in range(self._rounds):
            torch.cuda.synchronize(self._device)
            started_s = time.perf_counter()
            launches()
            hosts.append(time.perf_counter() - started_s)
            # The device is busy while the host queues all the small kernels.
            for _ in range(ceil(4 * hosts[0] / 1e-3)):
                torch.mm(ahead, ahead)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            launches()
            events[1].record()
            torch.cuda.synchronize(self._device)
            gaps.append(events[0].elapsed_time(events[1]) * 1e-3)
        gap_s, launch_s = (self._median(statistics.median(times) / NUM_LAUNCHES) for times in (gaps, hosts))
        return gap_s, launch_s

    def _gemm_times(self) -> Iterator[GemmTime]:
        gemm = self._kernels.gemm
        for dtype in dict.fromkeys((self._dtype, "bfloat16", "float32")):
            for rows, columns, depth in self._sizes.gemms:
                x = self._random(rows, depth, dtype=dtype)
                w = self._random(columns, depth, dtype=dtype)
                yield GemmTime(dtype, rows, columns, depth, self._seconds(partial(gemm.matmul, x, w)))

    @torch.enable_grad()
    def _attention_times(self) -> Iterator[AttentionTime]:
        attention = CausalAttention()
        attention.kernel = self._kernels.attention
        attention.tuner = self._kernels.autotuner
        heads = self._sizes.heads
        for seq_len in self._sizes.seq_lens:
            samples = max(1, self._sizes.attention_tokens // seq_len)
            q, k, v = (self._random(seq_len, samples, heads, HEAD_SIZE).requires_grad_() for _ in range(3))
            out = attention(q, k, v)
            grad = self._random(*out.shape)
            forward_s = self._seconds(partial(attention, q, k, v))
            backward_s = self._seconds(partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
            yield AttentionTime(samples, seq_len, heads, HEAD_SIZE, forward_s, backward_s)

    @torch.enable_grad()
    def _experts_time(self) -> ExpertsTime:
        rows, hidden, width, num_experts = self._sizes.experts
        experts = Experts(num_experts, hidden, width).to(device=self._device, dtype=TORCH_DTYPES[self._dtype])
        experts.ops = self._kernels.expert_ops
        experts.activation = self._kernels.expert_activation or experts.activation
        weights = list(experts.parameters())
        for weight in weights:
            torch.nn.init.normal_(weight, std=0.02)
        x = self._random(rows, hidden).requires_grad_()
        grad = self._random(rows, hidden)
        counts = [rows // num_experts] * num_experts

        def step() -> None:
            torch.autograd.grad(experts(ExpertInput(x, counts)), [x, *weights], grad)

        return ExpertsTime(rows, hidden, width, num_experts, self._seconds(step))

    def _collective_times(self) -> Iterator[CollectiveTime]:
        for size, stride, group in self._rank_groups():
            for num_bytes in self._sizes.collective_bytes:
                shard = torch.zeros(ceil(num_bytes / size), dtype=torch.uint8, device=self._device)
                send_buffer = torch.zeros(len(shard) * size, dtype=torch.uint8, device=self._device)
                splits = [len(shard)] * size
                gather_s = self._seconds(partial(all_gather, shard, group), is_collective=True)
                yield CollectiveTime("all-gather", size, stride, len(send_buffer), gather_s)
                exchange_s = self._seconds(partial(all_to_all, send_buffer, group, splits, splits), is_collective=True)
                yield CollectiveTime("all-to-all", size, stride, len(send_buffer), exchange_s)

    def _rank_groups(self) -> Iterator[tuple[int, int, Group]]:
        """Yield (size, stride, group of this rank): powers of two within a machine, and one rank of each machine."""
        size = 2
        while size <= self._local_ranks and self._local_ranks % size == 0:
            yield size, 1, self._groups(tp=size).attn.tp
            size *= 2
        machines = self._world_size // self._local_ranks
        if machines > 1:
            yield machines, self._local_ranks, self._groups(tp=self._local_ranks).attn.dp

    def _groups(self, tp: int) -> ParallelGroups:
        return ParallelGroups.create(fold(world_size=self._world_size, tp=tp), self._device)

    def _random(self, *shape: int, dtype: str | None = None) -> Tensor:
        return torch.randn(*shape, device=self._device).to(TORCH_DTYPES[dtype or self._dtype])

    def _seconds(self, operation: Callable[[], object], *, is_collective: bool = False) -> float:
        """Return the seconds of an operation, with the same number of repetitions on every rank after a barrier."""
        operation()
        once_s = self._all(self._elapsed_s(operation, 1)).max().item()
        repetitions = min(MAX_REPETITIONS, max(1, ceil(MIN_TIMED_S / once_s)))
        median_s = statistics.median(self._elapsed_s(operation, repetitions) for _ in range(self._rounds)) / repetitions
        times = self._all(median_s)
        return float(times.max() if is_collective else times.median())

    def _elapsed_s(self, operation: Callable[[], object], repetitions: int) -> float:
        def repeated() -> None:
            for _ in range(repetitions):
                operation()

        run = synchronized(repeated, self._device)
        # A barrier, which also waits for this device.
        self._all(0.0)
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s

    def _median(self, value: float) -> float:
        return float(self._all(value).median())

    def _all(self, value: float) -> Tensor:
        """Return the values of all ranks, float64 on the CPU."""
        return all_gather(torch.tensor([value], dtype=torch.float64, device=self._device), self._world).cpu()
