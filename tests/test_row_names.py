"""Rows of parametrised tests are named by their values."""

import pytest
import torch

from tests.conftest import MAX_ROW_NAME, pytest_make_parametrize_id


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"world_size": 4, "tp": 2, "overlap_tp": True}, "world_size4-tp2-overlap_tpTrue"),
        ({"recompute": ("moe", "norms"), "offload": ()}, "recomputemoe-norms-offloadnone"),
        ([1, 0.5, None, torch.bfloat16, max], "1-0.5-None-bfloat16-max"),
        ({}, "none"),
        (("é\n",), "\\xe9\\n"),
        ("x" * 99, None),
        ((object(), 1), None),
        (["x" * 99], "x" * MAX_ROW_NAME),
        (lambda x: x[0].tolist(), "x[0].tolist()"),
        ([1, lambda: max(1, 2)], "1-max(1, 2)"),
        (lambda: (1, *range(20), *range(21), *range(22), *range(23), *range(24), *range(25), *range(26),
                  2), None),
    ],
)  # fmt: skip
def test_a_row_has_the_name_of_its_values(value, name):
    """Without addresses, which differ between the workers; pytest itself names what has no words."""
    assert pytest_make_parametrize_id(value) == name
