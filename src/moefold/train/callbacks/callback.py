"""Hooks of the training loop: the base class of callbacks, and the state that the loop passes to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, auto
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.checkpoint.run_states import RunStates
from moefold.comm.groups import ParallelGroups
from moefold.parallel.batch import Batch
from moefold.train.position import Position
from moefold.train.signals import StopSignals
from moefold.train.step_meter import StepResult
from moefold.train.train_step import TrainingStep

if TYPE_CHECKING:
    from moefold.metrics.definitions import Metric
    from moefold.train.run_log import RunLog
    from moefold.train.step_data import StepData


@dataclass
class TrainingContext:
    """Objects of a run that its callbacks may read. Each rank has its own."""

    folder: Path
    """Folder of the run, which is run.dir or a numbered folder next to it."""
    groups: ParallelGroups
    training: TrainingStep
    """Model, optimizer and guard. `training.model.stages` are the stages of this rank."""
    data: "StepData"
    position: Position
    stop: StopSignals
    states: RunStates = field(default_factory=RunStates)
    """The objects whose state is in checkpoints."""
    log: "RunLog | None" = None
    """Files of the run folder, on rank 0 only."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last step by name, `metrics.definitions.STEP`, on every rank, or empty before the first step."""
    is_resumed: bool = False
    """True if a checkpoint was loaded."""
    status: int = 0
    """Exit status: 0, or 128 + the number of the signal that ends the loop. It is equal on all ranks."""
    before_save: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call before a checkpoint is saved, on all ranks. They may communicate."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call when the loop has ended without an error and every callback has ended, on all ranks."""
    save_s: float = 0.0
    """Time that the save after the last step blocked training."""

    @property
    def is_first_rank(self) -> bool:
        """Return whether this is rank 0, which writes the files of the run."""
        return self.groups.rank == 0

    def log_dropped_files(self, step: int) -> None:
        """Log each dropped data file once, at the first step without it."""
        if self.log is not None:
            for dropped in self.data.events:
                self.log.log_dropped_file(step, dropped)
        self.data.events.clear()


class CallbackStage(IntEnum):
    """Stages of the callbacks of a run: all ranks call their hooks stage by stage, in this order."""

    KERNELS = auto()
    """The kernels of the run are chosen, before any other forward pass."""
    ROUNDS = auto()
    """Rounds of rollouts and of sites end and begin."""
    REFERENCE = auto()
    """The reference of a loss is computed, with weights that no step has changed."""
    EVALUATION = auto()
    OUTER_EVALUATION = auto()
    """The outer weights of sites are evaluated if the weights were."""
    METRICS = auto()
    """The metrics and the routing of the step are written. `TrainingContext.metrics` is set."""
    REPORTS = auto()
    """Rollouts and slow ranks are reported, below the line of the step."""
    CHECK = auto()
    """The state is checked, before a checkpoint has it."""
    PROGRAM_STATE = auto()
    """Hooks `after_step` of a program's callbacks with state, which the checkpoint of the step has."""
    SAVE = auto()
    PROGRAM = auto()
    """All other hooks of a program's callbacks."""


def _set_in(*stages: CallbackStage, **keywords: Any) -> Any:
    """Return a field that only the callbacks of some stages change."""
    return field(metadata={"stages": stages}, **keywords)


@dataclass(frozen=True)
class FinishedStep:
    """One step that was not rolled back. Equal on all ranks, except for the batch and the time.

    A field that a callback sets names its stages: earlier stages find the default.
    """

    number: int
    """1-based number of the step."""
    result: StepResult
    batch: Batch
    """This rank's shard of the global batch."""
    step_time_s: float
    num_tokens: int
    """Input tokens of the global batch, without padding."""
    is_last: bool = _set_in(CallbackStage.ROUNDS)
    """True if the run ends. A site that takes over the state of another site may be at its last step."""
    signals: tuple[Signals, ...] = _set_in(CallbackStage.ROUNDS, CallbackStage.EVALUATION)
    """Signals that stop the run after this step."""
    rl: dict[str, Any] | None = _set_in(CallbackStage.EVALUATION, default=None)
    """Metrics of the rollouts, or None without reinforcement learning."""
    sites: dict[str, Any] | None = _set_in(CallbackStage.ROUNDS, CallbackStage.OUTER_EVALUATION, default=None)
    """Metrics of the round of the sites after this step, or None without a round."""
    eval_loss: float | None = _set_in(CallbackStage.EVALUATION, default=None)
    """Validation loss after this step, or None without an evaluation."""
    is_evaluated: bool = _set_in(CallbackStage.EVALUATION, default=True)
    """False if a due evaluation was prevented by a signal."""


class Callback:
    """Base class of callbacks. Each hook does nothing unless it is overridden.

    All ranks call the hooks of all callbacks in the same order, so a hook may communicate if every rank does. State
    belongs in the callback. Checkpoints contain it if the callback overrides `state_dict` and `load_state_dict`. With
    several GPU ranks a callback must be picklable. An exception ends the run.
    """

    state_name: str = ""
    """Name of the callback's state in checkpoints. "": the name of its class."""

    metrics: "Sequence[Metric]" = ()
    """Definitions of the metrics that `measure` returns."""

    def measure(self, context: TrainingContext, step: FinishedStep) -> Mapping[str, float | None]:
        """Return this rank's values of `metrics` by name, before the line of the step is written, each maybe None."""
        return {}

    @property
    def has_metrics(self) -> bool:
        """True if the callback declares metrics or measures. Measured metrics must be declared."""
        return bool(self.metrics) or type(self).measure is not Callback.measure

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values. Rank 0's state is stored, and each rank gets it back."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint, before `on_start` and before `on_rollback`."""

    @property
    def saved_as(self) -> str:
        """Name of the callback's state in checkpoints, or "" for a callback without state."""
        has_state = type(self).state_dict is not Callback.state_dict
        return (self.state_name or type(self).__name__) if has_state else ""

    def on_start(self, context: TrainingContext) -> None:
        """Run before the first step, after the checkpoint or the initial weights were loaded."""

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Run after a step and its due evaluation, log line and save. Callbacks with state run before the save."""

    def on_rollback(self, context: TrainingContext) -> None:
        """Run after a rollback, once the state of the earlier checkpoint is loaded."""

    def on_end(self, context: TrainingContext, status: int) -> None:
        """Run after the last step and its checkpoint, but not after an exception.

        Args:
            status: exit status of the run, or 128 + the number of a signal.
        """

    def on_error(self, context: TrainingContext, error: Exception) -> None:
        """Run after an exception, before it ends the run. Other ranks may be gone, so it must not communicate."""


class StageCallback(Callback):
    """Base class of the trainer's own callbacks, which have a stage and may set fields of a step."""

    stage: ClassVar[CallbackStage]

    def complete(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Run after a step, and return it with the fields that this callback sets. By default, run `after_step`."""
        self.after_step(context, step)
        return step

    def complete_in_stage(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Run `complete`, which may set only the fields of its stage."""
        completed = self.complete(context, step)
        for each in fields(step):
            is_set = getattr(completed, each.name) is not getattr(step, each.name)
            assert not is_set or self.stage in each.metadata.get("stages", ()), (self, each.name)
        return completed
