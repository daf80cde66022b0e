"""What documents, windows and sinks cost: forward and backward pass of attention beside that of plain causal attention.

`python benchmarks/attention_limits.py [cpu|cuda]` prints one line for each sequence length and type, in milliseconds.
"""

import sys
import time
from collections.abc import Callable

import torch

from moefold.model.attention import CausalAttention

HEADS, GROUPS, HEAD_SIZE = 8, 2, 64
WINDOW = 128
DOCUMENTS = 8
"""Of a sample, on average."""


def main() -> None:
    """Time every limit on one device."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    for dtype in (torch.float32, torch.bfloat16):
        for length in (1024, 4096):
            times = {name: f"{_time_ms(run):.1f}" for name, run in _runs(length, dtype, device).items()}
            print(dtype, length, times)


def _runs(length: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    counts = (HEADS, GROUPS, GROUPS)
    inputs = [torch.randn(length, 1, n, HEAD_SIZE, dtype=dtype, device=device, requires_grad=True) for n in counts]
    sinks = torch.randn(HEADS, dtype=dtype, device=device, requires_grad=True)
    is_first = torch.rand(length, 1, device=device) < DOCUMENTS / length
    starts = (torch.arange(length, device=device)[:, None] * is_first).cummax(0).values

    def run(window: int = 0, **limits: torch.Tensor) -> Callable[[], None]:
        core = CausalAttention(window)

        def forward_backward() -> None:
            core(*inputs, **limits).sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()

        return forward_backward

    return {
        "causal": run(),
        "sinks": run(sinks=sinks),
        "documents": run(starts=starts),
        "window": run(WINDOW),
        "all": run(WINDOW, sinks=sinks, starts=starts),
    }


def _time_ms(run: Callable[[], None]) -> float:
    """The best of ten after one to warm up."""
    run()
    times_s = []
    for _ in range(10):
        started_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - started_s)
    return 1e3 * min(times_s)


if __name__ == "__main__":
    main()
