"""Shapes of the benchmark: their recipes, their operations, and how experts are cut to fit."""

import pytest

from moefold.bench.shape import bench_config, bench_shapes, count_weights, max_fitting_experts, step_flops
from moefold.errors import ConfigError


def test_every_shape_has_a_recipe():
    assert {"small", "mixtral-8x22b-layer", "qwen2-57b-a14b-stack", "deepseek-v3-layer"} <= set(bench_shapes())
    for shape in bench_shapes().values():
        for tokens in (4096, 16384):
            cfg = bench_config(shape, dtype="bfloat16", tokens=tokens)
            assert cfg.train.tokens_per_step == tokens
            assert [layer.ffn.kind for layer in cfg.model.decoder_layers] == ["moe"] * {
                "model": 4,
                "layer": 1,
                "stack": 2,
            }[shape.part]


def test_operations_of_a_mixtral_layer():
    """By hand: 3 passes x 2 operations x tokens x (2 experts of 3 matrices of 4096 x 14336, a router of 4096 x 8)."""
    shape = bench_shapes()["mixtral-8x7b-layer"]
    cfg = bench_config(shape, dtype="bfloat16")
    assert step_flops(cfg.model, cfg.train, "layer") == 6 * 4096 * (2 * 3 * 4096 * 14336 + 4096 * 8)
    assert count_weights(cfg.model, "layer") == 8 * 3 * 4096 * 14336 + 4096 * 8


def test_experts_are_halved_until_they_fit():
    shape = bench_shapes()["mixtral-8x7b-layer"]
    one_expert = 3 * 4096 * 14336 * 4
    assert max_fitting_experts(shape, 2, 9 * one_expert * 1.5) == 8
    assert max_fitting_experts(shape, 2, 7 * one_expert * 1.5) == 4
    with pytest.raises(ConfigError, match="even with 2 experts"):
        max_fitting_experts(shape, 2, 1 * one_expert * 1.5)


@pytest.mark.parametrize(
    ("tokens", "experts", "message"),
    [(5000, 0, "must be a multiple of 4096"), (4096, 4, "must be at least 16"), (4096, 20, "groups")],
)
def test_sizes_that_cannot_be_are_refused(tokens, experts, message):
    with pytest.raises(ConfigError, match=message):
        bench_config(bench_shapes()["deepseek-v3-layer"], dtype="float32", tokens=tokens, experts=experts)
