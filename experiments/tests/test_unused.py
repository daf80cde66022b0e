"""Keys that an optimizer without gradients and moments does not read are refused."""

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config

SPSA = "train.optimizer=spsa"
CASES = [
    ("train.reset_moments_every=5", [SPSA], ["train.optimizer=adamw"]),
    ("train.clip_grad=0.5", [SPSA], ["train.optimizer=adamw"]),
    ('train.recompute=["layer"]', [SPSA], ["train.optimizer=adamw"]),
    (
        'train.offload=["layer"]',
        [SPSA, "train.offload_to=ssd", "train.offload_dir=/tmp"],
        ["train.optimizer=adamw", "train.offload_to=ssd", "train.offload_dir=/tmp"],
    ),
    (
        "train.offload_optimizer=ssd",
        [SPSA, "train.offload_dir=/tmp"],
        ["train.optimizer=adamw", "train.offload_dir=/tmp"],
    ),
    (
        "train.memory_budget_gib=1.0",
        [SPSA],
        ["train.optimizer=adamw", 'train.recompute=["auto"]'],
    ),
]


@pytest.mark.parametrize(("word", "idle", "active"), CASES, ids=[word for word, _, _ in CASES])
def test_a_setting_without_effect_is_refused_and_one_with_effect_accepted(word, idle, active):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*idle, word])
    key = word.split("=")[0]
    assert str(error.value).startswith(f"{key}=")
    assert " has no effect: " in str(error.value)
    assert str(error.value).endswith(f"or leave {key.split('.')[1]} out")
    load_config(None, [*active, word])
