"""Entry point of each rank of `moefold train`."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from moefold.checkpoint.find_checkpoint import checkpoint_folder, complete_checkpoints
from moefold.comm.groups import ParallelGroups, current_world
from moefold.comm.private_torch import without_process_groups
from moefold.comm.trainer_sampler_link import JobLink, JobSplit
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.run import RunConfig
from moefold.data.dataset import ProgramData
from moefold.errors import ConfigError
from moefold.host.folder_lock import MAX_LOCK_WAIT_S, FolderLock
from moefold.host.rank_env import RankEnv
from moefold.launch.rank_errors import RankErrorHandler
from moefold.launch.ranks import init_split_job
from moefold.launch.regroup import Regroup
from moefold.launch.threads_and_malloc import runtime_env_message
from moefold.launch.watchdog import Watchdog
from moefold.metrics.definitions import check_metrics
from moefold.metrics.reader import read_steps
from moefold.model.loss_function import LossFunction
from moefold.recipe import LoadedRecipe
from moefold.remote_path import is_remote, to_path
from moefold.topology.layout import fold_mapping
from moefold.train.callbacks.callback import Callback
from moefold.train.callbacks.checkpointing import SaveHistory
from moefold.train.callbacks.metrics import StepReporting
from moefold.train.run_folder import RunFolder, choose_run_folder, is_free
from moefold.train.signals import StopSignals
from moefold.train.start import set_up_run
from moefold.train.trainer import Trainer

if TYPE_CHECKING:
    from moefold.train.start import RunSetup


@dataclass(frozen=True)
class TrainOutcome:
    """End of a training run."""

    status: int
    """Exit status: 0, or 128 + the number of the signal that stopped the run."""
    run_dir: Path
    """Folder to which the run has written."""
    metrics: dict[str, Any] | None = None
    """Metrics of the last step, as in metrics.jsonl. None if this call trained no step, or on ranks that only sample.
    """
    checkpoint: Path | None = None
    """Newest complete checkpoint of the run, or None if it saves none."""


@dataclass(frozen=True)
class ProgramHooks:
    """Parts of a run that a Python program may replace. A job on GPUs pickles them for its ranks."""

    loss: LossFunction | None = None
    """The loss to minimise. None means next-token prediction."""
    data: ProgramData | None = None
    """The samples of data.kind="program"."""
    callbacks: Sequence[Callback] = ()
    """Further hooks of the training loop."""
    on_step: Callable[[dict[str, Any]], None] | None = None
    """Called with the metrics of each step, on each rank that trains."""

    def __post_init__(self) -> None:
        """Check the callbacks before ranks start.

        Raises:
            ConfigError: an object is not a callback, or a callback has invalid metrics or states.
        """
        is_list = isinstance(self.callbacks, Sequence)
        if not is_list or not all(isinstance(callback, Callback) for callback in self.callbacks):
            raise ConfigError(
                f"callbacks={self.callbacks!r:.80} must be a list of objects of classes that derive from "
                "moefold.Callback, such as callbacks=[LossLog()]"
            )
        for callback in self.callbacks:
            if not isinstance(callback.metrics, list | tuple):
                raise ConfigError(
                    f"`metrics` of the callback {type(callback).__name__} is {callback.metrics!r:.60}, and must be a "
                    "list of moefold.Metric"
                )
            cls = type(callback)
            if (cls.state_dict is Callback.state_dict) != (cls.load_state_dict is Callback.load_state_dict):
                raise ConfigError(
                    f"the callback {cls.__name__} overrides one of state_dict and load_state_dict; override both, so "
                    "that a resumed run goes on with its state, or neither"
                )
        names = [callback.saved_as for callback in self.callbacks if callback.saved_as]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two callbacks have their state under the name {twice[0]!r}; give one a state_name")
        if further := [metric for callback in self.callbacks for metric in callback.metrics]:
            check_metrics(further)


def finished_outcome(setup: "RunSetup") -> TrainOutcome | None:
    """Return the outcome of a run whose checkpoint has all steps already, or None if steps are left."""
    if not setup.is_finished:
        return None
    run_dir = Path(setup.folder.cfg.run.dir)
    records = read_steps(run_dir)
    return TrainOutcome(0, run_dir, records[-1] if records else None, setup.resume)


def train_worker(setup: "RunSetup", rank_env: RankEnv, device_type: str) -> int:
    """Join the job, train and leave, and return the exit status of the job."""
    return train_on_rank(setup, ProgramHooks(), rank_env, device_type).status


def train_on_rank(setup: "RunSetup", program: ProgramHooks, rank_env: RankEnv, device_type: str) -> TrainOutcome:
    """Join the job, train and leave.

    Raises:
        ConfigError: training found an error in the recipe, in a job of one rank. In larger jobs, ranks print it and
            exit.
        RunError: the run failed, in a job of one rank or in a program's own process.
    """
    cfg = setup.cfg
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    split = JobSplit(cfg.parallel.world_size, cfg.rollout.ranks)
    with _join_job(cfg.faults, split, rank_env, device_type) as job:
        run = _RankRun(cfg, (*setup.messages, runtime_env_message(rank_env, device_type)), program, job)
        return run.train() if job.link is None or not split.samples(job.rank) else run.sample(job.link)


@dataclass(frozen=True, kw_only=True)
class _RankJob:
    """The job as this rank has joined it."""

    rank: int
    device: torch.device
    link: JobLink | None
    """Link between the ranks that train and the ranks that only sample, or None without these."""
    watchdog: Watchdog
    stop: StopSignals
    regroup: Regroup | None
    """Agreement of the survivors of a lost rank, or None if a loss ends the job."""


@contextmanager
def _join_job(faults: FaultsConfig, split: JobSplit, rank_env: RankEnv, device_type: str) -> Iterator[_RankJob]:
    """Join the other ranks under a watchdog, report an error of this rank inside the context, and leave."""
    stop = StopSignals(announces=rank_env.rank == 0)
    limit_s = faults.timeout_s
    regroups = faults.regroups and rank_env.world_size > 1
    watchdog = Watchdog(rank_env, limit_s, device_type, regroups=regroups)
    failing = RankErrorHandler(rank_env, lambda: any(stop.flags), watchdog)
    regroup: Regroup | None = None
    if regroups:
        find_lost = (watchdog.gone_ranks, watchdog.silent_ranks)
        note_progress = watchdog.flight_recorder.note_progress
        regroup = Regroup(rank_env, device_type, limit_s, *find_lost, watchdog.kill, note_progress)
    open_store = None if regroup is None else regroup.open_first_store
    joined = init_split_job(rank_env, split, device_type, limit_s, watchdog.start, open_store)
    with failing, joined as (device, link), watchdog:
        if link is not None:
            link.recorder = watchdog.flight_recorder
            if split.samples(rank_env.rank):
                watchdog.flight_recorder.first_rank = split.num_training
        yield _RankJob(rank=rank_env.rank, device=device, link=link, watchdog=watchdog, stop=stop, regroup=regroup)


@dataclass(frozen=True)
class _RankRun:
    """The part of this rank in a run."""

    cfg: Config
    messages: tuple[str, ...]
    program: ProgramHooks
    job: _RankJob
    locks: "_RunLocks | None" = None
    """Locks of the chosen folders."""

    def sample(self, link: JobLink) -> TrainOutcome:
        """Sample rollouts until the training ranks have ended."""
        from moefold.train.rl.remote_rollouts import SamplingWorker

        cfg = self.cfg
        with self.job.stop:
            # The training ranks order the stop, also after a signal.
            recorder = self.job.watchdog.flight_recorder
            SamplingWorker(cfg, fold_mapping(cfg.parallel), self.job.device, recorder, link).run()
        return TrainOutcome(0, Path(cfg.run.dir))

    def train(self) -> TrainOutcome:
        """Choose the run folder and train in it, through losses of ranks if the recipe regroups. It is collective."""
        job = self.job
        job.watchdog.flight_recorder.set_phase("choosing the folder of the run")
        # A network file system may look different on another machine, so rank 0 decides.
        folder = current_world().all_gather_object(choose_run_folder(self.cfg) if job.rank == 0 else None)[0]
        reporting = StepReporting(self.program.on_step)
        program = replace(self.program, callbacks=(*self.program.callbacks, reporting))
        list_newest = partial(_newest_checkpoint, folder.cfg.run, folder.cfg.checkpoint)
        with _RunLocks(self.cfg, folder) as locks:
            messages = (folder.message, *self.messages)
            train = replace(self, program=program, messages=messages, locks=locks).train_membership
            if job.regroup is not None:
                from moefold.train.regroup_loop import RegroupLoop

                loop = RegroupLoop(folder.cfg, job.regroup, job.watchdog, job.device, train, locks.release)
                status = loop.run(job.stop)
                newest = None if job.regroup.is_spare or job.regroup.rank else list_newest()
            else:
                status = train(folder.cfg, (), (), SaveHistory())
                job.watchdog.flight_recorder.set_phase("listing the checkpoints")
                newest = current_world().all_gather_object(list_newest() if job.rank == 0 else None)[0]
        return TrainOutcome(status, Path(folder.cfg.run.dir), reporting.last, newest)

    def train_membership(
        self, cfg: Config, messages: Sequence[str], callbacks: Sequence[Callback], history: SaveHistory
    ) -> int:
        """Train with the existing process group to the last step or a signal. It is collective. Frees all it has built.

        Args:
            messages: lines to log before all others. Empty at the start of the job, which has its own.
            history: checkpoints of the run that this process knows.

        Returns:
            The exit status.
        """
        job = self.job
        assert self.locks is not None, "the folder of the run is chosen"
        recorder = job.watchdog.flight_recorder
        with ExitStack() as cleanup:
            groups = ParallelGroups.create(fold_mapping(cfg.parallel), job.device, recorder)
            cleanup.callback(groups.release)
            job.stop.announces = groups.rank == 0
            if cfg.faults.regroups:
                from moefold.train.regroup_loop import with_saved_checkpoints

                cfg = replace(cfg, checkpoint=with_saved_checkpoints(cfg.run, cfg.checkpoint, history))
            trainer = Trainer(
                cfg,
                groups,
                [message for message in messages or self.messages if message],
                loss=self.program.loss,
                data=self.program.data,
                callbacks=(*callbacks, *self.program.callbacks),
                link=job.link,
                history=history,
            )
            if groups.rank == 0:
                recorder.set_phase("locking the folders of the run")
                self.locks.acquire(starts_run=not messages)
            else:
                self.locks.release()
            return trainer.run(job.stop)


def _newest_checkpoint(run: RunConfig, checkpoint: CheckpointConfig) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    saved = complete_checkpoints(checkpoint_folder(run, checkpoint))
    return to_path(str(saved[-1])) if saved else None


class _RunLocks:
    """Context manager of the locks of a run, which one process acquires: rank 0, or its successor after a regroup.

    Args:
        cfg: the recipe as the user wrote it.
    """

    def __init__(self, cfg: Config, folder: RunFolder) -> None:
        self._cfg = cfg
        self._folder = folder
        self._stack = ExitStack()
        self._is_held = False

    def acquire(self, *, starts_run: bool) -> None:
        """Acquire the locks unless this process holds them.

        Args:
            starts_run: whether the job starts. A successor of rank 0 finds the files that the job has written.
        """
        if self._is_held:
            return
        cfg = self._folder.cfg
        # The other ranks wait for rank 0 meanwhile, and must not run into the timeout.
        wait_s = min(MAX_LOCK_WAIT_S, cfg.faults.timeout_s / 2)
        folders = {"run.dir": Path(cfg.run.dir)}
        # An object store has no locks: run.dir, on this machine or shared, keeps a second job out.
        if cfg.checkpoint.dir and cfg.checkpoint.saves and not is_remote(cfg.checkpoint.dir):
            folders["checkpoint.dir"] = Path(cfg.checkpoint.dir)
        # One lock if both are the same folder: this process could not take it twice.
        distinct = {folder.resolve(): key for key, folder in reversed(folders.items())}
        for key in reversed(distinct.values()):
            self._stack.enter_context(FolderLock(folders[key], key, wait_s))
        if starts_run:
            self._refuse_other_run()
        self._is_held = True

    def _refuse_other_run(self) -> None:
        """Refuse a folder that another job wrote to while this job started or waited for the lock."""
        run_dir = self._folder.cfg.run.dir
        locked = Path(run_dir)
        if choose_run_folder(self._cfg, locked_folder=locked).cfg.run.dir != run_dir and not is_free(locked, locked):
            raise ConfigError(
                f"run.dir={run_dir!r} was written by another job while this one waited; it has no checkpoint to "
                "resume; start the same command again, which takes a folder of its own"
            )

    def release(self) -> None:
        """Release the locks, if this process holds them: another process is rank 0 now."""
        self._stack.close()
        self._is_held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def train_in_program(recipe: LoadedRecipe, program: ProgramHooks) -> TrainOutcome:
    """Train with the processes of the program as ranks. It is collective over its default process group.

    Raises:
        ConfigError: the recipe cannot be trained here. Raised on all ranks.
        RunError: the run failed. A rank whose peer failed names the loss of the connection.
    """
    if recipe.cfg.rollout.ranks:
        raise ConfigError(
            f"rollout.ranks={recipe.cfg.rollout.ranks} only sample, and each process of this program trains; set "
            "rollout.ranks=0, or start the job with `moefold train`"
        )
    # Ranks that moefold or a launcher has started do not need it.
    from moefold.launch.in_process import program_ranks, restored_process_state

    with restored_process_state(), program_ranks(recipe.cfg.faults.timeout_s) as ranks:
        rank_env = ranks.rank_env
        setup = ranks.run_on_all_ranks(partial(set_up_run, recipe, rank_env, program.data))
        if finished := ranks.value_of_rank0(finished_outcome(setup)):
            return finished
        device_type = ranks.run_on_all_ranks(partial(setup.choose_device, rank_env))
        ranks.check_devices(device_type)
        ranks.run_on_all_ranks(partial(setup.prepare_data, rank_env))
        with without_process_groups():
            return train_on_rank(setup, program, rank_env, device_type)
