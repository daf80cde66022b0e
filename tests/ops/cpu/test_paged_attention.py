"""Decoding from pages has the bits of causal attention over the whole sample, with vectors of every width."""

import pytest
import torch

from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.ops.block_attention import FlashMask
from moefold.ops.cpu.build import CompilerError
from moefold.ops.paged_attention import new_pages, write_pages
from tests.ops.c_kernels import PROCESSORS, WITH_AND_WITHOUT_PAIRS, in_each_type, needs_compiler, same_bits_on_threads

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=WITH_AND_WITHOUT_PAIRS)
def kernels(request, built_with):
    from moefold.ops.cpu.attention import CAttention
    from moefold.ops.cpu.paged_attention import CPagedAttention

    def build():
        attention = CAttention()
        return attention, CPagedAttention(attention)

    return built_with(build, PROCESSORS[request.param])


class _Cache:
    """Random samples whose keys and values lie in shuffled pages. Slots that were not written hold NaN."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tokens, samples, heads, groups, d = shape
        generator = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = (
            torch.randn(tokens, samples, count, d, generator=generator).to(dtype) for count in (heads, groups, groups)
        )
        pages_each = -(-tokens // PAGE_POSITIONS)
        order = torch.randperm(samples * pages_each + 2, generator=generator)[: samples * pages_each]
        self.table = order.to(torch.int32).view(samples, pages_each)
        self.pages = new_pages(samples * pages_each + 2, groups, d, self.q)
        for pages in self.pages:
            pages.fill_(float("nan"))
        position = torch.arange(tokens)
        for sample in range(samples):
            page_R = self.table[sample].long()[position // PAGE_POSITIONS]
            write_pages(*self.pages, self.k[:, sample], self.v[:, sample], page_R, position % PAGE_POSITIONS)

    def rows(self, positions: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Return (queries, page table, lengths) of (position, sample) of each row."""
        at, sample = torch.tensor(positions).t()
        return self.q[at, sample], self.table[sample], (at + 1).to(torch.int32)


SHAPES = [(1, 1, 1, 1, 8), (65, 2, 4, 2, 24), (130, 3, 6, 1, 33), (200, 2, 2, 2, 256), (70, 1, 40, 1, 16)]
"""Tokens, samples, query heads, key/value heads and head dim. The last one has more heads than a tile has queries."""


@in_each_type
@pytest.mark.parametrize("limits", ["causal", "window", "sinks", "window and sinks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_has_the_bits_of_training(kernels, shape, limits, dtype):
    attention, paged = kernels
    cache = _Cache(shape, dtype)
    tokens, samples, heads, _, _ = shape
    window = 17 if "window" in limits else 0
    sinks = torch.linspace(-1, 2, heads).to(dtype) if "sinks" in limits else None
    mask = FlashMask(True, window - 1) if window else "causal"
    expected, _ = attention.forward(cache.q, cache.k, cache.v, mask, sinks)
    # All tokens of a sample together, then tokens of different samples in turn, then in an order without runs.
    by_sample = [(t, b) for b in range(samples) for t in range(tokens)]
    in_turn = [(t, b) for t in range(tokens) for b in range(samples)]
    for rows in (by_sample, in_turn, by_sample[::-1], by_sample[::7]):
        q, table, lengths = cache.rows(rows)
        found = paged(q, *cache.pages, table, lengths, window, sinks)
        at, sample = torch.tensor(rows).t()
        assert torch.equal(found, expected[at, sample])


def test_rows_may_share_a_prefix_of_pages(kernels):
    """Two samples with one prompt: the first page is shared, the second is not."""
    _, paged = kernels
    cache = _Cache((100, 2, 4, 2, 24), torch.float32)
    shared = cache.table.clone()
    shared[1, 0] = shared[0, 0]
    q = cache.q[[99, 99, 40, 41], [0, 1, 0, 1]]
    table = shared[[0, 1, 0, 1]].contiguous()
    lengths = torch.tensor([100, 100, 41, 42], dtype=torch.int32)
    together = paged(q, *cache.pages, table, lengths)
    for r in range(4):
        row = slice(r, r + 1)
        assert torch.equal(together[row], paged(q[row], *cache.pages, table[row], lengths[row]))


@in_each_type
@pytest.mark.parametrize(("groups", "heads", "window"), [(2, 4, 0), (1, 40, 70)])
def test_rows_of_any_lengths_that_share_pages_have_the_bits_of_each_by_itself(kernels, groups, heads, window, dtype):
    _, paged = kernels
    num_rows, num_pages, d = 30, 20, 24
    generator = torch.Generator().manual_seed(heads)
    table = torch.randint(num_pages, (num_rows, 4), generator=generator, dtype=torch.int32)
    for row in range(1, num_rows):
        # A row shares with the row before from none to all of its pages.
        num_shared = int(torch.randint(5, (1,), generator=generator))
        table[row, :num_shared] = table[row - 1, :num_shared]
    lengths = torch.randint(1, 4 * PAGE_POSITIONS + 1, (num_rows,), generator=generator, dtype=torch.int32)
    keys, values = (
        torch.randn(num_pages, groups, *sizes, generator=generator).to(dtype)
        for sizes in ((d, PAGE_POSITIONS), (PAGE_POSITIONS, d))
    )
    q = torch.randn(num_rows, heads, d, generator=generator).to(dtype)
    together = paged(q, keys, values, table, lengths, window)
    assert together.isfinite().all()
    for row in range(num_rows):
        one = slice(row, row + 1)
        assert torch.equal(paged(q[one], keys, values, table[one], lengths[one], window), together[one])


def test_threads_change_no_bit(kernels):
    _, paged = kernels
    cache = _Cache((200, 4, 8, 2, 64), torch.float32)
    q, table, lengths = cache.rows([(t, b) for b in range(4) for t in range(0, 200, 5)])
    same_bits_on_threads(lambda: [paged(q, *cache.pages, table, lengths)])


def test_no_rows_and_other_types(kernels):
    _, paged = kernels
    cache = _Cache((5, 1, 2, 1, 8), torch.float32)
    q, table, lengths = cache.rows([(4, 0)])
    assert paged(q[:0], *cache.pages, table[:0], lengths[:0]).shape == (0, 2, 8)
    k, v = cache.k[0], cache.v[0]
    assert paged.supports(q, k, v)
    assert not paged.supports(q.double(), k.double(), v.double())
    assert not paged.supports(q.bfloat16(), k, v)
    assert not paged.supports(q, k, v[..., :4])


def test_an_attention_with_other_bits_is_noticed(kernels):
    from moefold.ops.cpu.paged_attention import CPagedAttention

    attention, _ = kernels

    class _Shifted:
        def forward(self, q, k, v, mask):
            out, lse = attention.forward(q, k, v, mask)
            return out * (1 + 2.0**-8), lse

    with pytest.raises(CompilerError, match="other bits"):
        CPagedAttention(_Shifted())
