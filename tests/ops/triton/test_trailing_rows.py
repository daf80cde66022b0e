"""Experts whose counts are on the device do not read rows after the last expert's, which are undefined."""

import pytest
import torch

from moefold.model.moe.experts import fused_experts
from moefold.ops.autotune import Autotuner
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights, LazyCounts
from moefold.ops.grouped_experts import GroupedExpertOps
from moefold.ops.quantization.emulated import EmulatedExpertOps, EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS
from moefold.ops.triton.experts import TritonExpertOps
from moefold.ops.triton.fp8_gemm import Fp8ExpertOps
from tests.model.moe.reference_experts import reference_experts
from tests.slow import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, F = 9, 7
COUNTS = [3, 0, 5]
UNDEFINED = 4


OPS = [
    TritonExpertOps(Autotuner(is_enabled=False)),
    Fp8ExpertOps(16),
    GroupedExpertOps(),
    EmulatedExpertOps(EmulatedLinear(QUANT_FORMATS["fp8-blockwise"])),
    SequentialExpertOps(),
]


def _rows_and_weights(has_bias=False):
    num_rows = sum(COUNTS)
    shapes = [(num_rows, H), (num_rows,), (len(COUNTS), H, F), (len(COUNTS), H, F), (len(COUNTS), F, H)]
    shapes += [(len(COUNTS), F), (len(COUNTS), F), (len(COUNTS), H)] if has_bias else []
    return torch.randn(num_rows, H).to(DEVICE), *(torch.randn(shape).to(DEVICE) for shape in shapes)


def _outputs_and_gradients(ops, saves_fc1, grad, x, probs, *weights, undefined=UNDEFINED):
    def pad(rows):
        return torch.cat((rows, rows.new_full((undefined, *rows.shape[1:]), float("nan"))))

    leaves = [t.requires_grad_() for t in (pad(x), pad(probs), *(w.clone() for w in weights))]
    options = ExpertOptions(LazyCounts(torch.tensor(COUNTS, device=DEVICE)), saves_fc1=saves_fc1)
    y = fused_experts(leaves[0], ExpertWeights(*leaves[2:]), options, ops, leaves[1])
    return [y, *torch.autograd.grad(y, leaves, pad(grad))]


@pytest.mark.parametrize(("saves_fc1", "has_bias"), [(True, True), *slow([(True, False), (False, False)])])
@pytest.mark.parametrize("ops", OPS, ids=lambda ops: type(ops).__name__)
def test_results_are_those_without_undefined_rows(ops, saves_fc1, has_bias):
    given = _rows_and_weights(has_bias)
    found = _outputs_and_gradients(ops, saves_fc1, *given)
    expected = _outputs_and_gradients(ops, saves_fc1, *given, undefined=0)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[: len(theirs)], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("saves_fc1", [True, False])
def test_undefined_rows_change_nothing(saves_fc1):
    num_rows = sum(COUNTS)
    grad, x, probs, *weights = _rows_and_weights()
    found = _outputs_and_gradients(OPS[0], saves_fc1, grad, x, probs, *weights)

    exact = [t.double().requires_grad_() for t in (x, probs, *weights)]
    expected_y = reference_experts(exact[0], ExpertWeights(*exact[2:]), ExpertOptions(COUNTS), exact[1])
    expected = [expected_y, *torch.autograd.grad(expected_y, exact, grad.double())]
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        rows = num_rows if i < 3 else len(theirs)
        torch.testing.assert_close(mine[:rows], theirs.to(mine.dtype), rtol=1e-5, atol=1e-5)
