"""Test that a step with a communicator for each purpose, as on CUDA, equals a step with shared ones."""

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each


def _train(cfg: Config, separates: bool) -> list[tuple[float, float]]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"), separates_purposes=separates)
    fsdp = groups.expert_mesh.get_group("edp"), groups.dense_mesh.get_group("dp_cp")
    assert (fsdp[1] is not groups.attn.dp_cp.handle) == separates
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    size = cfg.train.global_batch_size
    results = [training.run(sharder.batch(i * size), i + 1) for i in range(2)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize("zero", [3, *slow([(0,)])])
def test_a_step_does_not_depend_on_the_communicators(pool, zero):
    cfg = tiny(world_size=4, cp=2, ep=2, zero=zero)
    shared, separate = run_each(pool, 4, _train, (cfg, False), (cfg, True))
    assert separate == shared
