"""Hooks of the training loop: the base class of callbacks, and the state that the loop passes to them."""

from dataclasses import dataclass, field
from signal import Signals

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.parallel.grad_accumulation import Batch
from moefold.train.data_loader import DataLoader
from moefold.train.train_step import StepResult, TrainingStep


@dataclass
class Position:
    """Progress of a run."""

    step: int = 0
    """Steps done."""
    samples: int = 0
    """Samples of the data read."""
    tokens: int = 0
    """Tokens trained on."""


@dataclass(frozen=True)
class TrainingContext:
    """Objects of a run that its callbacks may read. Each rank has its own."""

    cfg: Config
    """Recipe with the chosen run folder as run.dir."""
    groups: ParallelGroups
    training: TrainingStep
    """Model, optimizer and guard; `training.model.stages` are the stages of this rank."""
    data: DataLoader
    position: Position

    @property
    def is_first_rank(self) -> bool:
        """Return whether this is rank 0, which writes the files of the run."""
        return self.groups.rank == 0


@dataclass
class FinishedStep:
    """One step that was not rolled back. Equal on all ranks apart from the batch and the time."""

    number: int
    """1-based."""
    result: StepResult
    batch: Batch
    """This rank's shard."""
    step_time_s: float
    is_last: bool
    signals: list[Signals] = field(default_factory=list)
    """Signals that stop the run after this step."""
    eval_loss: float | None = None
    """Validation loss after this step; None without an evaluation."""


class Callback:
    """Base class of callbacks; each hook does nothing unless it is overridden.

    All ranks call the hooks of all callbacks in the same order, so a hook may communicate if every rank does. State
    belongs into the callback. With several GPU ranks a callback must be picklable. An exception ends the run.
    """

    def on_start(self, run: TrainingContext) -> None:
        """Run before the first step, after the checkpoint or the initial weights were loaded."""

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        """Run after a step: it was evaluated, logged and saved if that was due."""

    def on_end(self, run: TrainingContext, status: int) -> None:
        """Run after the last step and its checkpoint; not after an exception.

        Args:
            run: the run.
            status: exit status of the run; 128 + its number after a signal.
        """
