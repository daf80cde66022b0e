"""Time attention with document masks, sliding windows and sinks against plain causal attention, forward and backward.

`python benchmarks/attention_masks.py [cpu|cuda]` prints one line for each sequence length and dtype, in milliseconds.
"""

import argparse
import time
from collections.abc import Callable

import torch

from moefold.model.attention import CausalAttention
from moefold.ops.documents import PackedDocuments

HEADS = 8
GROUPS = 2
HEAD_SIZE = 64
WINDOW = 128
DOCUMENTS = 8
"""Documents in a sample, on average."""


def main() -> None:
    """Time every mask on one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    for dtype in (torch.float32, torch.bfloat16):
        for length in (1024, 4096):
            times = {name: f"{_time_ms(run):.1f}" for name, run in masks(length, dtype, device).items()}
            print(dtype, length, times)


def masks(length: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], None]]:
    """Return a forward and backward pass of attention with each mask."""
    torch.manual_seed(0)
    counts = (HEADS, GROUPS, GROUPS)
    inputs = [torch.randn(length, 1, n, HEAD_SIZE, dtype=dtype, device=device, requires_grad=True) for n in counts]
    sinks = torch.randn(HEADS, dtype=dtype, device=device, requires_grad=True)
    is_first = torch.rand(length, 1, device=device) < DOCUMENTS / length
    documents = PackedDocuments.of_starts((torch.arange(length, device=device)[:, None] * is_first).cummax(0).values)

    def run(window: int = 0, **mask_args: torch.Tensor | PackedDocuments) -> Callable[[], None]:
        core = CausalAttention(window)

        def forward_backward() -> None:
            core(*inputs, **mask_args).sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()

        return forward_backward

    return {
        "causal": run(),
        "sinks": run(sinks=sinks),
        "documents": run(documents=documents),
        "window": run(WINDOW),
        "all": run(WINDOW, sinks=sinks, documents=documents),
    }


def _time_ms(run: Callable[[], None]) -> float:
    """Return the best time of ten runs after a warm-up run."""
    run()
    times_s = []
    for _ in range(10):
        started_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - started_s)
    return 1e3 * min(times_s)


if __name__ == "__main__":
    main()
