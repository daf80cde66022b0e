"""Words for kinds of layers say whether a model has MoE and dense layers."""

import pytest

from tests.models import model_of


@pytest.mark.parametrize(
    ("words", "moe", "dense"), [("moe", True, False), ("dense", False, True), ("dense, 3 moe", True, True)]
)
def test_kinds_of_layers_of_words(words, moe, dense):
    model = model_of({"layers.ffn": words})
    assert (model.has_moe_layers, model.has_dense_layers) == (moe, dense)
