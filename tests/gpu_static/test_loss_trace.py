"""Test by a trace that each CUDA kernel of the loss reads the logits once, and that no torch operation does."""

from importlib.util import find_spec

import pytest

from tests.gpu_static.trace_loss import TOKENS, VOCAB_SIZE
from tests.gpu_static.uninterpreted import trace_uninterpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
NUM_CHUNKS = 10
"""Chunks of 2**28 logits."""


@pytest.fixture(scope="module")
def traced():
    # Interpreted kernels are not launched.
    return trace_uninterpreted("-m", "tests.gpu_static.trace_loss")


@pytest.mark.parametrize(
    ("case", "launches_of_kernels", "bytes_of_a_logit"),
    [
        # A bfloat16 logit is read twice, and its gradient written.
        ("auto 0", 1, 6),
        # A float32 logit is read twice, and its gradient written in bfloat16.
        ("auto -1", NUM_CHUNKS, 10),
    ],
)
def test_kernels_read_the_logits_once_each(traced, case, launches_of_kernels, bytes_of_a_logit):
    counts = traced[case]
    names = ["_statistics_kernel"] * launches_of_kernels + ["_gradient_kernel"] * launches_of_kernels
    assert sorted(counts["kernels"]) == sorted(names)
    assert counts["waits"] == 0
    # Beyond these: numbers of a token, and the sum of the weight's gradient.
    rest = counts["moved_bytes"] - counts["gemm_bytes"] - bytes_of_a_logit * TOKENS * VOCAB_SIZE
    assert 0 <= rest < 2 * TOKENS * VOCAB_SIZE


@pytest.mark.parametrize(("chunk", "bytes_of_a_logit"), [(0, 40), (-1, 46)])
def test_bytes_of_torch_operations(traced, chunk, bytes_of_a_logit):
    kernels, plain = (traced[f"{name} {chunk}"] for name in ("auto", "plain"))
    moved, needed = (counts["moved_bytes"] - counts["gemm_bytes"] for counts in (plain, kernels))
    assert 2 * needed < moved < (bytes_of_a_logit + 2) * TOKENS * VOCAB_SIZE
