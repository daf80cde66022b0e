"""Entry point of each rank of `moefold train`."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.checkpoint_dir import checkpoint_folder, complete_checkpoints
from moefold.comm.groups import ParallelGroups, current_world
from moefold.comm.job_link import JobSplit
from moefold.config.schema import Config
from moefold.data import ProgramData
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.failure import RankErrorHandler
from moefold.launch.ranks import init_split_job
from moefold.launch.runtime_env import runtime_env_message
from moefold.launch.watchdog import Watchdog
from moefold.metrics.step_metrics import METRICS_FILE, read_records
from moefold.model.loss_function import LossFunction
from moefold.remote_path import is_remote, to_path
from moefold.train.callbacks.callback import Callback
from moefold.train.callbacks.metrics import StepReporting
from moefold.train.run_folder import MAX_LOCK_WAIT_S, RunFolder, RunLock, choose_run_folder
from moefold.train.sampling_worker import SamplingWorker, sampling_groups
from moefold.train.signals import StopSignals
from moefold.train.start import RunSetup
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config


@dataclass(frozen=True)
class TrainOutcome:
    """End of a training run."""

    status: int
    """Exit status: 0, or 128 + the number of the signal that stopped the run."""
    run_dir: Path
    """Run folder."""
    metrics: dict[str, Any] | None = None
    """Metrics of the last step, as in metrics.jsonl; None if this call trained no step, or on ranks that only sample.
    """
    checkpoint: Path | None = None
    """Newest complete checkpoint of the run; None if it saves none."""


@dataclass(frozen=True)
class ProgramParts:
    """Parts of a run that a Python program may replace; a job on GPUs pickles them for its ranks."""

    loss: LossFunction | None = None
    """The loss to minimise; None: next-token prediction."""
    data: ProgramData | None = None
    """The samples of data.kind="program"."""
    callbacks: Sequence[Callback] = ()
    """Further hooks of the training loop."""
    on_step: Callable[[dict[str, Any]], None] | None = None
    """Called with the metrics of each step, on each rank that trains."""


def finished_outcome(setup: RunSetup) -> TrainOutcome | None:
    """Return the outcome of a run whose checkpoint has all steps already; None if steps are left."""
    if not setup.is_finished:
        return None
    run_dir = Path(setup.folder.cfg.run.dir)
    records = [record for _, record in read_records(run_dir / METRICS_FILE) if record is not None]
    return TrainOutcome(0, run_dir, records[-1] if records else None, setup.resume)


def train_worker(cfg: Config, messages: Sequence[str], rank_env: RankEnv, device_type: str) -> int:
    """Join the job, train and leave; return the exit status of the job."""
    return train_on_rank(cfg, messages, ProgramParts(), rank_env, device_type).status


def train_on_rank(
    cfg: Config, messages: Sequence[str], program: ProgramParts, rank_env: RankEnv, device_type: str
) -> TrainOutcome:
    """Join the job, train and leave.

    Args:
        cfg: the recipe.
        messages: lines to log before all others.
        program: the parts that the calling program passes.
        rank_env: rank and world size of this process.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: training found an error in the recipe, in a job of one rank; in larger jobs, ranks print it and
            exit.
        RunError: the run failed, in a job of one rank or in a program's own process.
    """
    layout = check_config(cfg)
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    stop = StopSignals(announces=rank_env.rank == 0)
    limit_s = cfg.faults.timeout_s
    watchdog = Watchdog(rank_env, limit_s, device_type)
    failing = RankErrorHandler(rank_env, lambda: any(stop.flags), watchdog)
    split = JobSplit(cfg.parallel.world_size, cfg.rollout.ranks)
    joined = init_split_job(rank_env, split, device_type, limit_s, watchdog.start)
    with failing, joined as (device, link), watchdog, ExitStack() as cleanup:
        if link is not None:
            link.recorder = watchdog.flight_recorder
        if link is not None and split.samples(rank_env.rank):
            watchdog.flight_recorder.first_rank = split.num_training
            with stop:
                # The training ranks say when to stop, after a signal too.
                groups = sampling_groups(cfg, device, watchdog.flight_recorder)
                SamplingWorker(cfg, layout, groups, link).run()
            return TrainOutcome(0, Path(cfg.run.dir))
        groups = ParallelGroups.create(layout, device, watchdog.flight_recorder)
        cleanup.callback(groups.release)
        watchdog.flight_recorder.set_phase("choosing the folder of the run")
        # A network file system may look different on another machine, so rank 0 decides.
        folder = current_world().all_gather_object(choose_run_folder(cfg) if rank_env.rank == 0 else None)[0]
        reporting = StepReporting(program.on_step)
        messages = (folder.message, *messages, runtime_env_message(rank_env, device_type))
        trainer = Trainer(
            folder.cfg,
            groups,
            [message for message in messages if message],
            loss=program.loss,
            data=program.data,
            callbacks=(*program.callbacks, reporting),
            link=link,
        )
        with ExitStack() as locks:
            if rank_env.rank == 0:
                watchdog.flight_recorder.set_phase("locking the folders of the run")
                for lock in _run_locks(folder.cfg):
                    locks.enter_context(lock)
                _reject_other_run(cfg, folder)
            status = trainer.run(stop)
            watchdog.flight_recorder.set_phase("listing the checkpoints")
            return TrainOutcome(status, Path(folder.cfg.run.dir), reporting.last, _newest_checkpoint(folder.cfg))


def _newest_checkpoint(cfg: Config) -> Path | None:
    """Return the newest complete checkpoint of a run, as rank 0 lists it; collective."""
    world = current_world()
    saved = complete_checkpoints(checkpoint_folder(cfg)) if world.is_rank0 else []
    newest: str | None = world.all_gather_object(str(saved[-1]) if saved else None)[0]
    return None if newest is None else to_path(newest)


def _reject_other_run(cfg: Config, folder: RunFolder) -> None:
    """Reject a folder that another job wrote to while this job started or waited for the lock.

    Raises:
        ConfigError: the recipe would now choose another folder.
    """
    run_dir = folder.cfg.run.dir
    if choose_run_folder(cfg, locked_folder=Path(run_dir)).cfg.run.dir != run_dir:
        raise ConfigError(
            f"run.dir={run_dir!r} now holds the run of another job, which wrote there while this one waited and left "
            "nothing to go on from; start the same command again, which takes a folder of its own"
        )


def _run_locks(cfg: Config) -> list[RunLock]:
    """Return one lock for each folder that the run writes to."""
    # The other ranks wait for rank 0 meanwhile, and must not run into the timeout.
    wait_s = min(MAX_LOCK_WAIT_S, cfg.faults.timeout_s / 2)
    folders = {"run.dir": cfg.run.dir}
    # An object store has no locks: run.dir, on this machine or shared, keeps a second job out.
    if cfg.checkpoint.dir and cfg.checkpoint.saves and not is_remote(cfg.checkpoint.dir):
        folders["checkpoint.dir"] = cfg.checkpoint.dir
    return [RunLock(Path(folder), key, wait_s) for key, folder in folders.items()]
