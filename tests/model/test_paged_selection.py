"""Selections of the last pass are guesses for the samples that continue, and change no selection."""

import torch

from moefold.model.paged_selection import LastSelections, select_slots
from moefold.ops.sparse_attention import IndexTensors
from tests.model.paged_rows import SMALL_PAGE, pass_rows

TOP_K, HEADS, DIM, SAMPLES, PAGES = 3, 2, 5, 3, 8


def test_a_sample_gets_its_own_last_selection_and_others_none():
    last = LastSelections()
    assert last.previous_selections(torch.tensor([4])) is None
    last.store(torch.tensor([10, 30, 20]), torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32))
    assert last.previous_selections(torch.tensor([20, 11, 10, -1])).tolist() == [[5, 6], [-1, -1], [1, 2], [-1, -1]]
    last.clear()
    assert last.previous_selections(torch.tensor([10])) is None


def test_guesses_reach_the_samples_that_continue_and_change_nothing():
    torch.manual_seed(0)
    keys = torch.randn(SAMPLES * PAGES, SMALL_PAGE, DIM)
    last = LastSelections()
    guessed = 0
    for position in range(10, PAGES * SMALL_PAGE):
        # The second sample pauses in every third pass, and the third is filled by several rows in one.
        spans = [range(position, position + 1)] * SAMPLES
        if position % 3 == 0:
            spans[1] = range(0)
        if position == 16:
            spans[2] = range(position - 4, position + 1)
        rows = pass_rows(spans, PAGES)
        index = IndexTensors(
            torch.randn(len(rows.slots_R), 1, HEADS, DIM), torch.randn(len(rows.slots_R), 1, HEADS), keys
        )
        expected = select_slots(index, keys, rows, TOP_K, 0, LastSelections())
        continued = last.previous_selections(rows.slots_R - 1)
        assert torch.equal(select_slots(index, keys, rows, TOP_K, 0, last), expected)
        guessed += 0 if continued is None else int((continued[:, 0] >= 0).sum())
        singles = rows.rows_of_singles
        kept = last.previous_selections(rows.slots_R[singles])
        if position < 4 * TOP_K:
            assert kept is None
        else:
            pages = rows.tables_NP[rows.single_rows].gather(1, kept.long() // SMALL_PAGE)
            assert torch.equal(pages * SMALL_PAGE + kept % SMALL_PAGE, expected[singles])
    assert guessed > 20
