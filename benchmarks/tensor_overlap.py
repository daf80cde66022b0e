"""What `parallel.overlap_tp` hides of the exchanges of a layer, with timed waits.

    python benchmarks/tensor_overlap.py
    python benchmarks/tensor_overlap.py --ranks 8 --products-ms 40

Products sleep, each for its share of the rows, and messages take their time from when they began: what a rank computes
meanwhile hides them. As nobody computes for long, two cores show it. A layer has three products behind a gather and one
before a scatter; its backward pass has two for each of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moefold.comm import collectives
from moefold.comm import collectives as ring
from moefold.comm.groups import ParallelGroups
from moefold.model.linear import UNQUANTIZED_LINEAR
from moefold.parallel import tensor_parallel
from moefold.parallel.tensor_parallel import SequenceParallelTokens
from moefold.testing.pool import WorkerPool
from moefold.topology.layout import fold

TOKENS, HIDDEN = 8, 4


class Sleep:
    """Products that take their time."""

    def __init__(self, full_s: float, rows: int) -> None:
        self._per_row_s = full_s / rows

    def of(self, compute: Callable[..., Tensor], rows_at: int) -> Callable[..., Tensor]:
        """`compute`, which takes as long as the rows of its argument `rows_at` say."""

        def slowly(*args: Tensor) -> Tensor:
            time.sleep(self._per_row_s * len(args[rows_at]))
            return compute(*args)

        return slowly


class Plain:
    """The same for `SequenceParallelTokens`."""

    def __init__(self, sleep: Sleep) -> None:
        self.forward = sleep.of(UNQUANTIZED_LINEAR.forward, 0)
        self.input_gradient = sleep.of(UNQUANTIZED_LINEAR.input_gradient, 0)
        self.weight_gradient = sleep.of(UNQUANTIZED_LINEAR.weight_gradient, 0)


class Message:
    """Something under way that takes its time."""

    def __init__(self, work: object, seconds: float) -> None:
        self._work, self._there_s = work, time.monotonic() + seconds

    def wait(self) -> None:
        """Wait for what is left of it."""
        self._work.wait()
        time.sleep(max(0.0, self._there_s - time.monotonic()))


def layer_s(size: int, product_s: float, exchange_s: float, steps: int, overlaps: bool) -> float:
    """Median time of a layer forward and backward, s."""
    tp = ParallelGroups.create(fold(world_size=size, tp=size), torch.device("cpu")).attn.tp
    sleep = Sleep(product_s, size * TOKENS)
    pass_on, hop_s = ring.send_recv, exchange_s / (size - 1)
    ring.send_recv = lambda *args: [Message(work, hop_s) for work in pass_on(*args)]
    for name in ("_gather", "_reduce"):
        setattr(collectives, name, _after(exchange_s, getattr(collectives, name)))
    for name, rows_at in (("product", 0), ("product_into", 1), ("weight_gradient", 0)):
        setattr(tensor_parallel, name, sleep.of(getattr(tensor_parallel, name), rows_at))
    tokens = tensor_parallel.AsyncTensorParallel(tp) if overlaps else SequenceParallelTokens(tp)
    products = None if overlaps else Plain(sleep)
    took_s = []
    for _ in range(steps):
        x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
        columns = [(torch.randn(HIDDEN, HIDDEN, requires_grad=True), None) for _ in range(3)]
        down = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
        started_s = time.monotonic()
        hidden = sum(tokens.all_gather_linear(x, columns, linear_backend=products))
        tokens.linear_reduce_scatter(hidden, down, linear_backend=products).sum().backward()
        took_s.append(time.monotonic() - started_s)
    return statistics.median(took_s)


def _after(seconds: float, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def slowly(*args: object) -> Tensor:
        time.sleep(seconds)
        return compute(*args)

    return slowly


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--products-ms", type=float, default=40.0, help="of one product of all tokens")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    pool, product_s = WorkerPool(), args.products_ms / 1e3
    print("| exchange | products | exchanges in all | plain layer | overlapped layer | of the exchanges hidden |")
    print("| --- | --- | --- | --- | --- | --- |")
    for part in (0.25, 0.5, 1.0, 2.0):
        exchange_s = part * product_s
        plain_s, beside_s = (
            max(pool.run(args.ranks, layer_s, args.ranks, product_s, exchange_s, args.steps, overlaps))
            for overlaps in (False, True)
        )
        hidden = (plain_s - beside_s) / (4 * exchange_s)
        times = (exchange_s, 12 * product_s, 4 * exchange_s, plain_s, beside_s)
        print("|", " | ".join(f"{1e3 * seconds:.0f} ms" for seconds in times), f"| {hidden:.0%} |")


if __name__ == "__main__":
    main()
