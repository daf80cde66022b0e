"""Keys that an optimizer without gradients and moments does not read are refused."""

import pytest

from tests.validate.idle_keys import assert_read

SPSA = "train.optimizer=spsa"
SITES = ["sites.count=2"]
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
    ("sites.keep_local=0.5", [*SITES, "sites.method=co2"], [*SITES, "sites.overlap=29"]),
    ("sites.residual=0.5", SITES, [*SITES, "sites.method=sparseloco"]),
    ("sites.method=spes", ["sites.count=1"], SITES),
]


@pytest.mark.parametrize(("word", "idle", "active"), CASES, ids=[word for word, _, _ in CASES])
def test_a_setting_without_effect_is_refused_and_one_with_effect_accepted(word, idle, active):
    assert_read(word, idle, active)
