"""Implementation that computes only the GEMMs of a GRPO step: its time is a lower bound of a step on this machine.

A forward pass of decoding is one of training without gradients, and prompts of a group are computed once. Each shape
is multiplied by the fastest of our GEMM and the libraries', from operands that stay in the cache.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.race.moefold_runs import grpo_recipe
from benchmarks.race.run_protocol import GROUP_SIZE, ProcessSpec, Sizes, Turns, run_implementation
from moefold.config.model import ModelConfig
from moefold.ops.cpu.gemm import CGemm
from moefold.ops.gemm import TORCH_GEMM

Shape = tuple[int, int, int]
"""Rows, columns and depth of a product."""
Product = Callable[[], Tensor]
TRIALS = 5


def forward_gemms(model: ModelConfig, rows: int, drawn: int) -> Counter[Shape]:
    """Return the GEMMs of a forward pass. All rows choose the same experts, which is the cheapest choice.

    Core attention and routers are left out.

    Args:
        model: a model with grouped-query attention and MoE layers.
        rows: tokens of the pass.
        drawn: tokens whose logits are computed.
    """
    width = model.hidden_size
    moe = model.ffn.moe
    inner = moe.intermediate_size
    heads = model.attention.num_heads + 2 * model.attention.num_kv_heads
    layer = Counter([(rows, heads * width // model.attention.num_heads, width), (rows, width, width)])
    layer += Counter({(rows, inner, width): 2 * moe.top_k})
    layer[rows, width, inner] += moe.top_k
    whole = Counter({shape: model.num_layers * count for shape, count in layer.items()})
    whole[drawn, model.vocab_size, width] += 1
    return whole


def training_gemms(model: ModelConfig, sizes: Sizes) -> Counter[Shape]:
    """Return the GEMMs of a training step: forward, gradients of inputs and gradients of weights."""
    rows = sizes.rollouts * (sizes.prompt + sizes.new - 1)
    step: Counter[Shape] = Counter()
    for (m, n, k), count in forward_gemms(model, rows, rows).items():
        for shape in ((m, n, k), (m, k, n), (n, k, m)):
            step[shape] += count
    return step


def decoding_gemms(model: ModelConfig, sizes: Sizes) -> Counter[Shape]:
    """Return the GEMMs of the passes of decoding: one over the prompts, and one for each token after the first."""
    prompts = sizes.rollouts // GROUP_SIZE
    work = forward_gemms(model, prompts * sizes.prompt, prompts)
    for shape, count in forward_gemms(model, sizes.rollouts, sizes.rollouts).items():
        work[shape] += (sizes.new - 1) * count
    return work


def operands(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return x [rows, depth] and w [columns, depth]; a gradient of weights, which is deep, reads both by columns."""
    rows, columns, depth = shape
    is_deep = depth > max(rows, columns)
    x, w = (torch.randn(depth, n).t() if is_deep else torch.randn(n, depth) for n in (rows, columns))
    return x, w


def ways_to_multiply(x: Tensor, w: Tensor) -> list[Product]:
    """Return functions that compute x @ w.T: our GEMM, oneDNN and the library of torch.mm."""
    out = torch.empty(len(x), len(w))
    return [*(partial(gemm.matmul, x, w) for gemm in (CGemm(), TORCH_GEMM)), partial(torch.mm, x, w.t(), out=out)]


def fastest(ways: Sequence[Product]) -> Product:
    """Return the function that takes the least CPU time."""
    return min(ways, key=lambda way: min(_seconds(way) for _ in range(TRIALS)))


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.thread_time()
    run()
    return time.thread_time() - started_s


def multiply_only(turns: Turns, spec: ProcessSpec) -> None:
    """Multiply the shapes of a step in each turn, and report the times of training and decoding."""
    model = grpo_recipe(spec).model
    sizes = spec.sizes
    calls: dict[str, list[Product]] = {}
    for part, work in ("training", training_gemms(model, sizes)), ("decoding", decoding_gemms(model, sizes)):
        calls[part] = [run for shape in work for run in [fastest(ways_to_multiply(*operands(shape)))] * work[shape]]

    def seconds(part: str) -> float:
        return _seconds(lambda: [run() for run in calls[part]])

    # The new tokens of a rollout are the fact on which implementations of this comparison agree.
    turns.take(lambda _: {"new": sizes.new, "parts": {part: seconds(part) for part in calls}})


KINDS = {"grpo": multiply_only}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_implementation(KINDS, sys.argv[1:])
