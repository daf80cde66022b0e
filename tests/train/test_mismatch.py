"""Default of rl.mismatch_limit: by dtype and by whether sampling has the bits of training."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.train.rl.mismatch import mismatch_advice, mismatch_limit


@pytest.mark.parametrize(
    ("dtype", "is_exact", "limit"),
    [
        ("float32", True, 1e-6),
        ("bfloat16", True, 1e-6),
        ("float64", False, 1e-6),
        ("float32", False, 0.01),
        ("bfloat16", False, 0.1),
    ],
)
def test_the_limit_follows_the_rounding(dtype, is_exact, limit):
    cfg = Config(run=RunConfig(dtype=dtype))
    assert mismatch_limit(cfg.run, cfg.moe, cfg.rl, is_exact=is_exact) == limit
    recipe = replace(cfg, rl=RLConfig(mismatch_limit=0.5))
    assert mismatch_limit(recipe.run, recipe.moe, recipe.rl, is_exact=is_exact) == 0.5


def test_rollouts_of_older_weights_may_differ_by_training():
    cfg = Config(run=RunConfig(dtype="float32"))
    assert mismatch_limit(cfg.run, cfg.moe, cfg.rl, is_exact=True, is_stale=True) == 1.0
    recipe = replace(cfg, rl=RLConfig(mismatch_limit=0.5))
    assert mismatch_limit(recipe.run, recipe.moe, recipe.rl, is_exact=True, is_stale=True) == 1.0
    given = replace(cfg, rl=RLConfig(mismatch_limit=3.0))
    assert mismatch_limit(given.run, given.moe, given.rl, is_exact=True, is_stale=True) == 3.0


def test_dispatch_in_few_bits_rounds_as_coarsely_in_any_dtype():
    cfg = Config(run=RunConfig(dtype="float32"), moe=MoEConfig(dispatch_precision="fp8-blockwise"))
    assert mismatch_limit(cfg.run, cfg.moe, cfg.rl, is_exact=False) == 0.1


def test_the_causes_depend_on_the_sampler():
    own = Config(run=RunConfig(dtype="bfloat16"))
    served = replace(own, rollout=RolloutConfig(engine="vllm", folder="hf"))
    assert "rl.replay='on'" in mismatch_advice(own.run, own.model, own.parallel, own.train, own.rl, own.rollout)
    recipe = replace(own, rl=RLConfig(replay="on"))
    assert "rl.replay" not in mismatch_advice(
        recipe.run, recipe.model, recipe.parallel, recipe.train, recipe.rl, recipe.rollout
    )
    cfg = replace(own, rl=RLConfig(staleness=2))
    stale = mismatch_advice(cfg.run, cfg.model, cfg.parallel, cfg.train, cfg.rl, cfg.rollout)
    assert "since they sampled (train.lr=" in stale
    assert "lower train.lr or rl.staleness=2, or set" in stale
    assert "rl.replay" not in stale
    assert "run.dtype='float32'" in mismatch_advice(own.run, own.model, own.parallel, own.train, own.rl, own.rollout)
    given = replace(own, run=RunConfig(dtype="float32"))
    assert "run.dtype" not in mismatch_advice(
        given.run, given.model, given.parallel, given.train, given.rl, given.rollout
    )
    other_cfg = replace(own, rl=RLConfig(group_size=4), rollout=RolloutConfig(ranks=1))
    assert "rollout.ranks" in mismatch_advice(
        other_cfg.run, other_cfg.model, other_cfg.parallel, other_cfg.train, other_cfg.rl, other_cfg.rollout
    )
    assert "rollout.folder='hf'" not in mismatch_advice(
        own.run, own.model, own.parallel, own.train, own.rl, own.rollout
    )
    assert "rollout.folder='hf' has another RoPE" in mismatch_advice(
        served.run, served.model, served.parallel, served.train, served.rl, served.rollout
    )
