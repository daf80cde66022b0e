"""Documents, sliding windows and sinks in the C attention kernel, with vectors of every width."""

import pytest
import torch

from moefold.model.attention import AttentionMaskSpec
from moefold.ops.block_attention import FlashMask, MathBlockAttention, fold_in_sinks
from moefold.ops.documents import DocumentBounds, PackedDocuments, Segments
from tests.ops.c_kernels import (
    HALF_STEPS,
    PROCESSORS,
    WITH_AND_WITHOUT_PAIRS,
    in_each_type,
    needs_compiler,
    same_bits_on_threads,
)

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=WITH_AND_WITHOUT_PAIRS)
def kernel(request, built_with):
    from moefold.ops.cpu.attention import CAttention

    return built_with(CAttention, PROCESSORS[request.param])


def _heads(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Return (q, k, v, grad) of tokens, samples, query heads, key/value heads and head dim."""
    tokens, samples, heads, groups, d = shape
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, groups, groups, heads)
    return [torch.randn(tokens, samples, count, d, generator=generator).to(dtype) for count in counts]


def _documents(bounds: tuple[tuple[int, ...], ...]) -> PackedDocuments:
    starts = [[max(b for b in sample if b <= t) for t in range(sample[-1])] for sample in bounds]
    return PackedDocuments(DocumentBounds(bounds), torch.tensor(starts).t())


CASES = {
    "documents": (((0, 1, 3, 40, 150), (0, 64, 128, 150)), 0, False),
    "window": (None, 9, False),
    "window of one": (None, 1, False),
    "window of a block": (None, 64, False),
    "window of a block and one": (None, 65, False),
    "documents and window": (((0, 70, 150), (0, 33, 149, 150)), 20, False),
    "sinks": (None, 0, True),
    "all": (((0, 100, 101, 150), (0, 66, 150)), 31, True),
}
"""Document bounds of two samples of 150 tokens, window, and whether there are sinks."""


@in_each_type
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(150, 2, 4, 2, 24), (150, 2, 2, 2, 33)])
def test_limits_equal_the_dense_mask(kernel, case, shape, dtype):
    bounds, window, has_sinks = CASES[case]
    q, k, v, grad = _heads(shape, dtype)
    sinks = torch.linspace(-2, 3, shape[2]).to(dtype) if has_sinks else None
    spec = AttentionMaskSpec(window, None if bounds is None else _documents(bounds))
    limits = spec.local_mask(0, q, takes_limits=True)
    assert isinstance(limits, FlashMask) == (case != "sinks")
    out, lse = kernel.forward(q, k, v, limits, sinks)
    found = [out, lse, *kernel.backward(grad, q, k, v, out, lse, limits)]

    positions = torch.arange(shape[0])
    dense = spec.mask(positions, positions)
    wide = [x.double() for x in (q, k, v)]
    wide_sinks = None if sinks is None else sinks.double()
    right_out, right_lse = fold_in_sinks(*MathBlockAttention().forward(*wide, dense), wide_sinks)
    # Backwards the output is read as it was rounded to a narrow type.
    read = out.double() if dtype == torch.bfloat16 else right_out
    gradients = MathBlockAttention().backward(grad.double(), *wide, read, right_lse, dense)
    rounding = HALF_STEPS | {torch.float32: 0.0}
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), found, (right_out, right_lse, *gradients), strict=True):
        error = (a.double() - e).abs() - rounding[a.dtype] * e.abs()
        assert error.max() < 3e-6 * e.abs().max().clamp(min=1.0), (name, float(error.max()))


@in_each_type
@pytest.mark.parametrize("window", [0, 20])
def test_a_document_has_the_same_bits_wherever_it_lies(kernel, window, dtype):
    q, k, v, grad = _heads((230, 1, 4, 2, 24), dtype)
    bounds = (0, 37, 167, 230)
    limits = AttentionMaskSpec(window, _documents((bounds,))).local_mask(0, q, takes_limits=True)
    out, lse = kernel.forward(q, k, v, limits)
    packed = [out, lse, *kernel.backward(grad, q, k, v, out, lse, limits)]
    for first, stop in zip(bounds, bounds[1:], strict=False):
        alone = [x[first:stop] for x in (q, k, v, grad)]
        mask = AttentionMaskSpec(window).local_mask(0, alone[0], takes_limits=True)
        out, lse = kernel.forward(*alone[:3], mask)
        gradients = kernel.backward(alone[3], *alone[:3], out, lse, mask)
        for a, e in zip(packed, (out, lse, *gradients), strict=True):
            assert torch.equal(a[first:stop], e)


def test_threads_and_samples_change_no_bit(kernel):
    q, k, v, grad = _heads((257, 3, 12, 2, 24), torch.float32)
    bounds = ((0, 100, 257), (0, 257), (0, 3, 9, 257))
    limits = AttentionMaskSpec(50, _documents(bounds)).local_mask(0, q, takes_limits=True)

    def both_passes():
        out, lse = kernel.forward(q, k, v, limits)
        return out, lse, *kernel.backward(grad, q, k, v, out, lse, limits)

    whole, *_ = same_bits_on_threads(both_passes)
    last = [x[:, 2:] for x in (q, k, v)]
    alone, _ = kernel.forward(*last, AttentionMaskSpec(50, _documents(bounds[2:])).local_mask(0, q, takes_limits=True))
    assert torch.equal(alone, whole[:, 2:])


def test_a_sink_above_every_score_takes_nearly_all_weight_without_overflow(kernel):
    q, k, v, grad = _heads((40, 1, 2, 2, 16), torch.float32)
    sinks = torch.tensor([500.0, -500.0])
    out, lse = kernel.forward(q, k, v, "causal", sinks)
    plain, plain_lse = kernel.forward(q, k, v, "causal")
    assert out[:, :, 0].abs().max() == 0
    assert torch.equal(lse[:, :, 0], torch.full((40, 1), 500.0))
    assert torch.equal(out[:, :, 1], plain[:, :, 1])
    assert torch.equal(lse[:, :, 1], plain_lse[:, :, 1])
    assert all(x.isfinite().all() for x in kernel.backward(grad, q, k, v, out, lse, "causal"))


def test_it_is_noticed_when_a_document_end_is_off_by_one(kernel):
    q, k, v, _ = _heads((60, 1, 2, 1, 16), torch.float32)
    ends = [torch.tensor([0, end, 60], dtype=torch.int32) for end in (30, 31)]
    first, second = (kernel.forward(q, k, v, FlashMask(True, -1, Segments(end, 31)))[0] for end in ends)
    assert not torch.equal(first[30], second[30])
    assert torch.equal(first[:30], second[:30])
