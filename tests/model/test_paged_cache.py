"""Attention over pages gives each token the result of the whole sequence."""

import pytest
import torch

from moefold.comm.private_torch import cuda_flash_attention_reads_pages
from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.model.attention import CausalAttention
from moefold.model.layer_cache import CurrentPass, PassRows
from moefold.model.paged_cache import KeyLimits, PagedAttention
from moefold.ops.paged_flash import FlashPages, device_refusal
from tests.model.paged_rows import SMALL_PAGE, pass_rows, to_rows
from tests.ops.reference_flash import paged_reference_flash

S, B, A, G, D = 9, 3, 4, 2, 6
PAGES = 3


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(S, B, heads, D, generator=generator, dtype=torch.float64) for heads in (A, G, G))


@pytest.mark.parametrize(("window", "chunk_size"), [(0, 0), (1, 0), (3, 0), (20, 0), (0, 3), (0, 4), (2, 5)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        [(9, 9, 9)],
        [(i, i, i) for i in range(1, 10)],
        [(4, 1, 2), (5, 7, 2), (5, 8, 9), (9, 9, 9)],
    ],
    ids=["whole", "one by one", "uneven"],
)
def test_attention_in_pieces_over_pages_equals_one_pass(ends, window, chunk_size, has_sinks):
    q, k, v = tokens(0)
    sinks = torch.linspace(-1, 2, A, dtype=torch.float64) if has_sinks else None
    expected = CausalAttention(window, chunk_size)(q, k, v, None, sinks)
    current_pass = CurrentPass()
    core = PagedAttention(current_pass, B * PAGES, SMALL_PAGE, KeyLimits(window, chunk_size))
    starts = (0,) * B
    for stops in ends:
        spans = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
        current_pass.rows = pass_rows(spans, PAGES)
        found = core(*(to_rows(x, spans) for x in (q, k, v)), None, sinks)
        torch.testing.assert_close(found, to_rows(expected, spans))
        starts = stops
    assert core.nbytes == 2 * B * PAGES * SMALL_PAGE * G * D * 8
    # Where no kernel reads pages, none is said to be switched off.
    assert core.page_path == ""


def test_copied_pages_hold_the_values_of_the_old_ones():
    q, k, v = tokens(1)
    current_pass = CurrentPass()
    core = PagedAttention(current_pass, B * PAGES, SMALL_PAGE)
    spans = [range(6), range(0), range(0)]
    current_pass.rows = pass_rows(spans, PAGES)
    core(*(to_rows(x, spans) for x in (q, k, v)))
    # The second sample takes over the first one's tokens: its pages are 1, 4, 7.
    core.copy_pages(torch.tensor([0, 3]), torch.tensor([1, 4]))
    spans = [range(0), range(6, 7), range(0)]
    current_pass.rows = pass_rows(spans, PAGES)
    found = core(*(x[6:7, :1] for x in (q, k, v)))
    torch.testing.assert_close(found[0, 0], CausalAttention()(*(x[:7, :1] for x in (q, k, v)))[-1, 0])


class FirstPages:
    """A kernel over whole pages that attends to the first `lengths` positions of each row's table."""

    def supports(self, *tensors: torch.Tensor) -> bool:
        return True

    def __call__(self, q, key_pages, value_pages, tables, lengths, window, sinks):
        rows = []
        for query, table, length in zip(q, tables, lengths.tolist(), strict=True):
            keys = key_pages[table].permute(0, 3, 1, 2).flatten(0, 1)[:length]
            values = value_pages[table].transpose(1, 2).flatten(0, 1)[:length]
            rows.append(CausalAttention()(query.expand(length, 1, A, D), keys[:, None], values[:, None])[-1, 0])
        return torch.stack(rows)


@pytest.mark.parametrize("chunk_size", [PAGE_POSITIONS, 2 * PAGE_POSITIONS])
def test_a_kernel_gets_the_pages_of_the_chunk(chunk_size):
    length = 4 * PAGE_POSITIONS + 5
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, 1, heads, D, generator=generator, dtype=torch.float64) for heads in (A, G, G))
    expected = CausalAttention(0, chunk_size)(q, k, v)
    current_pass = CurrentPass()
    core = PagedAttention(current_pass, 5, PAGE_POSITIONS, KeyLimits(0, chunk_size), FirstPages())
    tables = torch.tensor([[3, 1, 4, 0, 2]], dtype=torch.int32)
    for start, stop in (
        (0, PAGE_POSITIONS + 3),
        (PAGE_POSITIONS + 3, 2 * PAGE_POSITIONS),
        (2 * PAGE_POSITIONS, length - 1),
        (length - 1, length),
    ):
        positions = torch.arange(start, stop)
        slots = tables[0, positions // PAGE_POSITIONS].long() * PAGE_POSITIONS + positions % PAGE_POSITIONS
        current_pass.rows = PassRows(slots, positions, tables, [stop - start], [stop - 1])
        found = core(*(x[start:stop] for x in (q, k, v)))
        torch.testing.assert_close(found, expected[start:stop])


@pytest.mark.skipif(not cuda_flash_attention_reads_pages(), reason="torch takes no block table")
@pytest.mark.parametrize("window", [0, 1, 200])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_pages_that_flash_attention_reads_equal_the_whole(window, has_sinks):
    """Chunks of a prompt, then single tokens, of two samples whose pages alternate."""
    length, positions = 600, 256
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, 2, heads, D, generator=generator, dtype=torch.float64) for heads in (A, G, G))
    sinks = torch.linspace(-1, 2, A, dtype=torch.float64) if has_sinks else None
    expected = CausalAttention(window)(q, k, v, None, sinks)
    current_pass = CurrentPass()
    core = PagedAttention(current_pass, 6, positions, KeyLimits(window), segment_kernel=FlashPages())
    tables = torch.tensor([[0, 2, 4], [5, 3, 1]], dtype=torch.int32)
    ends = [(300, 1), (598, 257), (599, 258), (600, 600)]
    device_refusal.cache_clear()
    with paged_reference_flash() as flash:
        starts = (0, 0)
        for stops in ends:
            spans = [range(*span) for span in zip(starts, stops, strict=True)]
            place = torch.tensor([p for span in spans for p in span])
            counts = [len(span) for span in spans]
            pages = tables[torch.arange(2).repeat_interleave(torch.tensor(counts)), place // positions].long()
            lasts = [span[-1] for span in spans]
            current_pass.rows = PassRows(pages * positions + place % positions, place, tables, counts, lasts)
            found = core(*(to_rows(x, spans) for x in (q, k, v)), None, sinks)
            torch.testing.assert_close(found, to_rows(expected, spans))
            starts = stops
        # The probe calls it first.
        assert flash.calls == ["forward"] * (4 + len(ends))
    assert core.page_path == "read by flash attention"
    device_refusal.cache_clear()
