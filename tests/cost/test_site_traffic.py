"""Bytes of a round against the boxes of every rank; tests/train/test_sites.py holds them to measured rounds."""

import pytest

from tests.cost.site_bytes import MODELS, assert_bytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "keys",
    [
        *({"precision": precision} for precision in ("float32", "bfloat16", "int8", "fp4")),
        {"moments": "average"},
    ],
)
def test_bytes_of_a_site_equal_the_boxes_of_its_ranks(model, keys):
    assert_bytes(model, keys)
