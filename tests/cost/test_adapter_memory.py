"""Adapters and their saved tensors, by formula against the memory tracker of real steps."""

from dataclasses import replace

import pytest

from moefold.config.sections.lora import LoraConfig
from moefold.validate.config import check_config
from tests.cost.measured_memory import LATENT, WITHIN, assert_states, formulas_of
from tests.cost.measured_memory import measure_one_rank as on_one_rank
from tests.cost.measured_memory import memory_config as config_of


@pytest.mark.parametrize(
    ("dtype", "model", "lora", "train"),
    [
        ("float32", {}, {"rank": 4}, {}),
        (
            "bfloat16",
            LATENT,
            {"rank": 8, "targets": ("attention", "experts.w_up")},
            {"optimizer": "muon", "recompute": ("moe",)},
        ),
    ],
)
def test_only_adapters_have_gradients_and_moments(dtype, model, lora, train):
    cfg = replace(config_of(dtype, model=model, train=train), lora=LoraConfig(**lora))
    check_config(cfg)
    rank = on_one_rank(cfg)
    assert_states(cfg, [rank])
    assert 0 < rank.after["gradients"] < rank.after["weights"] / 4
    # Gradients of weights are not computed, and the formulas of the layers count them.
    assert rank.activations < (1 + WITHIN) * formulas_of(cfg)[0].activations.total
