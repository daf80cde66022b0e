"""Training through the loss of ranks: the survivors build a smaller job in their processes and go on.

See `launch.regroup` for the agreement. A generation has its own process groups, model and trainer. All of them are
freed before the next generation is built: the connections of gloo close when a group is freed, and until then another
survivor may wait on them.
"""

import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from moefold.checkpoint.find_checkpoint import checkpoint_folder, complete_checkpoints, step_of
from moefold.checkpoint.peer_snapshot import HeldSteps, PeerSnapshots, choose_members, choose_step
from moefold.comm.collectives import is_collective_error
from moefold.comm.flight_recorder import WATCHED_TIMEOUT, format_ranks, group_timeout
from moefold.comm.groups import current_world
from moefold.comm.private_torch import drain_backward_queue, forget_process_groups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.errors import RunError
from moefold.host.processes import run_with_timeout
from moefold.launch.ranks import CONNECT_GRACE_S, init_process_group
from moefold.launch.regroup import CannotChooseError, LostRankError, NoRankLostError, RankMembership, Regroup
from moefold.launch.rendezvous import STORE_ERRORS
from moefold.launch.watchdog import Watchdog
from moefold.train.callbacks.callback import Callback, TrainingContext
from moefold.train.callbacks.checkpointing import SaveHistory
from moefold.train.signals import StopSignals
from moefold.validate.config import without_lost_ranks, world_sizes_after_rank_loss

MAX_GC_RUNS = 8
"""Maximum number of garbage collections to free a model. The last collection finds nothing."""


@dataclass(frozen=True)
class RankLoss:
    """Ranks that were lost, for the log."""

    generation: RankMembership
    """The generation without the lost ranks."""
    activities: tuple[str, ...]
    """Last activity of each lost rank."""
    noticed_s: float
    """Time of the error on this rank, as time.monotonic()."""

    @property
    def restored_step(self) -> int | None:
        """The step that is restored from memory, or None if a checkpoint is loaded."""
        return self.generation.plan["step"]

    @property
    def lacks_shards(self) -> bool:
        """Return whether there are snapshots in memory that lack a shard."""
        return self.generation.plan["lacks_shards"]

    def describe(self, dp: int) -> str:
        """Return the line of the log about the lost ranks and the mapping of the others."""
        new = self.generation
        lost = [f"rank {rank}{activity}" for rank, activity in zip(new.lost, self.activities, strict=True)]
        waits = "waits" if len(new.spares) == 1 else "wait"
        spares = f", {format_ranks(new.spares)} {waits}" if new.spares else ""
        lacks = "; the memory of the others lacks shards of the lost ranks" if self.lacks_shards else ""
        return (
            f"lost {'; '.join(lost)}; {len(new.members)} ranks go on with dp={dp}{spares}, as "
            f"faults.on_loss says{lacks}"
        )

    def to_record(self, dp: int, step: int) -> dict[str, Any]:
        """Return the record for faults.jsonl."""
        new = self.generation
        return {
            "step": step,
            "kind": "loss",
            "action": "regrouped",
            "generation": new.number,
            "lost": list(new.lost),
            "what": [activity.strip() for activity in self.activities],
            "ranks": list(new.members),
            "spares": list(new.spares),
            "dp": dp,
            "from": "checkpoint" if self.restored_step is None else "memory",
            "seconds": round(time.monotonic() - self.noticed_s, 3),
        }


class RankLossLog(Callback):
    """Callback that logs which ranks were lost, once the smaller job is ready to train."""

    def __init__(self, rank_loss: RankLoss) -> None:
        self._rank_loss = rank_loss

    def on_start(self, context: TrainingContext) -> None:
        """Log the lost ranks, on rank 0."""
        if context.log is None:
            return
        record = self._rank_loss.to_record(context.groups.attn.dp.size, context.position.step)
        context.log.log_fault(record)
        source = "" if self._rank_loss.restored_step is None else ", restored from the memory of the ranks"
        context.log.message(
            f"regrouped in {record['seconds']:.2f} s; training goes on after step {context.position.step}{source}"
        )


def _drop_frames(error: Exception) -> None:
    """Drop the stack frames of an exception and of its causes, which hold the model. Their text becomes a note."""
    chain: list[BaseException] = [error]
    for cause in chain:
        chain += [other for other in (cause.__cause__, cause.__context__) if other is not None and other not in chain]
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    for cause in chain:
        # A cleared frame would still hold the closure of its function.
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None


def with_saved_checkpoints(run: RunConfig, checkpoint: CheckpointConfig, history: SaveHistory) -> CheckpointConfig:
    """Return the section that resumes from the newest checkpoint of this run, if it has saved one. It is collective.

    All ranks learn of the saves, because a spare took part in none of them.
    """
    world = current_world()
    reads_folder = world.is_rank0 and checkpoint.saves
    has_checkpoint = reads_folder and bool(complete_checkpoints(checkpoint_folder(run, checkpoint)))
    gathered = world.all_gather_object((has_checkpoint, history.saved_step))
    history.saved_step = max((step for _, step in gathered if step is not None), default=None)
    if not gathered[0][0] or history.saved_step is None:
        return checkpoint
    return replace(checkpoint, resume="auto")


def newest_complete_step(run: RunConfig, checkpoint: CheckpointConfig, facts: Mapping[int, Any]) -> int:
    """Return the step of the newest complete checkpoint that the survivors have saved, or -1 without one.

    It is newer than all snapshots if snapshots are taken less often than checkpoints, or not at all, as with dp=1.

    Args:
        facts: `saved_step` of the `SaveHistory` of each survivor.
    """
    last = max((fact["saved_step"] for fact in facts.values() if fact["saved_step"] is not None), default=-1)
    if last < 0 or not checkpoint.saves:
        return -1
    steps = map(step_of, complete_checkpoints(checkpoint_folder(run, checkpoint)))
    return max((step for step in steps if step <= last), default=-1)


class MemberChoice(NamedTuple):
    """Members of the next generation."""

    members: tuple[int, ...]
    """Job ranks, ascending."""
    generation: int
    """Generation of the snapshots that the survivors keep, or 0 without snapshots."""
    step: int | None
    """Step to restore from the snapshots. None means the members load a checkpoint."""


def snapshot_facts(snapshots: PeerSnapshots | None) -> Any:
    """Return the facts of this process for `choose_survivors`, as JSON: number, rank and steps of each generation."""
    if snapshots is None:
        return None
    return [
        [generation.number, generation.rank, {str(step): sorted(ranks) for step, ranks in generation.held().items()}]
        for generation in snapshots.generations()
    ]


def choose_survivors(facts: Mapping[int, Any], count: int, snapshots: PeerSnapshots | None) -> MemberChoice:
    """Choose `count` survivors, which have all shards of the newest step in memory if possible.

    Args:
        facts: `snapshot_facts` of each survivor, by job rank.

    Raises:
        CannotChooseError: this process has no snapshot of the mapping that was lost, but another process has one.
    """
    survivors = sorted(facts)
    first = tuple(survivors[:count])
    generation = max((generations[0][0] for generations in facts.values() if generations), default=0)
    if not generation or snapshots is None:
        return MemberChoice(first, 0, None)
    # By rank in that generation.
    held_steps: dict[int, HeldSteps] = {}
    job_ranks = {}
    for job_rank, generations in facts.items():
        for number, rank, steps in generations or []:
            if number == generation and rank is not None:
                held_steps[rank] = {int(step): frozenset(ranks) for step, ranks in steps.items()}
                job_ranks[rank] = job_rank
    layout = next((held.layout for held in snapshots.generations() if held.number == generation), None)
    if layout is None:
        if held_steps:
            raise CannotChooseError
        return MemberChoice(first, generation, None)
    step = choose_step(held_steps, layout)
    chosen = tuple(held_steps) if len(held_steps) <= count else choose_members(held_steps, layout, count)
    if step is None or chosen is None:
        return MemberChoice(first, generation, None)
    members = [job_ranks[rank] for rank in chosen]
    # Spares of the lost mapping have no snapshot of it, and get all shards from the other ranks.
    members += [rank for rank in survivors if rank not in job_ranks.values()][: count - len(members)]
    return MemberChoice(tuple(sorted(members)), generation, step)


TrainMembership = Callable[[Config, Sequence[str], Sequence[Callback], SaveHistory], int]
"""Train with the default process group of the generation, given its recipe, messages for the log, further callbacks and
the checkpoints of the run, and return the exit status."""


class RegroupLoop:
    """Trains with the ranks that are left, generation after generation.

    Args:
        watchdog: reports the last activity of a lost rank.
        train: trains one generation. Nothing may hold its groups once it has returned or raised.
    """

    def __init__(
        self,
        cfg: Config,
        regroup: Regroup,
        watchdog: Watchdog,
        device: torch.device,
        train: TrainMembership,
        on_spare: Callable[[], None],
    ) -> None:
        self._cfg = cfg
        self._regroup = regroup
        self._watchdog = watchdog
        self._device = device
        self._train = train
        self._on_spare = on_spare
        self._history = SaveHistory()
        self._rank_loss: RankLoss | None = None

    def run(self, stop: StopSignals) -> int:
        """Train to the end, through losses, and return the exit status.

        Args:
            stop: signal handlers. From the first loss on, a signal that comes between two steps is not lost.

        Raises:
            RunError: too few ranks are left, or a rank has failed by itself.
        """
        with ExitStack() as handlers:
            status = self._run_generations(lambda: handlers.enter_context(stop))
            self._regroup.leave()
            return status

    def _run_generations(self, on_loss: Callable[[], Any]) -> int:
        while True:
            failure: Exception | None = None
            try:
                status = self._run_generation()
            except Exception as error:  # noqa: BLE001 - raised again unless a lost rank explains it
                failure = error
            noticed_s = time.monotonic()
            if failure is None and status is not None:
                self._regroup.end(status)
                return status
            if failure is not None and not self._may_be_loss(failure):
                self._regroup.fail()
                raise failure
            if self._rank_loss is None:
                on_loss()
            if failure is not None:
                _drop_frames(failure)
            self._free_groups()
            try:
                facts = {"snapshots": snapshot_facts(self._history.snapshots), "saved_step": self._history.saved_step}
                generation = self._regroup.agree_on_next(facts, self._choose_members)
            except NoRankLostError:
                ended = self._regroup.ended_status()
                if ended is None and failure is not None:
                    self._regroup.fail()
                    raise failure from None
                return ended or 0
            activities = tuple(map(self._describe_end, generation.lost))
            self._rank_loss = RankLoss(generation, activities, noticed_s)
            self._history.restored_step = generation.plan["step"]
            if self._history.snapshots is not None:
                self._history.snapshots.keep_generation(generation.plan["snapshots"])

    def _run_generation(self) -> int | None:
        """Train, or wait as a spare. Return the exit status, or None if a spare has to regroup."""
        generation = self._regroup.current
        recorder = self._watchdog.flight_recorder
        if self._regroup.is_spare:
            recorder.set_phase("waiting as a spare rank")
            self._on_spare()
            return self._regroup.wait_as_spare()
        cfg = without_lost_ranks(self._cfg, len(generation.members))
        if self._rank_loss is None:
            return self._train(self._cfg, (), (), self._history)
        recorder.start_generation(generation.members)
        recorder.set_phase("connecting to the other ranks")
        self._connect(len(generation.members))
        return self._train(
            cfg, (self._rank_loss.describe(cfg.parallel.dp),), (RankLossLog(self._rank_loss),), self._history
        )

    def _connect(self, num_ranks: int) -> None:
        rank = self._regroup.rank
        # Libraries read the variables of torchrun.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
        limit = group_timeout(self._cfg.faults.timeout_s)
        store = self._regroup.group_store()
        run_with_timeout(
            limit.total_seconds() + CONNECT_GRACE_S,
            lambda: init_process_group(store, rank, num_ranks, self._device, WATCHED_TIMEOUT),
        )

    def _may_be_loss(self, error: Exception) -> bool:
        """Return whether the loss of a rank may explain an error."""
        if is_collective_error(error) or isinstance(error, LostRankError):
            return True
        try:
            return bool(self._watchdog.gone_ranks()) or self._regroup.is_broken()
        except STORE_ERRORS:
            return False

    def _describe_end(self, rank: int) -> str:
        """Return the last activity of a lost rank, and how its process ended."""
        how = self._regroup.exit_description(rank)
        return self._watchdog.activity_of(rank) + (f", {how}" if how else "")

    def _choose_members(self, facts: Mapping[int, Any], lost: Sequence[int]) -> tuple[Sequence[int], Any]:
        survivors = sorted(facts)
        sizes = [size for size in world_sizes_after_rank_loss(self._cfg) if size <= len(survivors)]
        if not sizes:
            texts = [f"rank {rank}{self._describe_end(rank)}" for rank in lost]
            raise RunError(
                f"lost {'; '.join(texts)}. {len(survivors)} ranks are left, and the recipe fits no number of ranks "
                f"from faults.min_ranks={self._cfg.faults.min_ranks} to {len(survivors)}; the same command resumes"
            )
        owners_by_rank = {rank: fact["snapshots"] for rank, fact in facts.items()}
        choice = choose_survivors(owners_by_rank, sizes[-1], self._history.snapshots)
        step = choice.step
        if step is not None and newest_complete_step(self._cfg.run, self._cfg.checkpoint, facts) > step:
            step = None
        lacks_shards = choice.generation > 0 and choice.step is None
        return choice.members, {"snapshots": choice.generation, "step": step, "lacks_shards": lacks_shards}

    def _free_groups(self) -> None:
        """Free model and process groups of the generation, which closes the connections of gloo."""
        if self._history.snapshots is not None:
            self._history.snapshots.forget_groups()
        forget_process_groups()
        drain_backward_queue()
        # Modules and their hooks refer to each other, partly through nodes of the autograd graph: each collection makes
        # more of them unreachable.
        for _ in range(MAX_GC_RUNS):
            if not gc.collect():
                break
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
