"""Measure how much of a layer's collectives `parallel.overlap_tp` hides, with sleeps for GEMMs and messages.

    python benchmarks/async_tp.py
    python benchmarks/async_tp.py --ranks 8 --gemm-ms 40

A GEMM sleeps in proportion to its tokens, and a message ends a fixed time after its launch: the compute of a rank hides
it meanwhile. As no rank computes for long, two cores are enough. A layer has three GEMMs after an all-gather and one
before a reduce-scatter; its backward pass has two for each of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import collectives
from moefold.comm.groups import ParallelGroups
from moefold.launch.rank_pool import WorkerPool
from moefold.model.linear import UnquantizedLinear
from moefold.ops.gemm import TORCH_GEMM, Gemm
from moefold.parallel.tensor_parallel import AsyncTensorParallel, SequenceParallelTokens
from moefold.topology.layout import fold
from moefold.verify import PRELOAD

TOKENS = 8
HIDDEN = 4


class SleepingGemm(Gemm):
    """GEMMs of torch that sleep first, `token_s` for each token."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    def matmul(self, x_MK: Tensor, w_NK: Tensor, out_MN: Tensor | None = None) -> Tensor:
        """See base class."""
        self._sleep(len(x_MK))
        return TORCH_GEMM.matmul(x_MK, w_NK, out_MN)

    def matmul_out(self, out_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> None:
        """See base class."""
        self._sleep(len(x_MK))
        TORCH_GEMM.matmul_out(out_MN, x_MK, w_NK)

    def weight_gradient(self, x_MK: Tensor, grad_MN: Tensor) -> Tensor:
        """See base class."""
        self._sleep(len(x_MK))
        return TORCH_GEMM.weight_gradient(x_MK, grad_MN)

    def _sleep(self, num_tokens: int) -> None:
        time.sleep(self._token_s * num_tokens)


class DelayedWork:
    """Work handle of a message that ends no sooner than `seconds` after its launch."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self._work = work
        self._end_s = time.monotonic() + seconds

    def wait(self) -> None:
        """Wait for the message and for the end of the delay."""
        self._work.wait()
        time.sleep(max(0.0, self._end_s - time.monotonic()))


def layer_s(size: int, gemm_s: float, collective_s: float, steps: int, overlaps: bool) -> float:
    """Return the median time of a layer, forward and backward, in seconds."""
    tp = ParallelGroups.create(fold(world_size=size, tp=size), torch.device("cpu")).attn.tp
    send_recv = collectives.send_recv
    message_s = collective_s / (size - 1)
    collectives.send_recv = lambda *args: [DelayedWork(work, message_s) for work in send_recv(*args)]
    for name in ("_all_gather_now", "_reduce_scatter_now"):
        setattr(collectives, name, _delay(collective_s, getattr(collectives, name)))
    tokens = (AsyncTensorParallel if overlaps else SequenceParallelTokens)(tp)
    backend = UnquantizedLinear(SleepingGemm(gemm_s / (size * TOKENS)))
    times_s = []
    for _ in range(steps):
        x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
        up_weights = [(torch.randn(HIDDEN, HIDDEN, requires_grad=True), None) for _ in range(3)]
        down_weight = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
        started_s = time.monotonic()
        hidden = sum(tokens.all_gather_linear(x, up_weights, linear_backend=backend))
        tokens.linear_reduce_scatter(hidden, down_weight, linear_backend=backend).sum().backward()
        times_s.append(time.monotonic() - started_s)
    return statistics.median(times_s)


def _delay(seconds: float, collective: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def delayed(*args: object, **options: object) -> Tensor:
        time.sleep(seconds)
        return collective(*args, **options)

    return delayed


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="tp (default 4)")
    parser.add_argument("--gemm-ms", type=float, default=40.0, help="time of one GEMM of all tokens (default 40)")
    parser.add_argument("--steps", type=int, default=5, help="layers, of which the median is reported (default 5)")
    args = parser.parse_args()
    pool = WorkerPool(PRELOAD)
    gemm_s = args.gemm_ms / 1e3
    print("| collective | GEMMs | collectives in total | plain layer | overlapped layer | of the collectives hidden |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ratio in (0.25, 0.5, 1.0, 2.0):
        collective_s = ratio * gemm_s
        plain_s, overlapped_s = (
            max(pool.run(args.ranks, layer_s, args.ranks, gemm_s, collective_s, args.steps, overlaps))
            for overlaps in (False, True)
        )
        hidden = (plain_s - overlapped_s) / (4 * collective_s)
        times_s = (collective_s, 12 * gemm_s, 4 * collective_s, plain_s, overlapped_s)
        print("|", " | ".join(f"{1e3 * seconds:.0f} ms" for seconds in times_s), f"| {hidden:.0%} |")


if __name__ == "__main__":
    main()
