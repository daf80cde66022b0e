"""Runs of a small recipe on one device, in this process."""

from dataclasses import replace

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.launch.ranks import init_distributed, single_rank_env
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.verify.recipes import tiny


def losses_on(cfg: Config, device_type: str, steps: int) -> list[float]:
    """Train some steps and return the loss of each; the rendezvous uses a free port, so that runs can be concurrent."""
    with init_distributed(single_rank_env(), device_type) as device:
        groups = ParallelGroups.create(check_config(cfg), device)
        model = parallelize(cfg, groups)
        training = TrainingStep(model, cfg)
        data = DataRequest.of(cfg).open()
        loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
        size = cfg.train.global_batch_size
        return [training.run(loader.batch(i * size), i + 1).loss for i in range(steps)]


def small_recipe(dtype: str, **sizes: object) -> Config:
    """Sizes that the kernels of GPUs take."""
    small = {"hidden_size": 64, "attention.head_dim": 16, "ffn.moe.intermediate_size": 64, "init_std": 0.05}
    cfg = tiny(model=small | sizes, train={"seq_len": 64, "global_batch_size": 8, "micro_batch_size": 4})
    return replace(cfg, run=replace(cfg.run, dtype=dtype, steps=20))
