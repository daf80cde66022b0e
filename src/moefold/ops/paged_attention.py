"""Attention of single tokens to the keys and values of a paged cache (arXiv:2309.06180 sec. 4): decoding.

A cache has P pages of N = `PAGE_POSITIONS` positions, for all key/value heads of this rank. Keys are [P, G, D, N] and
values [P, G, N, D], in one dtype. A row is one token of one sample. Position i of its sample is slot i % N of page
page_table[row, i // N]. The token attends to the first `length` positions, the last of which is its own. Consecutive
tokens of a sample, or samples with one prompt, may share pages.

`ops/cpu/paged_attention.py` implements it. Without a kernel, `model/paged_cache.py` gathers the pages of each row.
"""

from dataclasses import dataclass

from torch import Tensor

from moefold.cost.kv_cache import PAGE_POSITIONS


@dataclass(frozen=True)
class PageSegments:
    """Segments of a pass: consecutive rows of one sample. Their keys are the last keys of the sample."""

    starts: Tensor
    """First row of each segment, and the end of the last, int32 [N + 1]."""
    key_starts: Tensor
    """First key of each segment and the end of the last, if the keys were stored segment by segment, int32 [N + 1]."""
    key_counts_N: Tensor
    """Keys of each segment, int32 [N]."""
    tables_NP: Tensor
    """Pages of each segment, int32 [N, pages]."""
    most_rows: int
    most_keys: int


def new_pages(num_pages: int, num_groups: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate zero pages for keys [P, G, D, N] and values [P, G, N, D], on `like`'s device."""
    keys = like.new_zeros(num_pages, num_groups, head_dim, PAGE_POSITIONS)
    return keys, like.new_zeros(num_pages, num_groups, PAGE_POSITIONS, head_dim)


def write_pages(
    key_pages: Tensor, value_pages: Tensor, k_RGD: Tensor, v_RGD: Tensor, page_R: Tensor, slot_R: Tensor
) -> None:
    """Write the keys and values of rows into their slots, in place.

    Args:
        key_pages: [P, G, D, N].
        value_pages: [P, G, N, D].
        k_RGD: keys of the rows, [R, G, D].
        v_RGD: values, [R, G, D].
        page_R: page of each row, int64 [R].
        slot_R: slot in that page, int64 [R]. No two rows have the same slot of a page.
    """
    key_pages[page_R, :, :, slot_R] = k_RGD
    value_pages[page_R, :, slot_R] = v_RGD
