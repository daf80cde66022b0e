"""Attention over pages by the flash operator equals the definition, and is refused with its reason elsewhere."""

import pytest
import torch

from moefold.comm.private_torch import cuda_flash_attention, cuda_flash_attention_reads_pages
from moefold.ops import paged_flash
from moefold.ops.paged_flash import FlashPages, device_refusal, exact_segments, find_disagreement, probe_case
from tests.ops.reference_flash import paged_reference_flash

CPU = torch.device("cpu")
SIZES = ((3, 300), (1, 1), (260, 700), (1, 256))
needs_block_table = pytest.mark.skipif(not cuda_flash_attention_reads_pages(), reason="torch takes no block table")


@needs_block_table
@pytest.mark.parametrize("window", [0, 1, 100])
@pytest.mark.parametrize("sizes", [SIZES, ((1, 40), (1, 513))], ids=["mixed", "single tokens"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_segments_equal_the_definition(sizes, window, has_sinks):
    q, pages, segments = probe_case(sizes, CPU, (4, 2, 16))
    sinks = torch.linspace(-1, 2, 4) if has_sinks else None
    exact, lse = (torch.cat(parts) for parts in zip(*exact_segments(q, pages, segments, window), strict=True))
    if has_sinks:
        exact = exact * (lse.exp() / (lse.exp() + sinks.double().exp())).unsqueeze(-1)
    with paged_reference_flash() as flash:
        found = FlashPages()(q, pages, segments, window, sinks)
    assert flash.calls == ["forward"]
    torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=1e-2)


@needs_block_table
def test_a_fixed_order_splits_no_keys_and_single_tokens_have_no_limit():
    given = []

    def record(*args, **kwargs):
        given.append((args, kwargs))
        return args[0], torch.zeros(4, len(args[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_flash, "cuda_flash_attention", lambda: record)
        for sizes, window in ((SIZES, 0), (((1, 40), (1, 513)), 0), (((1, 40), (1, 513)), 7)):
            FlashPages(fixed_order=window == 7)(*probe_case(sizes, CPU), window)
    options = [(args[8], kwargs["window_size_left"], kwargs["window_size_right"]) for args, kwargs in given]
    assert options == [(True, -1, 0), (False, -1, -1), (True, 6, 0)]
    assert [kwargs.get("num_splits") for _, kwargs in given] == [None, None, 1]


@needs_block_table
def test_the_operator_of_torch_takes_these_arguments():
    """By torch's own function of shapes: a CPU has no kernel."""
    q, pages, segments = probe_case(SIZES, CPU)
    on_meta = [x.to("meta") for x in (q, *pages)]
    starts = [x.to("meta") for x in (segments.starts, segments.key_starts)]
    out, lse, *_ = cuda_flash_attention()(
        *on_meta, *starts, segments.most_rows, segments.most_keys, 0.0, True, False, window_size_left=6,
        window_size_right=0, seqused_k=segments.key_counts_N.to("meta"), block_table=segments.tables_NP.to("meta"),
        num_splits=1,
    )  # fmt: skip
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((q.shape[1], len(q)), torch.float32)


@needs_block_table
def test_the_probe_accepts_the_definition_and_notices_wrong_operators(monkeypatch):
    with paged_reference_flash() as flash:
        assert find_disagreement(CPU) == ""
        assert flash.calls == ["forward"] * 4
        forward = flash.forward

        def without_window(*args, **kwargs):
            return forward(*args, **kwargs | {"window_size_left": -1})

        def other_layout(*args, **kwargs):
            out, lse, *rest = forward(*args, **kwargs)
            return out, lse.t(), *rest

        def refuse(*args, **kwargs):
            raise RuntimeError("Paged KV cache block size must be divisible by 512\nat line 1")

        def refuse_silently(*args, **kwargs):
            raise RuntimeError

        expected = {
            without_window: "differs from the definition by",
            other_layout: "differs from the definition by inf (pass 0, window 0)",
            refuse: "raises 'Paged KV cache block size must be divisible by 512' (pass 0, window 0)",
            refuse_silently: "raises 'RuntimeError' (pass 0, window 0)",
        }
        for operator, message in expected.items():
            monkeypatch.setattr(paged_flash, "cuda_flash_attention", lambda operator=operator: operator)
            assert message in find_disagreement(CPU)


def test_unsupported_arguments_are_named(monkeypatch):
    q, k, v = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64), torch.zeros(3, 2, 64)
    reader = FlashPages()
    assert reader.unsupported_reason(q, k, v, 256) == "flash attention does not take heads of 64 in torch.float32"
    device_refusal.cache_clear()
    with paged_reference_flash():
        assert "values of 32 with keys of 64" in reader.unsupported_reason(q, k, v[..., :32], 256)
        assert "pages of 64 positions" in reader.unsupported_reason(q, k, v, 64)
        monkeypatch.setattr(paged_flash, "cuda_flash_attention_reads_pages", lambda: False)
        assert reader.unsupported_reason(q, k, v, 256).endswith("takes no block table")
    device_refusal.cache_clear()
