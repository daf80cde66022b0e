"""Rows of a pass for tests: each sample has pages of its own, in a scattered order."""

from collections.abc import Sequence

import torch

from moefold.model.layer_cache import PassRows

SMALL_PAGE = 4
"""Positions of a page in these tests: a sample of a few tokens has several."""


def pass_rows(spans: Sequence[range], pages_per_sample: int) -> PassRows:
    """The next positions of each sample, one sample after another."""
    samples = [i for i, span in enumerate(spans) if span]
    # Page p of sample i: no two pages of a sample are neighbours.
    tables = torch.tensor([[p * len(spans) + i for p in range(pages_per_sample)] for i in samples], dtype=torch.int32)
    positions = torch.tensor([position for span in spans for position in span])
    counts = [len(spans[i]) for i in samples]
    segment_of_row = torch.arange(len(samples)).repeat_interleave(torch.tensor(counts))
    pages = tables[segment_of_row, positions // SMALL_PAGE].long()
    slots_R = pages * SMALL_PAGE + positions % SMALL_PAGE
    lasts = [spans[i][-1] for i in samples]
    return PassRows(slots_R, positions, tables, counts, lasts, torch.tensor(samples), max(samples) + 1)


def to_rows(x_SB: torch.Tensor, spans: Sequence[range]) -> torch.Tensor:
    """The tokens of each sample at these positions, [S, B, ...] -> [R, 1, ...]."""
    return torch.cat([x_SB[span.start : span.stop, i] for i, span in enumerate(spans)]).unsqueeze(1)
