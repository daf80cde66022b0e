"""Experts with adapters equal the reference experts of merged weights, for every GEMM backend and empty experts."""

import pytest
import torch
from torch import Tensor

from moefold.model.moe.adapted_experts import NO_ADAPTER, ExpertAdapters, adapted_experts
from moefold.ops.cpu.gemm import CGemm
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights
from moefold.ops.gemm import TORCH_GEMM
from tests.model.moe.reference_experts import reference_experts
from tests.ops.c_kernels import needs_compiler

COUNTS = [3, 0, 5, 0]
"""Two experts have no tokens."""
HIDDEN = 8
FFN = 12
SCALE = 1.5


def _draw(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(requires_grad)


@pytest.mark.parametrize(
    ("dtype", "gemm"),
    [
        (torch.float64, TORCH_GEMM),
        (torch.float32, TORCH_GEMM),
        (torch.bfloat16, TORCH_GEMM),
        pytest.param(torch.float32, CGemm, marks=needs_compiler),
        pytest.param(torch.bfloat16, CGemm, marks=needs_compiler),
    ],
)
@pytest.mark.parametrize("saves_fc1", [True, False])
def test_equals_the_reference_of_merged_weights(dtype, gemm, saves_fc1):
    torch.manual_seed(0)
    experts = len(COUNTS)
    shapes = ((experts, HIDDEN, FFN), (experts, HIDDEN, FFN), (experts, FFN, HIDDEN))
    biases = [_draw(experts, width, dtype=dtype) for width in (FFN, FFN, HIDDEN)]
    weights = [_draw(*shape, dtype=dtype) for shape in shapes]
    pairs = [
        (_draw(experts, shape[1], 2, dtype=dtype, requires_grad=True), _draw(experts, 2, shape[2], dtype=dtype))
        for shape in shapes
    ]
    for _, b in pairs:
        b.requires_grad_()
    x = _draw(sum(COUNTS), HIDDEN, dtype=dtype, requires_grad=True)
    probs = torch.rand(sum(COUNTS), requires_grad=True)
    grad = _draw(sum(COUNTS), HIDDEN, dtype=dtype)
    options = ExpertOptions(COUNTS, saves_fc1=saves_fc1)
    adapters = ExpertAdapters(pairs[0], NO_ADAPTER, pairs[2], SCALE)
    backend = gemm() if isinstance(gemm, type) else gemm
    y = adapted_experts(x, ExpertWeights(*weights, *biases), adapters, options, probs, backend)
    y.backward(grad)
    leaves = [x, probs, *pairs[0], *pairs[2]]
    found = [y, *(leaf.grad for leaf in leaves)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    merged = [weight.double() for weight in weights]
    merged[0] = merged[0] + SCALE * exact[2] @ exact[3]
    merged[2] = merged[2] + SCALE * exact[4] @ exact[5]
    expected = reference_experts(
        exact[0], ExpertWeights(*merged, *(bias.double() for bias in biases)), options, exact[1]
    )
    expected.backward(grad.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for actual, reference in zip(found, [expected, *(leaf.grad for leaf in exact)], strict=True):
        error = (actual.double() - reference).abs().max() / reference.abs().max()
        assert error < max(tolerance, 1e-5 if actual.dtype == torch.float32 else 0.0)
