"""The training loop: load a batch, train a step, run the callbacks."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moefold.checkpoint.run_states import CALLBACKS, RunStates
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.errors import SIGNAL_STATUS
from moefold.model.loss_function import LossFunction
from moefold.objectives.recipe_loss import policy_loss
from moefold.parallel.parallelize import parallelize
from moefold.train.assemble import open_data, open_rollouts, recipe_callbacks
from moefold.train.callbacks.callback import Callback, CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.callbacks.checkpointing import Checkpointing, SaveHistory
from moefold.train.position import Position
from moefold.train.run_summary import startup_lines
from moefold.train.signals import SIGNALS, StopSignals
from moefold.train.step_meter import StepResult
from moefold.train.train_step import TrainingStep

if TYPE_CHECKING:
    from moefold.comm.trainer_sampler_link import JobLink
    from moefold.data.dataset import ProgramData
    from moefold.train.step_data import StepData


class Trainer:
    """Training loop of one rank. Every branch that contains collectives depends only on values equal on all ranks."""

    def __init__(
        self,
        cfg: Config,
        groups: ParallelGroups,
        messages: Sequence[str] = (),
        *,
        loss: LossFunction | None = None,
        data: "ProgramData | None" = None,
        callbacks: Sequence[Callback] = (),
        link: "JobLink | None" = None,
        history: SaveHistory | None = None,
    ) -> None:
        """Build the model and open the data. It is collective.

        Args:
            messages: lines to log before all others.
            loss: the loss to minimise. None means next-token prediction.
            data: the samples of data.kind="program". None means the recipe's samples.
            callbacks: hooks of the program, the same on every rank, see `CallbackStage`.
            history: checkpoints of an earlier trainer of this process, or None for the first.
        """
        self._cfg = cfg
        self._initial_messages = tuple(messages)
        self.groups = groups
        self._flight_recorder = groups.recorder
        # We never use torch's global RNG; seed it so that third-party code is deterministic.
        torch.manual_seed(cfg.run.seed)
        self._flight_recorder.set_phase("building the model")
        if cfg.is_rl:
            loss = loss or policy_loss(cfg.rl, cfg.rollout.temperature)
        model = parallelize(cfg, groups, loss)
        self.train_step = TrainingStep(model, cfg)
        self._flight_recorder.set_phase("opening the data")
        self.position = Position()
        self._resources = ExitStack()
        """Processes that make data, which end with the run."""
        self.data_loader: StepData
        if cfg.is_rl:
            self.data_loader, own = open_rollouts(cfg, model, self.position, link, self._resources)
        else:
            self.data_loader, own = open_data(cfg, model, self.position, data)
        self.checkpointing = Checkpointing(cfg, groups, history)
        own += recipe_callbacks(cfg, groups, self.checkpointing, callbacks, measures_kernels=model.autotuner.is_enabled)
        self.callbacks = tuple(sorted((*own, *callbacks), key=_stage_of))
        """Callbacks of the recipe and of the program, stage by stage."""
        self.callbacks_after_step = tuple(sorted((*own, *callbacks), key=_stage_after_step))

    def run(self, stop: StopSignals) -> int:
        """Train to the last step or until a signal, and return the exit status. It is collective.

        Raises:
            ConfigError: the checkpoint to resume from cannot be read, or the data holds ids beyond the vocabulary.
            RunError: the recipe stops at a non-finite step or a spike, or data-parallel replicas have diverged.
        """
        folder = Path(self._cfg.run.dir)
        states = RunStates(self.checkpointing.initial_states)
        context = TrainingContext(folder, self.groups, self.train_step, self.data_loader, self.position, stop, states)
        self._add_states(context.states)
        resume = self.checkpointing.resume(context)
        first_step = self.position.step + 1
        with ExitStack() as stack:
            stack.enter_context(stop)
            stack.enter_context(self._resources)
            if context.is_first_rank:
                from moefold.train.run_log import RunLog

                is_gpu = self.groups.device.type != "cpu"
                clock = self._flight_recorder.clock
                log = RunLog(self._cfg, first_step, resume, self._startup_messages(), stop, clock, is_gpu=is_gpu)
                context.log = stack.enter_context(log)
            context.log_dropped_files(first_step)
            collect_garbage = stack.enter_context(collect_at_fixed_steps())
            try:
                self._loop(context, collect_garbage)
            except Exception as error:
                for callback in self.callbacks:
                    callback.on_error(context, error)
                raise
            if context.log is not None:
                context.log.log_end(context.status, self.position.step, self.checkpointing.total_save_s)
        return context.status

    def _add_states(self, states: RunStates) -> None:
        """Register the states that a resumed run needs."""
        states.add("position", self.position)
        self.train_step.add_states(states)
        # Rollouts that are too old for the step of the position are sampled again.
        states.add("data", self.data_loader, after=("position", "weights"))
        for callback in self.callbacks:
            if callback.saved_as:
                prefix = "" if isinstance(callback, StageCallback) else CALLBACKS
                states.add(f"{prefix}{callback.saved_as}", callback)

    def _loop(self, context: TrainingContext, collect_garbage: Callable[[int], None]) -> None:
        for callback in self._each_callback(self.callbacks):
            callback.on_start(context)
        while self.position.step < self._cfg.run.steps and context.status == 0:
            step = self._one_step(context)
            if step is None:
                continue
            for callback in self._each_callback(self.callbacks_after_step):
                if isinstance(callback, StageCallback):
                    step = callback.complete_in_stage(context, step)
                else:
                    callback.after_step(context, step)
            collect_garbage(step.number)
            # A signal in the last step does not change the status, unless it prevented the evaluation.
            if step.signals and not (step.is_last and step.is_evaluated):
                context.status = SIGNAL_STATUS + step.signals[0]
        for callback in self._each_callback(self.callbacks):
            callback.on_end(context, context.status)
        for finish in context.at_end:
            finish()

    def _each_callback(self, callbacks: Sequence[Callback]) -> Iterator[Callback]:
        """Yield callbacks. The flight recorder's phase names the program's callbacks."""
        for callback in callbacks:
            if not isinstance(callback, StageCallback):
                self._flight_recorder.set_phase(f"the callback {type(callback).__name__}")
            yield callback

    def _one_step(self, context: TrainingContext) -> FinishedStep | None:
        """Load a batch and train on it, and return None if the step was rolled back. It is collective."""
        clock = self._flight_recorder.clock
        started_s = clock()
        self._flight_recorder.begin_step(self.position.step + 1, "loading data")
        with self.train_step.meter.loading():
            batch, samples = self.data_loader.next_batch(self.position.samples, self.position.skipped_ranges)
            context.log_dropped_files(self.position.step + 1)
        result = self.train_step.run_polled(batch, self.position.step + 1, lambda: context.stop.flags)
        step_time_s = clock() - started_s
        if context.log is not None:
            context.log.report_stop(self.position.step + 1, clock.pop_stopped_s())
        self.checkpointing.saver.check()
        if result.decision.reason and not self._handle_fault(context, result, samples):
            return None
        assert batch.num_tokens is not None, "the data loader counts the tokens of each batch"
        self.position.advance(samples, batch.num_tokens, is_updated=result.decision.updates)
        return FinishedStep(
            number=self.position.step,
            result=result,
            batch=batch,
            step_time_s=step_time_s,
            is_last=self.position.step == self._cfg.run.steps,
            num_tokens=batch.num_tokens,
            signals=tuple(number for number, count in zip(SIGNALS, result.flags, strict=True) if count),
        )

    def _handle_fault(self, context: TrainingContext, result: StepResult, samples: Sequence[int]) -> bool:
        """Log, skip, roll back or stop after a step at fault, and return False after a rollback. It is collective.

        Raises:
            RunError: the recipe stops the run.
        """
        from moefold.train.step_fault import StepFault

        action = result.decision.action
        cfg = self._cfg
        step_fault = StepFault(
            step=self.position.step + 1,
            samples=samples,
            result=result,
            run=cfg.run,
            checkpoint=cfg.checkpoint,
            faults=cfg.faults,
            samples_per_rank=cfg.num_micro_batches * cfg.train.micro_batch_size,
            layout=self.groups.layout,
            sampler=self.data_loader.train_sampler,
        )
        if context.log is not None:
            context.log.log_step_fault(step_fault)
        if action in ("log", "skip"):
            return True
        self.checkpointing.saver.drain()
        if action == "stop":
            from moefold.train.rl.mismatch import mismatch_advice

            advice = mismatch_advice(cfg.run, cfg.model, cfg.parallel, cfg.train, cfg.rl, cfg.rollout)
            raise step_fault.stop_error(advice)
        resume = self.checkpointing.roll_back(context, step_fault)
        for callback in self._each_callback(self.callbacks):
            callback.on_rollback(context)
        if context.log is not None:
            context.log.rewind(resume, self.position.step)
        return False

    def _startup_messages(self) -> tuple[str, ...]:
        """Return the lines to log before the first step."""
        cfg = self._cfg
        loader = self.data_loader
        return (
            *self._initial_messages,
            *startup_lines(cfg, self.groups.device.type, loader.train_sampler, loader.validation_sampler),
            *filter(None, (self.train_step.model.message, self.checkpointing.init_message, loader.message)),
            *self.checkpointing.resume_messages,
        )


def _stage_of(callback: Callback) -> CallbackStage:
    return callback.stage if isinstance(callback, StageCallback) else CallbackStage.PROGRAM


def _stage_after_step(callback: Callback) -> CallbackStage:
    """Return the stage of the hook after a step, which runs before the save where the callback has state."""
    has_state = not isinstance(callback, StageCallback) and callback.saved_as
    return CallbackStage.PROGRAM_STATE if has_state else _stage_of(callback)


STEPS_BETWEEN_COLLECTIONS = 50
"""Equal to `gc_freq` of torchtitan. No tensor of a step is in a reference cycle, so only small objects wait for it."""


@contextmanager
def collect_at_fixed_steps() -> Iterator[Callable[[int], None]]:
    """Disable the automatic garbage collection inside this context, and restore it at the end.

    Python's collector starts at some allocation, in a different step on each rank, and the ranks of a collective wait
    for each other. Objects that exist at the start are frozen, unless the caller froze objects: Python unfreezes all.

    Yields:
        A function to call after each step with its number, which collects if it is due.
    """
    was_enabled = gc.isenabled()
    # A caller that froze objects froze this module too. `gc.get_freeze_count` walks through all of them (45 ms).
    freezes = any(obj is gc for obj in gc.get_objects())
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()

    def collect_if_due(step: int) -> None:
        if step % STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect()

    try:
        yield collect_if_due
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
