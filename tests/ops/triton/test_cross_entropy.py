"""Kernels of the cross-entropy equal the torch operations in float64, and the loss that calls them equals torch's."""

import pytest
import torch
from torch.nn import functional as F

from moefold.model.loss import ChunkOptions, SoftmaxOptions, VocabRange, chunked_token_losses, token_losses
from moefold.ops.cross_entropy import TORCH_CROSS_ENTROPY_OPS
from moefold.ops.gemm import Gemm
from moefold.ops.triton.cross_entropy import TritonCrossEntropyOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = TritonCrossEntropyOps()
T, H, V = 5, 6, 37
"""Three blocks of the interpreter, the last of them partial."""


def case(dtype, width=V):
    torch.manual_seed(0)
    logits = (8 * torch.randn(T, width, dtype=torch.float64)).to(dtype).to(DEVICE)
    rows = torch.randint(width, (T,), device=DEVICE)
    # Labels of other ranks.
    rows[1] = rows[4] = -1
    return logits, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, V])
@pytest.mark.parametrize("shift", [0.0, -3e4], ids=["near 0", "far below 0"])
def test_cross_entropy_statistics_equal_float64(dtype, width, shift):
    logits, rows = case(dtype, width)
    logits = logits + shift
    found = OPS.statistics(logits, rows)
    expected = TORCH_CROSS_ENTROPY_OPS.statistics(logits.double(), rows)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=0)


def test_a_logit_of_minus_infinity_has_no_probability_and_nan_is_not_hidden():
    logits, rows = case(torch.float32)
    rows[:] = V - 1
    # The first block of the first row, and one logit of the second.
    logits[0, :16] = float("-inf")
    logits[1, 3] = float("nan")
    found = OPS.statistics(logits, rows)
    expected = TORCH_CROSS_ENTROPY_OPS.statistics(logits.double(), rows)
    assert found.sum_C[1].isnan()
    torch.testing.assert_close(found.sum_C[[0, 2]].double(), expected.sum_C[[0, 2]], rtol=1e-6, atol=0)
    assert found.top_C[0] == expected.top_C[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=["in place", "float32", "bfloat16"])
@pytest.mark.parametrize("num_gradients", [1, 2], ids=["cross-entropy", "normalizer too"])
def test_the_gradient_of_logits_equals_float64(dtype, out_dtype, num_gradients):
    logits, rows = case(dtype)
    normalizer = logits.float().logsumexp(1)
    grads = torch.randn(num_gradients, T, device=DEVICE)
    expected = torch.empty(T, V, dtype=torch.float64, device=DEVICE)
    TORCH_CROSS_ENTROPY_OPS.gradient_out(expected, logits.double(), rows, normalizer.double(), grads.double())
    out = logits if out_dtype is None else torch.full((T, V), float("nan"), dtype=out_dtype, device=DEVICE)
    OPS.gradient_out(out, logits, rows, normalizer, grads)
    # The interpreter truncates to bfloat16.
    tolerance = 2e-6 if out.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 1e-2)


class _Bf16Gradients(Gemm):
    """GEMM that reads gradients in the dtype of the weight, as on a GPU, on every processor."""

    def accepts_fp32_weight(self, x):
        return False

    def upcast(self, x):
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 3, 4])
@pytest.mark.parametrize(("first_row", "temperature"), [(0, 1.0), (20, 1.0), (20, 0.7)])
def test_loss_and_gradients(dtype, chunk, first_row, temperature):
    torch.manual_seed(1)
    x = torch.randn(4, 2, H).to(dtype).to(DEVICE).requires_grad_()
    weight = torch.randn(V, H).to(dtype).to(DEVICE).requires_grad_()
    labels = torch.randint(V, (4, 2), device=DEVICE)
    share = torch.rand(4, 2, device=DEVICE)
    # Another rank has no rows of this vocabulary, and so only shifts the labels.
    vocab_range = VocabRange(first_row)
    shifted = labels + first_row
    softmax = SoftmaxOptions(temperature, has_entropy=True)
    if chunk:
        options = ChunkOptions(chunk, vocab_range, gemm=_Bf16Gradients(), ops=OPS, softmax=softmax)
        losses, normalizer, entropy = chunked_token_losses(x, weight, shifted, options)
    else:
        losses, normalizer, entropy = token_losses(F.linear(x, weight), shifted, vocab_range, OPS, softmax)
    wide_x, wide_weight = (value.detach().double().requires_grad_() for value in (x, weight))
    logits = (wide_x @ wide_weight.t()).flatten(0, 1) / temperature
    expected = F.cross_entropy(logits, labels.flatten(), reduction="none")
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.flatten().double(), expected, rtol=tolerance, atol=tolerance)
    expected_entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()
    torch.testing.assert_close(entropy.flatten().double(), expected_entropy, rtol=tolerance, atol=tolerance)
    expected_normalizer = logits.logsumexp(-1)
    torch.testing.assert_close(normalizer.flatten().double(), expected_normalizer, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad((losses * share + 0.1 * normalizer.square()).sum(), (x, weight))
    wanted_loss = (expected * share.flatten().double() + 0.1 * expected_normalizer.square()).sum()
    wanted = torch.autograd.grad(wanted_loss, (wide_x, wide_weight))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def test_no_tokens():
    logits, rows = case(torch.float32)
    assert all(len(values) == 0 for values in OPS.statistics(logits[:0], rows[:0]))
    OPS.gradient_out(logits[:0], logits[:0], rows[:0], rows[:0].float(), torch.zeros(2, 0, device=DEVICE))
