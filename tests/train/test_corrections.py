"""Corrections for a sampler whose log-probabilities differ from training (`rl.correction`), in runs."""

from dataclasses import replace

import pytest

from moefold.config.base.part import make_part
from moefold.config.sections.checkpoint import CheckpointConfig
from tests.slow import slow
from tests.train.policy_runs import recipe, records, train_policy, under

pytestmark = pytest.mark.parity

TWO_UPDATES = {"updates": 2, "objective": make_part("objective", "clip", clip_low=0.02, clip_high=0.02)}


@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "pp": 2},
        pytest.param({"world_size": 4, "pp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "cp": 2, "ep": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"world_size": 2, "etp": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_trainer_log_probs_come_from_the_weights_that_sampled(pool, tmp_path, mapping):
    """In float64 they equal the sampler's, also for the second update. Newer weights would give other ones."""
    cfg = recipe(tmp_path, 2, correction="clamp", kl=0.1, **TWO_UPDATES)
    pool.run(1, train_policy, cfg)
    other = under(cfg, tmp_path / "mapped", **mapping)
    pool.run(mapping["world_size"], train_policy, other)
    for expected, found in zip(records(cfg), records(other), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
        for record in (expected, found):
            assert 0 < record["rl"]["mismatch_max"] < 1e-12
            assert record["rl"]["corrected"] == 0
            has_newer_weights = record["step"] % 2 == 0
            assert (record["rl"]["ratio_max"] > 1 + 1e-6) == has_newer_weights
            assert (record["rl"]["clipped"] > 0) == has_newer_weights


# The last stage runs its micro-batches out of order.
SWAPPED = """0F0,0F1,0F2,0F3,0B1,0B0,0B3,0B2
1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2
"""


def test_log_probs_are_those_of_their_rows_where_a_schedule_swaps_micro_batches(pool, tmp_path):
    cfg = recipe(tmp_path, 2, correction="clamp", kl=0.1, **TWO_UPDATES)
    pool.run(1, train_policy, cfg)
    (tmp_path / "swapped.csv").write_text(SWAPPED)
    schedule = make_part("schedule", "csv", path=str(tmp_path / "swapped.csv"))
    other = under(cfg, tmp_path / "mapped", world_size=2, pp=2, schedule=schedule)
    pool.run(2, train_policy, other)
    for expected, found in zip(records(cfg), records(other), strict=True):
        assert found["rl"]["mismatch_max"] < 1e-12
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)


def test_a_correction_without_a_mismatch_changes_no_gradient(pool, tmp_path):
    """The ratio against the trainer's log-probabilities is that against the sampler's."""
    cfg = recipe(tmp_path, 2, **TWO_UPDATES)
    pool.run(1, train_policy, cfg)
    corrected = under(recipe(tmp_path, 2, correction="mask", **TWO_UPDATES), tmp_path / "corrected")
    pool.run(1, train_policy, corrected)
    for expected, found in zip(records(cfg), records(corrected), strict=True):
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
        assert found["rl"]["clipped"] == expected["rl"]["clipped"]


@pytest.mark.parametrize(
    ("correction", "low", "high"),
    [
        ("mask", 0.99, 1.01),
        *slow([("clamp", 0.0, 1.0), ("sequence_mask", 0.998, 1.002)]),
    ],
)
def test_rollouts_of_another_tp_are_corrected(pool, tmp_path, correction, low, high):
    """In bfloat16 tp=1 samples with other log-probabilities than tp=2 trains on."""
    plain = under(recipe(tmp_path, 1), tmp_path / "plain", world_size=2, tp=2)
    plain = replace(
        plain,
        run=replace(plain.run, dtype="bfloat16"),
        rollout=replace(plain.rollout, tp=1),
        checkpoint=CheckpointConfig(every=0, at_end=False),
    )
    pool.run(2, train_policy, plain)
    corrected = replace(
        under(plain, tmp_path / "corrected", world_size=2, tp=2),
        rl=replace(plain.rl, correction=make_part("correction", correction, low=low, high=high)),
    )
    pool.run(2, train_policy, corrected)
    first, expected = records(corrected)[0], records(plain)[0]
    # The same rollouts, and another gradient.
    assert first["rl"]["mismatch_mean"] == expected["rl"]["mismatch_mean"] > 1e-4
    assert first["rl"]["reward"] == expected["rl"]["reward"]
    assert "corrected" not in expected["rl"]
    assert 0 < first["rl"]["corrected"] < 1
    assert first["grad_norm"] != expected["grad_norm"]
