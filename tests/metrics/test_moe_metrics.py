"""The metrics of one layer from the totals of a step, against hand-worked values."""

import math

import pytest

from moefold.metrics.moe_metrics import MoELayerMetrics


def test_layer_metrics_by_hand() -> None:
    # Counts 6, 2, 0, 0: mean 2, deviations 4, 0, -2, -2, so the standard deviation is sqrt(24 / 4).
    layer = MoELayerMetrics.from_totals(
        5, counts=[6, 2, 0, 0], dropped=2, entropy=3.0, top_k=2, losses=(0.5, 0.25), bias=[0.1, -0.2, 0.0, 0.3]
    )
    assert (layer.layer, layer.load, layer.dead_experts, layer.dropped_fraction) == (5, 3.0, 2, 0.25)
    assert layer.load_cv == pytest.approx(math.sqrt(6) / 2)
    # 8 copies of top-2 routing are 4 tokens.
    assert layer.router_entropy == pytest.approx(0.75)
    assert (layer.aux_loss, layer.z_loss, layer.bias_min, layer.bias_max) == (0.5, 0.25, -0.2, 0.3)


def test_an_even_load_and_no_bias() -> None:
    layer = MoELayerMetrics.from_totals(0, counts=[3, 3], dropped=0, entropy=0.0, top_k=1, losses=(0.0, 0.0))
    assert (layer.load, layer.load_cv, layer.dead_experts, layer.dropped_fraction) == (1.0, 0.0, 0, 0.0)
    assert (layer.bias_min, layer.bias_max) == (None, None)
