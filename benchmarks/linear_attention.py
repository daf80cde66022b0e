"""Measure forward and backward of chunked Gated DeltaNet or KDA on a CPU, against transformers' torch path.

    python benchmarks/linear_attention.py [--kind gated_deltanet|kda] [--tokens 2048 8192] [--rounds 5]
                                          [--heads 4 8] [--size 64] [--dtype float32]

One sample on one thread, in float32 or with queries, keys and values in bfloat16. Implementations run in turns; the
table has the smallest CPU time of each, in microseconds a token, and how many times as fast it is as transformers
(`torch_chunk_gated_delta_rule` of Qwen3-Next; it lacks decays of channels, so --kind kda compares with our torch
operations). C needs a compiler; chunks are as long as in training unless --chunk-size says otherwise.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moefold.config.groups.linear_attention import LINEAR_CHUNK_SIZE
from moefold.ops.cpu.linear_attention import CLinearAttention
from moefold.ops.linear_attention import ChunkedLinearAttention, l2_normalize


def main() -> int:
    """Print one line for each length and implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("gated_deltanet", "kda"), default="gated_deltanet")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="lengths (default 2048 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each implementation (default 5)")
    parser.add_argument("--heads", type=int, nargs=2, default=[4, 8], help="key and value heads (default 4 8)")
    parser.add_argument("--size", type=int, default=64, help="width of keys and values (default 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--chunk-size", type=int, default=LINEAR_CHUNK_SIZE, help=f"tokens of a chunk (default {LINEAR_CHUNK_SIZE})"
    )
    parser.add_argument("--without", nargs="*", default=[], choices=("transformers", "torch", "C"), help="not measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    functions = _implementations(args.kind, args.chunk_size)
    functions = {name: function for name, function in functions.items() if name not in args.without}
    print("| tokens | implementation | us a token | times as fast |\n| --- | --- | --- | --- |")
    for tokens in args.tokens:
        inputs = _inputs(args.kind, tokens, args.heads, args.size, getattr(torch, args.dtype))
        best = {name: float("inf") for name in functions}
        for _ in range(args.rounds):
            for name, function in functions.items():
                best[name] = min(best[name], _cpu_seconds(function, inputs))
        reference = next(iter(best.values()))
        for name, seconds in best.items():
            print(f"| {tokens:,} | {name} | {seconds / tokens * 1e6:.2f} | {reference / seconds:.2f} |", flush=True)
    return 0


def _implementations(kind: str, chunk_size: int) -> dict[str, Callable[..., Tensor]]:
    """Return functions of q, k, v, log_decay and beta, the reference first."""

    def chunked(kernel: CLinearAttention | None) -> Callable[..., Tensor]:
        attention = ChunkedLinearAttention(chunk_size, kernel=kernel)
        return lambda *inputs: attention(*inputs)[0]

    ours = {"torch": chunked(None), "C": chunked(CLinearAttention())}
    if kind == "kda":
        return ours
    # Lazy import: it takes seconds.
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def theirs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        by_sample = [x.transpose(0, 1) for x in (q, k, v, log_decay.squeeze(-1), beta)]
        # Its queries are scaled, ours are not.
        by_sample[0] = by_sample[0] * q.shape[-1] ** 0.5
        out: Tensor = torch_chunk_gated_delta_rule(*by_sample)[0]
        return out.transpose(0, 1)

    return {"transformers": theirs, **ours}


def _inputs(kind: str, tokens: int, heads: list[int], size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, 1, *shape, generator=generator)

    keys, values = heads
    q, k = (l2_normalize(draw(keys, size)) for _ in range(2))
    log_decay = -draw(values, size if kind == "kda" else 1).abs() / 8
    inputs = [q.to(dtype), k.to(dtype), draw(values, size).to(dtype), log_decay, draw(values).sigmoid()]
    return [x.requires_grad_() for x in inputs]


def _cpu_seconds(function: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    started = time.process_time()
    out = function(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
