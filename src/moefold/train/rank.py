"""What each rank of `moefold train` runs."""

import os
import sys

import torch

from moefold.config.checks import check_config
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.place import Place
from moefold.launch.ranks import EXIT_USER_ERROR, joined
from moefold.parallel.groups import ParallelGroups
from moefold.train.trainer import Trainer


def train_rank(cfg: Config, place: Place, device_type: str) -> int:
    """Join the job, train, leave; returns the exit status of the job."""
    layout = check_config(cfg)
    with joined(place, device_type) as device:
        if cfg.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        try:
            return Trainer(cfg, ParallelGroups.create(layout, device)).run()
        except ConfigError as error:
            if place.world_size == 1:
                raise
            print(f"moefold: error: {error}", file=sys.stderr, flush=True)
            # The other ranks wait for this one: leaving at once lets the launcher end them.
            os._exit(EXIT_USER_ERROR)
