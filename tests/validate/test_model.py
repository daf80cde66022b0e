import pytest

from moefold.config.model import has_dense_layers, has_moe_layers
from tests.models import model_of


@pytest.mark.parametrize(("pattern", "moe", "dense"), [("M", True, False), ("D", False, True), ("DM3", True, True)])
def test_kinds_of_layers_of_a_pattern(pattern, moe, dense):
    model = model_of({"layer_pattern": pattern})
    assert (has_moe_layers(model), has_dense_layers(model)) == (moe, dense)
