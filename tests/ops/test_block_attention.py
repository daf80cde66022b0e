"""Blocks of attention: every kernel equals the definition, and merged blocks equal the whole."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moefold.model.attention import AttentionMaskSpec
from moefold.ops.block_attention import (
    CpuFlash,
    CudaFlash,
    FlashMask,
    MathBlockAttention,
    attention_block,
    attention_block_backward,
    block_kernel,
    merge_lse_,
)
from moefold.ops.documents import DocumentBounds, PackedDocuments
from tests.model.attention_reference import (
    causal_attention_pairs,
    random_attention,
    random_sinks,
    random_starts,
    reference_attention,
    relative_errors,
    with_gradients,
)
from tests.ops.reference_flash import reference_flash

HEADS = [(4, 4, 8), (4, 2, 8), (6, 1, 5)]
# (queries, keys, seen): single rows, few rows, more than one tile of the kernel in either direction.
SIZES = [(1, 1, "causal"), (1, 1, "all"), (1, 7, "all"), (5, 1, "all"), (3, 5, "all"), (5, 3, "all")]
SIZES += [(6, 6, "causal"), (70, 70, "causal"), (33, 600, "all"), (300, 20, "all")]


def _rectangle(queries, keys, heads, batch=2):
    grad_out, q, k, v = random_attention(queries * 1000 + keys, max(queries, keys), batch, heads)
    return grad_out[:queries], q[:queries], k[:keys], v[:keys]


def _whole(grad_out, q, k, v, seen):
    """[out, dq, dk, dv] of the definition."""
    ends = torch.arange(q.shape[0]) if seen == "causal" else torch.full((q.shape[0],), k.shape[0])
    return with_gradients(lambda *x: reference_attention(*x, ends, torch.arange(k.shape[0])), grad_out, q, k, v)


def _through(kernel, grad_out, q, k, v, seen):
    out, lse = kernel.forward(q, k, v, seen)
    return [out, lse, *kernel.backward(grad_out, q, k, v, out, lse, seen)]


@pytest.mark.parametrize(("queries", "keys", "seen"), SIZES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kernel", [CpuFlash(), MathBlockAttention()], ids=lambda k: type(k).__name__)
def test_kernel_equals_the_definition(kernel, queries, keys, seen, heads):
    given = _rectangle(queries, keys, heads)
    out, lse, *gradients = _through(kernel, *given, seen)
    # The gradients of a lone key's score are exactly zero, up to the rounding of terms of size one.
    for x, y in zip([out, *gradients], _whole(*given, seen), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert lse.shape == (queries, 2, heads[0])


@pytest.mark.parametrize(("queries", "keys", "seen"), SIZES)
@pytest.mark.parametrize("heads", HEADS)
def test_cpu_kernel_equals_the_plain_twin(queries, keys, seen, heads):
    given = _rectangle(queries, keys, heads)
    for x, y in zip(_through(CpuFlash(), *given, seen), _through(MathBlockAttention(), *given, seen), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [CpuFlash(), MathBlockAttention()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_narrow_types_keep_the_log_sum_exp_wide(kernel, dtype, tolerance):
    given = [x.to(dtype) for x in _rectangle(20, 40, (4, 2, 8))]
    out, lse, *gradients = _through(kernel, *given, False)
    exact = _through(MathBlockAttention(), *(x.double() for x in given), "all")
    assert lse.dtype == torch.float32
    assert {x.dtype for x in (out, *gradients)} == {dtype}
    assert max(relative_errors([out, lse, *gradients], exact)) < tolerance
    assert relative_errors([lse], [exact[1]])[0] < 1e-5


def test_merged_blocks_equal_the_whole():
    grad_out, q, k, v = _rectangle(11, 26, (4, 2, 8))
    cuts = [slice(0, 3), slice(3, 4), slice(4, 26)]
    out, lse = attention_block(q, k[cuts[0]], v[cuts[0]], block_mask="all")
    for cut in cuts[1:]:
        merge_lse_(out, lse, *attention_block(q, k[cut], v[cut], block_mask="all"))
    expected = _whole(grad_out, q, k, v, "all")
    shares = [attention_block_backward(grad_out, q, k[cut], v[cut], out, lse, block_mask="all") for cut in cuts]
    dq = torch.stack([share[0] for share in shares]).sum(0)
    dk, dv = (torch.cat([share[i] for share in shares]) for i in (1, 2))
    assert max(relative_errors([out, dq, dk, dv], expected)) < 1e-12


def _random_mask(queries, keys, batch):
    """Pairs at random. Query 1 sees nothing in sample 0, query 0 sees all."""
    mask = torch.rand(batch, queries, keys, generator=torch.Generator().manual_seed(7)) < 0.5
    mask[0, 1] = False
    mask[:, 0] = True
    return mask


def _masked(q, k, v, mask):
    """The definition, with zeros where a query sees nothing."""
    scores = torch.einsum("sbad,tbad->bast", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) / q.shape[3] ** 0.5
    weights = scores.masked_fill(~mask.unsqueeze(1), float("-inf")).softmax(-1)
    weights = torch.where(mask.unsqueeze(1), weights, 0.0)
    return torch.einsum("bast,tbad->sbad", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(5, 3), (6, 6), (70, 130)])
@pytest.mark.parametrize("kernel", [CpuFlash(), MathBlockAttention()], ids=lambda k: type(k).__name__)
def test_a_query_that_sees_nothing_of_a_block(kernel, queries, keys, batch):
    _, q, k, v = _rectangle(queries, keys, (4, 2, 8))
    mask = _random_mask(queries, keys, batch)
    out, lse = kernel.forward(q, k, v, mask)
    assert relative_errors([out], [_masked(q, k, v, mask.expand(2, -1, -1))])[0] < 1e-12
    assert torch.equal(lse == float("-inf"), ~mask.any(-1).expand(2, -1).t()[:, :, None].expand(-1, -1, 4))
    assert out[1, 0].abs().max() == 0


@pytest.mark.parametrize("kernel", [CpuFlash(), MathBlockAttention()], ids=lambda k: type(k).__name__)
def test_merged_masked_blocks_equal_the_whole(kernel):
    grad_out, q, k, v = _rectangle(9, 30, (4, 2, 8))
    mask = _random_mask(9, 30, 2)
    mask[:, :, 12:20] = False
    mask[:, :, 0] = True
    cuts = [slice(0, 5), slice(5, 12), slice(12, 20), slice(20, 30)]
    out, lse = kernel.forward(q, k[cuts[0]], v[cuts[0]], mask[:, :, cuts[0]])
    for cut in cuts[1:]:
        merge_lse_(out, lse, *kernel.forward(q, k[cut], v[cut], mask[:, :, cut]))
    expected = with_gradients(lambda *x: _masked(*x, mask), grad_out, q, k, v)
    shares = [kernel.backward(grad_out, q, k[cut], v[cut], out, lse, mask[:, :, cut]) for cut in cuts]
    dq = torch.stack([share[0] for share in shares]).sum(0)
    dk, dv = (torch.cat([share[i] for share in shares]) for i in (1, 2))
    assert max(relative_errors([out, dq, dk, dv], expected)) < 1e-12
    assert shares[2][1].abs().max() == 0


def test_merging_survives_scores_of_very_different_size():
    _, q, k, v = _rectangle(4, 6, (2, 2, 8))
    k[3:] *= 1e4
    out, lse = attention_block(q, k[:3], v[:3], block_mask="all")
    merge_lse_(out, lse, *attention_block(q, k[3:], v[3:], block_mask="all"))
    whole, whole_lse = MathBlockAttention().forward(q, k, v, "all")
    assert max(relative_errors([out, lse], [whole, whole_lse])) < 1e-12


def test_the_log_sum_exp_of_only_a_part_is_noticed():
    grad_out, q, k, v = _rectangle(4, 6, (2, 2, 8))
    out, _ = attention_block(q, k, v, block_mask="all")
    _, part_lse = attention_block(q, k[:3], v[:3], block_mask="all")
    given = attention_block_backward(grad_out, q, k, v, out, part_lse, block_mask="all")
    assert min(relative_errors(list(given), _whole(grad_out, q, k, v, "all")[1:])) > 1e-2


def test_any_strides_are_read_right():
    given = _rectangle(7, 9, (4, 2, 8))
    turned = [x.transpose(0, 3).contiguous().transpose(0, 3) for x in given]
    assert all(x.stride(-1) != 1 for x in turned)
    grad_out, q, k, v = turned
    out, lse = attention_block(q, k, v, block_mask="all")
    turned_out = out.transpose(0, 3).contiguous().transpose(0, 3)
    gradients = attention_block_backward(grad_out, q, k, v, turned_out, lse.contiguous(), block_mask="all")
    assert max(relative_errors([out, *gradients], _whole(*given, "all"))) < 1e-12


def test_a_gradient_without_memory_of_its_own():
    _, q, k, v = _rectangle(7, 7, (4, 2, 8))
    ones = torch.ones((), dtype=q.dtype).expand_as(q)
    out, lse = attention_block(q, k, v, block_mask="causal")
    given = attention_block_backward(ones, q, k, v, out, lse, block_mask="causal")
    expected = _whole(ones.contiguous(), q, k, v, "causal")[1:]
    for x, y in zip(given, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "kernel"),
    [
        ("cpu", torch.float64, 5, CpuFlash),
        ("cpu", torch.float32, 64, CpuFlash),
        ("cpu", torch.bfloat16, 64, CpuFlash),
        ("cuda", torch.bfloat16, 64, CudaFlash),
        ("cuda", torch.float16, 256, CudaFlash),
        ("cuda", torch.bfloat16, 20, MathBlockAttention),
        ("cuda", torch.bfloat16, 264, MathBlockAttention),
        ("cuda", torch.float32, 64, MathBlockAttention),
        ("meta", torch.float32, 64, MathBlockAttention),
    ],
)
def test_the_kernel_follows_device_and_type(device, dtype, head_size, kernel):
    with FakeTensorMode():
        q = torch.empty(4, 2, 4, head_size, dtype=dtype, device=device)
    assert type(block_kernel(q, "causal")) is kernel
    masked = CpuFlash if device == "cpu" else MathBlockAttention
    assert type(block_kernel(q, torch.ones(1, 4, 4, dtype=torch.bool))) is masked


@pytest.mark.parametrize("seen", ["all", "causal"])
def test_the_cuda_kernel_takes_and_gives_these_shapes(seen):
    with FakeTensorMode():
        q, grad_out = (torch.empty(6, 2, 4, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (
            torch.empty(6 if seen == "causal" else 9, 2, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        out, lse = attention_block(q, k, v, block_mask=seen)
        gradients = attention_block_backward(grad_out, q, k, v, out, lse, block_mask=seen)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (6, 2, 4), torch.float32)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("window", [0, 1, 3, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_the_cuda_kernel_takes_windows_and_documents(window, packed):
    with FakeTensorMode():
        q, grad_out = (torch.empty(6, 2, 4, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(6, 2, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        bounds = DocumentBounds(((0, 1, 6), (0, 6)))
        documents = PackedDocuments(bounds, torch.empty(6, 2, device="cuda"))
        # A build of torch without CUDA copies nothing there.
        documents.cached(("cu_seqlens", 0, 6), lambda: torch.empty(4, dtype=torch.int32, device="cuda"))
        spec = AttentionMaskSpec(window, documents if packed else None)
        mask = spec.local_mask(0, q)
        assert not CudaFlash.supports(q.float())
        out, lse = attention_block(q, k, v, block_mask=mask)
        gradients = attention_block_backward(grad_out, q, k, v, out, lse, block_mask=mask)
    assert isinstance(mask, FlashMask) == (window > 0 or packed)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (6, 2, 4), torch.float32)
    assert packed or out.stride() == q.stride()
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_windows_and_documents_through_the_cuda_operators(window, with_sinks, packed, batch):
    """The CPU runs the calls of the CUDA kernel with operators of the same schemas."""
    inputs = random_attention(3, 21, batch, (4, 2, 8)) + ([random_sinks(4, 4)] if with_sinks else [])
    starts = random_starts(5, 21, batch) if packed else None
    with reference_flash() as flash:
        pairs = list(causal_attention_pairs(inputs, window, starts))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    assert flash.calls == (["forward", "backward"] if window or packed or with_sinks else [])


def test_samples_of_one_document_need_no_segments():
    whole = PackedDocuments(DocumentBounds(((0, 6), (0, 6))), torch.zeros(6, 2, dtype=torch.int64))
    assert AttentionMaskSpec(0, whole).local_mask(0, torch.empty(6, 2, 4, 16)) == "causal"
    assert not AttentionMaskSpec(0, whole).needs_mask(6)


def test_segments_by_hand():
    documents = PackedDocuments.of_starts(torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5], [0] * 8]).t())
    assert documents.bounds == DocumentBounds(((0, 2, 5, 8), (0, 8)))
    for first, length, limits, longest in [
        (0, 8, [0, 2, 5, 8, 16], 8),
        (2, 4, [0, 3, 4, 8], 4),
        (1, 1, [0, 1, 2], 1),
        (5, 3, [0, 3, 6], 3),
    ]:
        segments = documents.segments(first, length)
        assert (segments.cu_seqlens.tolist(), segments.max_length) == (limits, longest)
        assert segments.cu_seqlens is documents.segments(first, length).cu_seqlens
        assert documents.divide(first, length) == (len(limits) > 3)
    assert [documents.document_at(0, i) for i in (0, 1, 2, 7)] == [range(2), range(2), range(2, 5), range(5, 8)]


@pytest.mark.parametrize(
    ("window", "queries", "keys"), [(3, range(8, 10), range(2, 8)), (5, range(8, 11), range(4, 7))]
)
def test_past_windows_through_the_cuda_operators(window, queries, keys):
    grad_out, q, k, v = _rectangle(len(queries), len(keys), (4, 2, 8))
    spec = AttentionMaskSpec(window)
    expected = _through(MathBlockAttention(), grad_out, q, k, v, spec.mask(torch.tensor(queries), torch.tensor(keys)))
    with reference_flash():
        mask = spec.past_mask(queries, keys, q)
        assert isinstance(mask, FlashMask)
        given = _through(CudaFlash(), grad_out, q, k, v, mask)
    for x, y in zip(given, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seen", ["all", "causal"])
def test_blocks_through_the_cuda_operators(seen):
    given = _rectangle(9, 9 if seen == "causal" else 12, (4, 2, 8))
    expected = _through(MathBlockAttention(), *given, seen)
    with reference_flash() as flash:
        mine = _through(CudaFlash(), *given, seen)
    for x, y in zip(mine, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert flash.calls == ["forward", "backward"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [1, 40, 200])
def test_windows_of_the_cuda_kernel_equal_the_masked_twin(window):
    given = [x.to("cuda", torch.bfloat16) for x in _rectangle(300, 300, (4, 2, 16))]
    positions = torch.arange(300, device="cuda")
    distance = positions[:, None] - positions
    mask = ((distance >= 0) & (distance < window)).unsqueeze(0)
    exact = _through(MathBlockAttention(), *(x.double() for x in given), mask)
    for x, y in zip(_through(CudaFlash(), *given, FlashMask(True, window - 1)), exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("batch", [1, 2])
def test_documents_of_the_cuda_kernel_equal_the_masked_twin(window, batch):
    given = [x.to("cuda", torch.bfloat16) for x in _rectangle(300, 300, (4, 2, 16), batch)]
    spec = AttentionMaskSpec(window, PackedDocuments.of_starts(random_starts(5, 300, batch).cuda()))
    mask = spec.local_mask(0, given[1])
    assert isinstance(mask, FlashMask)
    positions = torch.arange(300, device="cuda")
    exact = _through(MathBlockAttention(), *(x.double() for x in given), spec.mask(positions, positions))
    for x, y in zip(_through(CudaFlash(), *given, mask), exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_past_windows_of_the_cuda_kernel_equal_the_masked_twin():
    queries, keys, spec = range(400, 549), range(100, 350), AttentionMaskSpec(200)
    given = [x.to("cuda", torch.bfloat16) for x in _rectangle(len(queries), len(keys), (4, 2, 16))]
    mask = spec.past_mask(queries, keys, given[1])
    assert isinstance(mask, FlashMask)
    seen = spec.mask(*(torch.tensor(x, device="cuda") for x in (queries, keys)))
    exact = _through(MathBlockAttention(), *(x.double() for x in given), seen)
    for x, y in zip(_through(CudaFlash(), *given, mask), exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("queries", "keys", "seen"), SIZES)
def test_cuda_kernel_equals_the_plain_twin(queries, keys, seen):
    given = [x.to("cuda", torch.bfloat16) for x in _rectangle(queries, keys, (4, 2, 16))]
    exact = _through(MathBlockAttention(), *(x.double() for x in given), seen)
    for x, y in zip(_through(CudaFlash(), *given, seen), exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=3e-2, atol=3e-2)
