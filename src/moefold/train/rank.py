"""What each rank of `moefold train` runs."""

import os

import torch

from moefold.config.checks import check_config
from moefold.config.schema import Config
from moefold.launch.failure import FailingRank
from moefold.launch.place import Place
from moefold.launch.ranks import joined
from moefold.launch.watchdog import Watchdog
from moefold.parallel.groups import ParallelGroups
from moefold.train.stop import StopSignals
from moefold.train.trainer import Trainer


def train_rank(cfg: Config, place: Place, device_type: str) -> int:
    """Join the job, train, leave; returns the exit status of the job.

    Raises:
        ConfigError: what only training could show is wrong, in a job of one rank; ranks of many print it and exit.
    """
    layout = check_config(cfg)
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    stop = StopSignals(announces=place.rank == 0)
    limit_s = cfg.faults.timeout_s
    watchdog = Watchdog(place, limit_s, device_type)
    failing = FailingRank(place, lambda: any(stop.flags), watchdog)
    with failing, joined(place, device_type, limit_s, watchdog.start) as device, watchdog:
        return Trainer(cfg, ParallelGroups.create(layout, device, watchdog.record)).run(stop)
