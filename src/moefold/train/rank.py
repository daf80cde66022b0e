"""What each rank of `moefold train` runs."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from moefold.config.checks import check_config
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.crew import joined_crew
from moefold.launch.failure import FailingRank
from moefold.launch.place import Place
from moefold.launch.ranks import joined
from moefold.launch.settings import settings_note
from moefold.launch.watchdog import Watchdog
from moefold.parallel.groups import ParallelGroups
from moefold.train.run_folder import RunFolder, choose_run_folder
from moefold.train.run_lock import LONGEST_WAIT_S, RunLock
from moefold.train.stop import StopSignals
from moefold.train.trainer import Trainer


def train_rank(cfg: Config, notes: Sequence[str], place: Place, device_type: str) -> int:
    """Join the job, train, leave; returns the exit status of the job.

    Args:
        cfg: the recipe.
        notes: lines for the log, before all others.
        place: of this rank.
        device_type: "cpu" or "cuda".

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
        groups = ParallelGroups.create(layout, device, watchdog.record)
        watchdog.record.enter("choosing the folder of the run")
        # A network disk may look different on another machine: the first rank's view counts.
        folder = joined_crew().gather(choose_run_folder(cfg) if place.rank == 0 else None)[0]
        notes = (folder.note, *notes, settings_note(place, device_type))
        trainer = Trainer(folder.cfg, groups, [note for note in notes if note])
        with ExitStack() as alone:
            if place.rank == 0:
                watchdog.record.enter("locking the folders of the run")
                for lock in _locks(folder.cfg):
                    alone.enter_context(lock)
                _refuse_other_run(cfg, folder)
            return trainer.run(stop)


def _refuse_other_run(cfg: Config, folder: RunFolder) -> None:
    """Refuse a folder that another job wrote into while this one came up or waited for its lock.

    Raises:
        ConfigError: the recipe would now write into another folder.
    """
    run_dir = folder.cfg.run.dir
    if choose_run_folder(cfg, held=Path(run_dir)).cfg.run.dir != run_dir:
        raise ConfigError(
            f"run.dir={run_dir!r} now holds the run of another job, which wrote there while this one waited and left "
            "nothing to go on from; start the same command again, which takes a folder of its own"
        )


def _locks(cfg: Config) -> list[RunLock]:
    """One for each folder that the run writes into."""
    # The other ranks wait for it, and must not take the first one for late.
    wait_s = min(LONGEST_WAIT_S, cfg.faults.timeout_s / 2)
    folders = {"run.dir": cfg.run.dir}
    if cfg.checkpoint.dir and cfg.checkpoint.saves:
        folders["checkpoint.dir"] = cfg.checkpoint.dir
    return [RunLock(Path(folder), key, wait_s) for key, folder in folders.items()]
