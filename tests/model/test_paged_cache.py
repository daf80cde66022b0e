"""Attention over pages gives each token what the whole sequence gives it."""

import pytest
import torch

from moefold.model.attention import CausalAttention
from moefold.model.paged_cache import CurrentPass, PagedAttention
from tests.model.paged_rows import PAGE_POSITIONS, pass_rows, to_rows

S, B, A, G, D = 9, 3, 4, 2, 6
PAGES = 3


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(S, B, heads, D, generator=generator, dtype=torch.float64) for heads in (A, G, G))


@pytest.mark.parametrize("window", [0, 1, 3, 20])
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
def test_pieces_equal_the_whole(ends, window, has_sinks):
    q, k, v = tokens(0)
    sinks = torch.linspace(-1, 2, A, dtype=torch.float64) if has_sinks else None
    expected = CausalAttention(window)(q, k, v, None, sinks)
    current_pass = CurrentPass()
    core = PagedAttention(current_pass, B * PAGES, PAGE_POSITIONS, window)
    starts = (0,) * B
    for stops in ends:
        spans = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
        current_pass.rows = pass_rows(spans, PAGES)
        found = core(*(to_rows(x, spans) for x in (q, k, v)), None, sinks)
        torch.testing.assert_close(found, to_rows(expected, spans))
        starts = stops
    assert core.nbytes == 2 * B * PAGES * PAGE_POSITIONS * G * D * 8


def test_copied_pages_hold_what_the_old_ones_held():
    q, k, v = tokens(1)
    current_pass = CurrentPass()
    core = PagedAttention(current_pass, B * PAGES, PAGE_POSITIONS)
    spans = [range(6), range(0), range(0)]
    current_pass.rows = pass_rows(spans, PAGES)
    core(*(to_rows(x, spans) for x in (q, k, v)))
    # The second sample takes over the first one's tokens: its pages are 1, 4, 7.
    core.copy_pages(torch.tensor([0, 3]), torch.tensor([1, 4]))
    spans = [range(0), range(6, 7), range(0)]
    current_pass.rows = pass_rows(spans, PAGES)
    found = core(*(x[6:7, :1] for x in (q, k, v)))
    torch.testing.assert_close(found[0, 0], CausalAttention()(*(x[:7, :1] for x in (q, k, v)))[-1, 0])
