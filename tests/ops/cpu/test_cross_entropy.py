"""The softmax statistics of the loss in C: values, exponentials, and bits that do not depend on the other rows."""

import pytest
import torch

from moefold.ops.cross_entropy import TORCH_CROSS_ENTROPY_OPS
from tests.ops.c_kernels import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def ops():
    from moefold.ops.cpu.cross_entropy import CCrossEntropyOps

    return CCrossEntropyOps()


def logits_and_labels(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator).mul_(10)
    return logits, torch.randint(-1, width, (rows,), generator=generator)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 2), (5, 63), (2, 64), (300, 129), (7, 4096), (0, 4)])
def test_statistics_and_exponentials_are_those_of_torch_in_float64(ops, rows, width):
    logits, labels = logits_and_labels(rows, width)
    exps = logits.double()
    expected = TORCH_CROSS_ENTROPY_OPS.exponentiate_(exps, labels) if rows else ops.statistics(logits, labels)
    actual = ops.statistics(logits, labels)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=2e-6, atol=0)
    replaced = ops.exponentiate_(logits, labels)
    assert all(torch.equal(a, b) for a, b in zip(actual, replaced, strict=True))
    torch.testing.assert_close(logits.double(), exps, rtol=2e-5, atol=1e-37)


def test_a_row_has_the_same_bits_by_itself_and_among_others(ops):
    logits, labels = logits_and_labels(600, 93)
    together = ops.statistics(logits, labels)
    for i in range(0, 600, 41):
        alone = ops.statistics(logits[i : i + 1], labels[i : i + 1])
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_softmax_has_a_loss_that_is_nan_as_in_torch(ops, value):
    logits, labels = logits_and_labels(3, 70)
    logits[1, 65] = value
    for statistics in (ops.statistics(logits, labels), TORCH_CROSS_ENTROPY_OPS.statistics(logits, labels)):
        log_probs = statistics.target_C - statistics.top_C - statistics.sum_C.log()
        assert log_probs.isnan().tolist() == [False, True, False]


def test_minus_infinity_has_no_weight_and_only_minus_infinity_no_softmax(ops):
    logits = torch.zeros(2, 70)
    logits[0, 3] = logits[1] = float("-inf")
    statistics = ops.exponentiate_(logits, torch.tensor([3, 3]))
    assert statistics.sum_C[0] == 69
    assert logits[0, 3] == 0
    assert statistics.target_C[0] == float("-inf")
    assert statistics.sum_C[1].isnan()


def test_other_logits_are_computed_by_torch(ops):
    logits, labels = logits_and_labels(5, 9)
    for other in (logits.double(), logits.bfloat16(), logits.t().contiguous().t()):
        expected = TORCH_CROSS_ENTROPY_OPS.statistics(other, labels)
        assert all(torch.equal(a, b) for a, b in zip(ops.statistics(other, labels), expected, strict=True))


def test_a_label_beyond_the_vocabulary_is_refused(ops):
    with pytest.raises(AssertionError):
        ops.statistics(torch.zeros(2, 4), torch.tensor([0, 4]))
