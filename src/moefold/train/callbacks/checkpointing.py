"""Callback that saves checkpoints, and resumes and rolls back from them."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, States, TrainState, read_meta
from moefold.checkpoint.resume import Resume, resolve_resume
from moefold.checkpoint.run_states import CALLBACKS, Record
from moefold.checkpoint.saver import open_saver
from moefold.checkpoint.write_checkpoint import checkpoint_meta
from moefold.comm.collectives import broadcast_object, is_collective_error
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.schema import Config
from moefold.errors import RunError
from moefold.optim.lr_schedule import describe_schedule_change
from moefold.optim.states import step_counts
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.position import is_due, is_save_due

if TYPE_CHECKING:
    from moefold.checkpoint.peer_snapshot import PeerSnapshots
    from moefold.train.adapter_weights import AdapterWeights
    from moefold.train.step_fault import StepFault

SAVE_DRAIN_S = 60.0
"""Limit of the wait of a failing run for an asynchronous save."""
SAVE_DRAIN_LOST_RANK_S = 5.0
"""The same limit after a collective failed because another rank is gone."""


@dataclass
class SaveHistory:
    """Checkpoints of the run that this process has loaded and saved. It outlives a trainer if the ranks regroup."""

    resumed_from: Path | None = None
    """The checkpoint that the run resumed from, if any."""
    saved_step: int | None = None
    """Step of the last save that was started, or None if none was: a checkpoint in the folder is from another run."""
    snapshots: "PeerSnapshots | None" = None
    """Snapshots of this process, if the recipe takes any."""
    restored_step: int | None = None
    """Step to restore from the snapshots. None means from a checkpoint."""
    initial_states: States = field(default_factory=dict)
    """States of the program's callbacks before the first step, see `RunStates`."""


class Checkpointing(StageCallback):
    """Callback that saves on the schedule of `checkpoint`. The trainer resumes and rolls back with it.

    `init_message` describes the source of the initial weights. `resume_messages` describe the learning rate, the counts
    and the effects of another mapping after a resume. `total_save_s` is the time that saving has blocked training on
    this rank.
    """

    stage = CallbackStage.SAVE

    def __init__(self, cfg: Config, groups: ParallelGroups, history: SaveHistory | None = None) -> None:
        """Take over the snapshots of this process, and open the saver. Collective if it saves in the background.

        Args:
            history: checkpoints of the run that this process knows, or None for a new process.
        """
        self._cfg = cfg
        self._history = history or SaveHistory()
        self.saver = open_saver(cfg, groups)
        self.total_save_s = 0.0
        self.init_message = ""
        self.resume_messages: tuple[str, ...] = ()
        self._eval_loss: float | None = None
        self._is_evaluated = True
        if cfg.checkpoint.peer_every and self._history.snapshots is None:
            from moefold.checkpoint.peer_snapshot import PeerSnapshots

            self._history.snapshots = PeerSnapshots()
        self.snapshots = self._history.snapshots
        self.restored_step = self._history.restored_step
        self.initial_states = self._history.initial_states

    def resume(self, context: TrainingContext) -> Resume:
        """Open the data, and load the checkpoint to resume from or the initial weights. It is collective."""
        context.states.add("evaluation", Record(self._evaluation))
        self.saver.open_folder()
        if self.restored_step is not None:
            self._resume_from_peers(context, self.restored_step)
            return Resume(None)
        context.groups.recorder.set_phase("loading the checkpoint or the initial weights")
        resume = resolve_resume(self._cfg, current_world(), context.data.files.fingerprints)
        self._history.resumed_from = resume.path
        context.data.open(None if resume.path is None else read_meta(resume.path))
        if self._cfg.trains_adapters_only:
            from moefold.train.adapter_weights import AdapterWeights

            adapters = AdapterWeights.open(self._cfg.lora, self._cfg.checkpoint, context.groups, resume.path)
            self.init_message = self._open_adapters(context, adapters)
        if resume.path is not None:
            self._load(context, resume.path)
            context.is_resumed = True
        elif self._cfg.trains_adapters_only:
            from moefold.train.adapter_weights import load_initial_adapters

            path = load_initial_adapters(self._cfg.lora, self._cfg.checkpoint, context.training.model)
            self.init_message += f"; adapters from {path}" if path else ""
        else:
            if self._cfg.checkpoint.start:
                self.init_message = self._load_weights(context)
            if self._cfg.trains_indexers_only and not self.init_message:
                self.init_message = (
                    "note: the warm-up trains indexers of attention whose weights are random; set checkpoint.init_from "
                    "to start with trained ones"
                )
        if context.is_first_rank and self._cfg.checkpoint.saves:
            from moefold.checkpoint.run_tokenizer import save_run_tokenizer

            save_run_tokenizer(self._cfg.run, self._cfg.data, self._cfg.checkpoint, is_resumed=resume.path is not None)
        if resume.path is None:
            context.states.start()
        return resume

    def _open_adapters(self, context: TrainingContext, adapters: "AdapterWeights") -> str:
        """Load the base weights of a run that trains only adapters, and return a description. It is collective."""
        context.states.add("lora", Record(lambda: adapters.settings))
        return "" if adapters.base is None else self._load_weights(context, adapters.base)

    def _resume_from_peers(self, context: TrainingContext, step: int) -> None:
        """Restore the run from the snapshots of a step, and certify the result. It is collective.

        Raises:
            RunError: a shard is lost, or the certificate fails. Raised on every rank.
        """
        from moefold.checkpoint.transition_certificate import RestoredRun, certify

        assert self.snapshots is not None
        context.groups.recorder.set_phase("restoring the state from the memory of the ranks")
        self.snapshots.share_progress(step, context.groups.world)
        taken = self.snapshots.snapshot(step).train_state
        assert taken is not None
        meta = checkpoint_meta(self._cfg, taken)
        context.data.open(meta)
        if self._cfg.trains_adapters_only:
            from moefold.train.adapter_weights import AdapterWeights

            self._open_adapters(context, AdapterWeights.of_settings(taken.lora))
        groups = context.groups
        state = context.training.tensors()
        self.snapshots.restore(step, state, groups.world, groups.device)
        self._load_states(context, meta, None)
        context.is_resumed = True
        context.groups.recorder.set_phase("comparing the restored state with the snapshots")
        restored = RestoredRun(
            context.states.restored_state_dict(),
            step_counts(context.training.optimizer, context.training.parameters),
            context.data.train_sharder.own_samples,
            self._cfg.train.global_batch_size,
        )
        certify(self.snapshots, step, state, restored, groups)

    def on_start(self, context: TrainingContext) -> None:
        """Take a snapshot before the first step: a loss in that step needs a snapshot of this mapping."""
        self._take_snapshot(context)

    def _take_snapshot(self, context: TrainingContext) -> None:
        """Copy the state to the memory of this rank and of its peer, if the recipe asks for it. It is collective."""
        if self.snapshots is None or not self._cfg.checkpoint.peer_every:
            return
        context.groups.recorder.set_phase("copying the state to a peer")
        started_s = context.groups.recorder.clock()
        states = context.states.state_dict()
        if callback_states := {name: state for name, state in states.items() if name.startswith(CALLBACKS)}:
            # The states of rank 0, as in a checkpoint.
            states |= broadcast_object(callback_states, context.groups.world, 0)
        self.snapshots.take(context.training.tensors(), TrainState(states=states), context.groups)
        blocked_s = context.groups.recorder.clock() - started_s
        context.save_s += blocked_s
        self.total_save_s += blocked_s

    def roll_back(self, context: TrainingContext, step_fault: "StepFault") -> Resume:
        """Load the newest intact checkpoint and skip the samples of the faulty batch from there on. It is collective.

        Raises:
            RunError: there is no checkpoint yet.
        """
        resume = Resume(self._history.resumed_from)
        if self._history.saved_step is not None:
            section = replace(self._cfg.checkpoint, resume="auto")
            resume = resolve_resume(
                replace(self._cfg, checkpoint=section), current_world(), context.data.files.fingerprints
            )
        if resume.path is None:
            raise RunError(
                f"{step_fault.describe()}; nothing of the step was applied, and there is no checkpoint yet to go back "
                "to: set checkpoint.every lower, or skip such steps"
            )
        self._load(context, resume.path)
        context.position.skip(step_fault.samples[0], step_fault.end_sample)
        if self.snapshots is not None:
            self.snapshots.forget_groups()
            self._take_snapshot(context)
        return resume

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Save a checkpoint if one is due. It is collective."""
        context.save_s = 0.0
        is_finite = step.eval_loss is not None and math.isfinite(step.eval_loss)
        self._eval_loss = step.eval_loss if is_finite else None
        self._is_evaluated = step.is_evaluated
        if is_save_due(self._cfg.checkpoint, step.number, is_last=step.is_last, is_stopped=bool(step.signals)):
            self.save(context)
        if is_due(self._cfg.checkpoint.peer_every, step.number):
            self._take_snapshot(context)

    def _evaluation(self) -> dict[str, Any]:
        """Return the held-out loss of the step, and whether a signal has prevented its evaluation."""
        return {"eval_loss": self._eval_loss} | ({} if self._is_evaluated else {"is_evaluated": False})

    def on_end(self, context: TrainingContext, status: int) -> None:
        """Finish the last save."""
        context.groups.recorder.set_phase("finishing the last save")
        started_s = context.groups.recorder.clock()
        self.saver.finish()
        self.total_save_s += context.groups.recorder.clock() - started_s

    def on_error(self, context: TrainingContext, error: Exception) -> None:
        """Wait for a save under way, with a limit.

        The last checkpoint may be almost written. A save that waits for a lost rank never finishes.
        """
        self.saver.drain_with_timeout(SAVE_DRAIN_LOST_RANK_S if is_collective_error(error) else SAVE_DRAIN_S)

    def save(self, context: TrainingContext) -> None:
        """Save a checkpoint. It is collective."""
        context.groups.recorder.set_phase("saving a checkpoint")
        for prepare in context.before_save:
            prepare()
        # These functions may wait in phases of their own.
        context.groups.recorder.set_phase("saving a checkpoint")
        waited_s = self.saver.save(context.states.tensors(), TrainState(states=context.states.state_dict()))
        context.save_s += waited_s
        self.total_save_s += waited_s
        self._history.saved_step = context.position.step

    def _load(self, context: TrainingContext, path: Path) -> None:
        """Restore the run from a checkpoint. It is collective."""
        meta = read_meta(path)
        if self._cfg.sites.is_active or meta.state_of("sites"):
            from moefold.train.sites.outer_state import check_expert_owner

            check_expert_owner(meta, self._cfg.sites)
        context.data.files.decide_restart(meta)
        self._load_states(context, meta, path)

    def _load_states(self, context: TrainingContext, meta: CheckpointMeta, path: Path | None) -> None:
        """Restore all objects of the run, or the objects without tensors if there is no path. It is collective."""
        context.states.load(meta.states, path)
        self.resume_messages = (*self._resume_messages(context, meta), *context.states.notices(meta.states))

    def _load_weights(self, context: TrainingContext, folder: Path | None = None) -> str:
        """Load the weights of `folder`, by default the recipe's weights, and return a description. It is collective."""
        # The readers of Hugging Face folders are a tenth of the trainer's modules.
        from moefold.convert.init_from import load_initial_weights

        return load_initial_weights(
            self._cfg.run,
            self._cfg.model,
            self._cfg.data,
            self._cfg.checkpoint,
            context.training.model,
            is_first_rank=context.is_first_rank,
            folder=folder,
        )

    def _resume_messages(self, context: TrainingContext, meta: CheckpointMeta) -> tuple[str, ...]:
        """Return the lines of the log about the effects of other settings after a checkpoint was loaded."""
        messages = [describe_schedule_change(meta.state_of("schedule"), self._cfg.run, self._cfg.train, meta.step)]
        is_padded = context.data.train_sampler.has_annotations
        is_old = "tokens_consumed" not in meta.state_of("position")
        if meta.step and is_old and (is_padded or context.training.guard.num_skipped):
            messages.append(
                f"`tokens` goes on from the {meta.tokens:,} of the checkpoint, which an earlier version counted with "
                "padding and with skipped updates"
            )
        from moefold.checkpoint.model_differences import mapping_notes

        messages += mapping_notes(self._cfg.model, self._cfg.moe, self._cfg.parallel, meta.parallel)
        return tuple(message for message in messages if message)
