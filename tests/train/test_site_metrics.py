"""Metrics of rounds: routing compared between sites, distance of the routers, loss of the outer weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.config.schema import Config
from moefold.model.moe.router_replay import ReplayedRouting
from moefold.parallel.parallelize import parallelize
from moefold.train.callbacks.callback import TrainingContext
from moefold.train.data_loader import DataLoader
from moefold.train.position import Position
from moefold.train.signals import StopSignals
from moefold.train.sites.routing_probe import RoutingProbe, count_equal_choices
from moefold.train.train_step import TrainingStep
from moefold.verify.compare import oracle_batch
from moefold.verify.distributed_run import create_groups, open_samples
from moefold.verify.oracle import Oracle
from tests.models import edit_model
from tests.train.site_jobs import STREAMING, recipe, train_sites
from tests.train.site_results import TOLERANCE, checkpoint, records, tensors
from tests.verify.recipes import tiny, without_mapping


def test_equal_choices_are_counted_as_sets_of_each_token():
    ids_MTK = torch.tensor([[[0, 1], [2, 3]], [[1, 0], [4, 3]], [[5, 6], [2, 3]]])
    assert count_equal_choices(ids_MTK, (0.3, 0.3, 0.4), 0) == (3 + 2, 8)
    assert count_equal_choices(ids_MTK, (0.5, 0.5, 0.0), 0) == (3, 4)
    assert count_equal_choices(ids_MTK, (0.0, 0.5, 0.5), 0) == (0, 0)


def _probe(cfg: Config) -> tuple[list[list[int]], list[bool]]:
    """Return the compared choices, and whether the router of each layer has its own override again."""
    groups = create_groups(cfg)
    training = TrainingStep(parallelize(cfg, groups), cfg)
    position = Position()
    loader = DataLoader(cfg, training.model, position)
    loader.open(None)
    run = TrainingContext(Path(cfg.run.dir), groups, training, loader, position, StopSignals(announces=False))
    overrides = {number: ReplayedRouting(0) for number in training.model.moe_layers()}
    for number, layer in training.model.moe_layers().items():
        layer.router.override = overrides[number]
    probe = RoutingProbe(cfg.model, cfg.train, 0).read(run)
    layers = training.model.moe_layers().items()
    return probe.values.tolist(), [layer.router.override is overrides[number] for number, layer in layers]


@pytest.mark.parity
def test_a_probe_compares_the_same_tokens_and_restores_routers(pool):
    cfg = tiny(data={"validation_fraction": 0.2}, train={"eval_every": 1, "global_batch_size": 4})
    ((choices, is_own),) = pool.run(1, _probe, cfg)
    assert is_own == [True, True]
    # Sites may have micro-batches of different sizes.
    wider = replace(cfg, train=replace(cfg.train, micro_batch_size=2))
    ((of_wider, _),) = pool.run(1, _probe, wider)
    assert of_wider == choices
    assert len(choices) > 100


@pytest.mark.parity
def test_a_probe_has_no_choices_of_layers_that_run_in_training_only(pool):
    evaluated = {"data": {"validation_fraction": 0.2}, "train": {"eval_every": 1, "global_batch_size": 4}}
    ((choices, _),) = pool.run(1, _probe, tiny(**evaluated))
    ((of_predicting, is_own),) = pool.run(1, _probe, tiny(model={"mtp_layers": 1}, **evaluated))
    assert is_own == [True, True, True]
    assert len(of_predicting) == len(choices)


def site_records(tmp_path, number: int) -> dict[int, dict[str, Any]]:
    return {record["step"]: record["sites"] for record in records(tmp_path / f"site-{number}") if record["sites"]}


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("mapping", [{}, {"world_size": 4, "pp": 2, "ep": 2, "zero": 3}])
def test_loss_of_the_outer_weights_equals_the_oracle(pool, tmp_path, mapping):
    """The sites go on from mixed weights: the validation loss of phi is another one than the site's."""
    cfg = recipe(tmp_path, 4, STREAMING, every=1, **mapping)
    cfg = replace(
        cfg,
        model=edit_model(cfg.model, {"ffn.moe.router.expert_bias": False}),
        moe=replace(cfg.moe, bias_update_rate=0.0),
        train=replace(cfg.train, eval_every=1, eval_samples=6),
        data=replace(cfg.data, validation_fraction=0.2),
    )
    train_sites(pool, cfg)
    alone = without_mapping(cfg)
    held_out = oracle_batch(open_samples(alone).validation, alone.train, range(6))
    for number in (0, 1):
        rounds = site_records(tmp_path, number)
        assert list(rounds) == [3, 4]
        for step, metrics in rounds.items():
            path = checkpoint(tmp_path / f"site-{number}", step)
            expected = Oracle(alone, tensors(path, "outer.weights.")).evaluate(held_out)
            assert metrics["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
        losses = {record["step"]: record["eval_loss"] for record in records(tmp_path / f"site-{number}")}
        assert losses[3] != pytest.approx(rounds[3]["eval_loss"], rel=1e-6)
        assert losses[4] == pytest.approx(rounds[4]["eval_loss"], rel=TOLERANCE)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mapping", "batch"), [({}, 4), ({"world_size": 4, "tp": 2, "ep": 4}, 4), ({"world_size": 4, "pp": 2, "cp": 2}, 16)]
)
def test_routing_is_equal_on_equal_sites_and_differs_on_trained_ones(pool, tmp_path, mapping, batch):
    for lr in (1e-13, 3e-2):
        cfg = recipe(tmp_path / str(lr), 2, {"count": 2, "every": 2}, **mapping)
        train = replace(cfg.train, lr=lr, eval_every=100, global_batch_size=batch)
        cfg = replace(cfg, train=train, moe=replace(cfg.moe, bias_update_rate=0.0))
        train_sites(pool, cfg)
        overlaps = [site_records(tmp_path / str(lr), number)[2] for number in (0, 1)]
        assert overlaps[0]["routing_overlap"] == overlaps[1]["routing_overlap"]
        assert overlaps[0]["router_distance"] == pytest.approx(overlaps[1]["router_distance"], rel=1e-6)
        if lr == 1e-13:
            assert overlaps[0]["routing_overlap"] == 1.0
            assert overlaps[0]["router_distance"] < 1e-10
        else:
            assert 0.1 < overlaps[0]["routing_overlap"] < 1.0
            assert overlaps[0]["router_distance"] > 1e-3


@pytest.mark.parity
@pytest.mark.slow
def test_sites_without_the_same_held_out_samples_have_no_overlap(pool, tmp_path):
    cfg = recipe(tmp_path, 2, {"count": 2, "every": 2})
    train_sites(pool, replace(cfg, train=replace(cfg.train, eval_every=0)))
    assert [site_records(tmp_path, number)[2]["routing_overlap"] for number in (0, 1)] == [None, None]
