"""Test that the next pass sees a change of the weights after an evaluation, because nothing stays gathered."""

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.model.local_param import local_tensor
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each


def _losses(cfg: Config, evaluates_first: bool):
    """The losses of an evaluation and of a step after a change of the weights."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0)
    if evaluates_first:
        training.evaluate([batch])
    for parameter in training.parameters.values():
        local_tensor(parameter.data).mul_(1.5)
    return training.evaluate([batch]), training.run(batch, 1).loss


@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 1},
        {"zero": 1, "ep": 2},
        {"zero": 3},
        {"zero": 1, "ep": 2, "overlap_experts": True},
        {"world_size": 4, "pp": 2, "zero": 2},
        *slow([({"zero": 0},)]),
    ],
)
def test_a_change_after_an_evaluation_is_seen(pool, mapping):
    cfg = tiny(**{"world_size": 2} | mapping)
    changed, expected = run_each(pool, cfg.parallel.world_size, _losses, (cfg, True), (cfg, False))
    assert changed == expected
