"""Routing replay (`rl.replay`): training sends each token to the experts that sampling chose, under every mapping."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.errors import ConfigError
from moefold.parallel.rollout_router_replay import RolloutReplay
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.rl.rollout_loader import RolloutLoader
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from moefold.validate.exactness import replays_routing
from tests.models import edit_model
from tests.ops.c_kernels import needs_compiler
from tests.train.policy_runs import recipe, records, train_policy, under, weights

pytestmark = pytest.mark.parity


def replaying(cfg: Config, folder: Path, replay: str, **parallel: int) -> Config:
    cfg = under(cfg, folder, **parallel)
    return replace(cfg, rl=replace(cfg.rl, replay=replay))


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_exact_sampling_has_the_same_gradients_with_and_without_replay(pool, tmp_path, dtype):
    """Training chooses the experts of sampling anyway, so weights and moments are equal by bits."""
    cfg = recipe(tmp_path, 1)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype, kernels="c"), moe=replace(cfg.moe, aux_loss=0.01))
    runs = [replaying(cfg, tmp_path / replay, replay) for replay in ("on", "off")]
    for one in runs:
        pool.run(1, train_policy, one)
    assert records(runs[0])[0]["rl"]["mismatch_equal"] == 1
    assert weights(runs[0]) == weights(runs[1])
    assert weights(runs[0])


def _flipped(fetch: Any) -> Any:
    """Replace the recorded choices by other experts before they are sent."""

    def fetch_flipped(self: Any, tokens: Any, recorded: Any) -> Any:
        return fetch(self, tokens, {number: 3 - ids for number, ids in recorded.items()})

    return fetch_flipped


def _train_flipped(cfg: Config) -> int:
    before = RolloutReplay.fetch
    RolloutReplay.fetch = _flipped(before)  # type: ignore[method-assign]
    try:
        return train_policy(cfg)
    finally:
        RolloutReplay.fetch = before  # type: ignore[method-assign]


def test_other_choices_are_noticed(pool, tmp_path):
    """In float64, replay changes nothing; with the choices of other experts the log-probabilities are far off."""
    cfg = replaying(recipe(tmp_path, 1), tmp_path / "right", "on")
    pool.run(1, train_policy, cfg)
    assert records(cfg)[0]["rl"]["mismatch_max"] < 1e-12
    wrong = replaying(cfg, tmp_path / "wrong", "on")
    with pytest.raises(Exception, match=r"differ by 0\.\d+ nats a token, .* likely causes: kernels that compute"):
        pool.run(1, _train_flipped, wrong)
    assert records(wrong) == []


@pytest.mark.parametrize(
    ("mapping", "sampling"),
    [
        ({"world_size": 2, "pp": 2}, {"tp": 2, "pp": 1, "etp": 2}),
        pytest.param(
            {"world_size": 4, "pp": 2, "tp": 2, "ep": 2}, {"tp": 1, "pp": 1, "etp": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"world_size": 4, "cp": 2, "tp": 2, "zero": 3}, {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "ep": 4}, {"pp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"world_size": 4, "pp": 2, "cp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"world_size": 3}, {}, marks=pytest.mark.slow),
        pytest.param({"world_size": 2, "ep": 2}, {"experts": "whole"}, marks=pytest.mark.slow),
        pytest.param({"world_size": 2, "ep": 2}, {"experts": "fetch"}, marks=pytest.mark.slow),
    ],
)
def test_choices_follow_their_tokens_under_every_pair_of_mappings(pool, tmp_path, mapping, sampling):
    """Sampling takes other experts than the routers would choose in training, which replays them."""
    cfg = recipe(tmp_path, 2, updates=2, objective="clip")
    batch = 12 if mapping["world_size"] == 3 else 16
    cfg = replace(cfg, train=replace(cfg.train, micro_batch_size=1, global_batch_size=batch))
    one = replaying(cfg, tmp_path / "one", "on")
    pool.run(1, _train_biased, one)
    many = replaying(cfg, tmp_path / "many", "on", **mapping)
    many = replace(many, rollout=replace(many.rollout, **sampling))
    pool.run(mapping["world_size"], _train_biased, many)
    for expected, found in zip(records(one), records(many), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
        # Replayed choices give the sampler's log-probabilities, although the routers would choose others.
        if found["step"] == 1:
            assert found["rl"]["mismatch_max"] < 1e-12


@pytest.mark.slow
def test_without_replay_the_other_experts_of_sampling_are_noticed(pool, tmp_path):
    cfg = replaying(recipe(tmp_path, 1), tmp_path / "without", "off")
    cfg = replace(cfg, rl=replace(cfg.rl, mismatch_limit=100.0))
    pool.run(1, _train_biased, cfg)
    assert records(cfg)[0]["rl"]["mismatch_max"] > 1e-3


class BiasedSampling:
    """Override of a router in sampling, which sends each token to the experts after the chosen ones."""

    in_evaluation = True
    only_records = False

    def __init__(self, inner: Any, num_experts: int) -> None:
        self._inner = inner
        self._num_experts = num_experts

    def apply(self, ids_TK: Any, sample_ids_B: Any) -> Any:
        shifted = (ids_TK + 1) % self._num_experts
        return shifted if self._inner is None else self._inner.apply(shifted, sample_ids_B)


def _train_biased(cfg: Config) -> int:
    """Train, with routers that choose other experts in sampling than in training."""
    from moefold.parallel.paged_decoder import PagedDecoder

    enter = PagedDecoder.__enter__

    def enter_biased(self: Any) -> Any:
        decoder = enter(self)
        for stage in self._chain.stages:
            for layer in stage.moe_layers().values():
                is_recording = self._records_routing
                inner = layer.router.override if is_recording else None
                self._overrides.append((layer.router, layer.router.override))
                layer.router.override = BiasedSampling(inner, 4)
        return decoder

    PagedDecoder.__enter__ = enter_biased  # type: ignore[method-assign]
    try:
        return train_policy(cfg)
    finally:
        PagedDecoder.__enter__ = enter  # type: ignore[method-assign]


def test_replay_lowers_the_mismatch_of_another_tp(pool, tmp_path):
    """In bfloat16, tp=1 chooses other experts than tp=2 for some tokens, and these have the largest mismatch."""
    cfg = recipe(tmp_path, 1, mismatch_limit=2.0)
    cfg = replace(
        cfg,
        run=replace(cfg.run, dtype="bfloat16"),
        checkpoint=CheckpointConfig(every=0, at_end=False),
        model=edit_model(cfg.model, {"layers": 4, "ffn.moe.num_experts": 16, "ffn.moe.top_k": 2, "init_std": 0.4}),
        train=replace(cfg.train, global_batch_size=32),
        rollout=replace(cfg.rollout, tp=1),
    )
    found = {}
    for replay in ("off", "on"):
        one = replaying(cfg, tmp_path / replay, replay, world_size=2, tp=2)
        pool.run(2, train_policy, one)
        found[replay] = records(one)[0]["rl"]
    assert found["on"]["mismatch_mean"] < found["off"]["mismatch_mean"] / 2
    assert found["on"]["reward"] == found["off"]["reward"]


class CountReplays(Callback):
    """Keeps whether the loader replays, and its message."""

    def __init__(self) -> None:
        self.found: tuple[bool, str] = (False, "")

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        loader = context.data
        assert isinstance(loader, RolloutLoader)
        self.found = loader.sampling.replay is not None, loader.message


def _auto(cfg: Config) -> tuple[bool, str]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    callback = CountReplays()
    Trainer(cfg, groups, callbacks=[callback]).run(StopSignals())
    return callback.found


def test_auto_replays_where_sampling_is_inexact(pool, tmp_path):
    (found,) = pool.run(1, _auto, recipe(tmp_path, 1))
    assert found[0]
    assert "rl.replay='auto': training sends each token to the experts that sampling chose, as sampling" in found[1]


@pytest.mark.parametrize(
    ("is_exact", "rl", "model", "expected", "message"),
    [
        (True, {}, {}, False, ""),
        (False, {}, {}, True, "sampling differs by rounding"),
        (True, {"updates": 2}, {}, True, "rl.updates=2"),
        (
            False,
            {"updates": 2},
            {"ffn.moe.router.expert_bias": True},
            False,
            "moe.bias_update_rate=0.001 would count choices",
        ),
        (False, {"replay": "off"}, {}, False, ""),
        (False, {"staleness": 1}, {}, False, "rl.staleness=1 keep no expert choices"),
        (True, {"replay": "on"}, {}, True, ""),
        (False, {}, {"layers.ffn": "dense", "ffn.dense.intermediate_size": 16}, False, ""),
    ],
)
def test_routing_is_replayed_where_recipe_and_model_allow_it(tmp_path, is_exact, rl, model, expected, message):
    cfg = recipe(tmp_path, **rl)
    cfg = replace(cfg, model=edit_model(cfg.model, model))
    decision, text = replays_routing(cfg.model, cfg.moe, cfg.rl, is_exact=is_exact)
    assert decision == expected
    assert message in text
    assert bool(text) == bool(message)


def test_bias_updates_by_choices_of_older_weights_are_refused(tmp_path):
    cfg = recipe(tmp_path, updates=2, objective="clip", replay="on")
    cfg = replace(cfg, model=edit_model(cfg.model, {"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"}))
    with pytest.raises(ConfigError, match=r"rl\.replay='on' with rl\.updates=2 would update the expert bias"):
        check_config(cfg)
    check_config(replace(cfg, moe=replace(cfg.moe, bias_update_rate=0.0)))
