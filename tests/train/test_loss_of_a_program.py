"""Reinforcement learning with a loss of the program: an objective of its own in the frame, and refusals."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import Tensor

import moefold
from moefold.config.groups.policy import ObjectivePart, PolicyTokens
from moefold.config.sections.rl import RLConfig
from moefold.objectives.recipe_loss import policy_loss

WORDS = (
    "run.steps=1", "run.device=cpu", "parallel.world_size=1", "model.preset=tiny", "data.kind=task", "data.task=sort",
    "data.task_size=2", "train.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=2",
    "rl.group_size=4", "rollout.max_tokens=3", "rl.length_penalty_from=1", "moe.aux_loss=0.0",
    "train.lr=1e-3", "train.warmup_steps=0",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Doubled(ObjectivePart):
    """Twice the policy gradient, and a metric."""

    reads_sampler: ClassVar[bool] = False
    mean_metrics: ClassVar[tuple[str, ...]] = ("doubled",)

    def token_loss(self, tokens: PolicyTokens) -> Tensor:
        """Return -2 * A * log_probs."""
        tokens.record_mean("doubled", tokens.advantages.double() * 0 + 2)
        return -2 * tokens.advantages * tokens.log_probs


def _own():
    return replace(policy_loss(RLConfig()), objective=Doubled())


def test_rollouts_are_trained_on_with_a_loss_of_the_program(tmp_path):
    outcomes = [
        moefold.train_model(moefold.load_recipe(None, [*WORDS, f"run.dir={tmp_path / name}"]), loss=loss)
        for name, loss in (("recipe", None), ("program", _own()))
    ]
    recipe, program = (outcome.metrics for outcome in outcomes)
    assert recipe["loss"] != 0
    assert program["loss"] == pytest.approx(2 * recipe["loss"], rel=1e-5)
    assert program["rl"]["doubled"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": ("labels", "mood")}, "reads the columns \\['mood'\\]; rollouts have labels, weights"),
        ({"columns": ("labels", "reference_log_probs")}, ".* and rl.kl=0.0 has no reference model; set rl.kl"),
        ({}, "has no attribute `columns`"),
    ],
)
def test_a_loss_that_rollouts_cannot_feed_is_refused(tmp_path, change, message):
    own = type("Own", (), {"terms": ("own",), **change})()
    with pytest.raises(moefold.ConfigError, match=f"^loss=Own {message}"):
        moefold.train_model(moefold.load_recipe(None, [*WORDS, f"run.dir={tmp_path}"]), loss=own)


def test_a_metric_of_the_frame_is_not_a_metric_of_an_objective():
    part = type("Clashing", (Doubled,), {"mean_metrics": ("kl",)})
    with pytest.raises(ValueError, match="records \\['kl'\\], which the loss records itself"):
        replace(policy_loss(RLConfig()), objective=part())
