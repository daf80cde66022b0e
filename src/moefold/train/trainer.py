"""The training loop: steps, evaluation, checkpoints, metrics and fault handling of one run."""

import errno
import hashlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from moefold.checkpoint.checkpoint_dir import TrainState, read_meta
from moefold.checkpoint.save_load import Resume, checkpoint_state, load_checkpoint, resolve_resume
from moefold.checkpoint.saver import BackgroundSaver, CheckpointSaver
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.load import config_to_dict, write_config_json
from moefold.config.schema import CheckpointConfig, Config, has_moe_layers
from moefold.convert.init_from import load_initial_weights
from moefold.cost.flops import peak_bf16_tflops, train_flops_per_token
from moefold.data.routing_trace import TRACE_FOLDER, RoutingTraceWriter, trace_shape, truncate_trace
from moefold.errors import RunError, format_list
from moefold.launch.exit import SIGNAL_STATUS
from moefold.launch.failure import is_collective_error
from moefold.metrics.expert_counts import ExpertCountsWriter, truncate_expert_counts
from moefold.metrics.plot import plot_loss
from moefold.metrics.progress import Progress
from moefold.metrics.rank_times import RankTimeMetrics, Stragglers, describe_straggler
from moefold.metrics.step_metrics import StepMetrics
from moefold.metrics.writer import MetricsWriter, log_fault
from moefold.optim.build import set_step_count
from moefold.parallel.parallelize import parallelize
from moefold.parallel.replica_check import Divergence, HostFact
from moefold.train.callbacks.callback import Callback, FinishedStep, Position, TrainingContext
from moefold.train.data_loader import DataLoader, DroppedEvaluation, DroppedFile, continues_data
from moefold.train.log_lines import closing_lines, startup_lines
from moefold.train.signals import SIGNALS, StopSignals
from moefold.train.step_fault import StepFault
from moefold.train.train_step import StepResult, TrainingStep

SAVE_DRAIN_S = 60.0
"""How long a failing run waits for an asynchronous save to finish."""
SAVE_DRAIN_LOST_RANK_S = 5.0
"""The same limit after a collective failed because another rank is gone."""


class Trainer:
    """Training loop of one rank. Every branch that contains collectives depends only on values equal on all ranks."""

    def __init__(
        self,
        cfg: Config,
        groups: ParallelGroups,
        messages: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build the model and open the data; collective.

        Args:
            cfg: the recipe.
            groups: the process groups of this rank.
            messages: lines to log before all others.
            callbacks: further hooks, the same on every rank, called after those of the trainer.
        """
        self._cfg = cfg
        self._initial_messages = tuple(messages)
        self._groups = groups
        self._flight_recorder = groups.recorder
        # We never use torch's global RNG; seed it so that third-party code is deterministic.
        torch.manual_seed(cfg.run.seed)
        self._flight_recorder.set_phase("building the model")
        model = parallelize(cfg, groups)
        self._train_step = TrainingStep(model, cfg)
        self._flight_recorder.set_phase("opening the data")
        self._data_loader = DataLoader(cfg, groups, model.positions)
        self._position = Position()
        self._context = TrainingContext(cfg, groups, self._train_step, self._data_loader, self._position)
        self._callbacks = tuple(callbacks)
        self._flops_per_token = train_flops_per_token(cfg.model, cfg.train.seq_len).total
        # The known device peaks are for bfloat16.
        self._peak_tflops = cfg.metrics.peak_tflops or (
            _device_peak_tflops(groups.device) if cfg.run.dtype == "bfloat16" else None
        )
        self._is_first_rank = groups.rank == 0
        self._saver = CheckpointSaver(cfg)
        if cfg.checkpoint.async_save:
            group = groups.create_background_group().handle
            self._saver = BackgroundSaver(cfg, group, is_on_gpu=groups.device.type == "cuda")
        self._save_s = self._total_save_s = 0.0
        self._init_message = ""
        self._checkpoint_dp: int | None = None
        self._checked_step: int | None = None
        self._resumed_from: Path | None = None
        self._has_saved = False
        self._stragglers: Stragglers | None = None

    def run(self, stop: StopSignals) -> int:
        """Train to the last step or until a signal, and return the exit status; collective.

        Args:
            stop: signal handlers, installed during the training loop.

        Raises:
            ConfigError: the checkpoint to resume from cannot be read, or the data holds ids beyond the vocabulary.
            RunError: the recipe stops at a non-finite step or a spike, or data-parallel replicas have diverged.
        """
        resume = self._resume()
        status = 0
        first_step = self._position.step + 1
        self._init_stragglers()
        with ExitStack() as stack:
            stack.enter_context(stop)
            stack.enter_context(_explain_disk_full(self._cfg.run.dir))
            run_log = None
            if self._is_first_rank:
                run_log = stack.enter_context(RunLog(self._cfg, first_step, resume, self._startup_messages()))
            self._log_dropped_files(run_log, first_step)
            try:
                for callback in self._callbacks:
                    callback.on_start(self._context)
                status = self._run_missed_evaluation(resume, run_log, stop)
                while self._position.step < self._cfg.run.steps and status == 0:
                    status = self._one_step(run_log, stop)
                self._flight_recorder.set_phase("finishing the last save")
                self._finish_saves()
                for callback in self._callbacks:
                    callback.on_end(self._context, status)
            except Exception as error:
                # The last checkpoint may be almost written; a save that waits for a lost rank never finishes.
                self._saver.drain_with_timeout(SAVE_DRAIN_LOST_RANK_S if is_collective_error(error) else SAVE_DRAIN_S)
                raise
            if run_log is not None:
                run_log.log_end(status, self._position.step, self._total_save_s)
        return status

    def _resume(self) -> Resume:
        self._flight_recorder.set_phase("loading the checkpoint or the initial weights")
        resume = resolve_resume(self._cfg, self._data_loader.fingerprints)
        self._resumed_from = resume.path
        self._data_loader.open(None if resume.path is None else read_meta(resume.path))
        if resume.path is not None:
            self._load(resume.path)
        else:
            self._init_message = load_initial_weights(
                self._cfg, self._train_step.model, is_first_rank=self._is_first_rank
            )
        return resume

    def _load(self, path: Path) -> None:
        """Restore model, optimizer, data position and guard from a checkpoint; collective."""
        training = self._train_step
        meta = load_checkpoint(path, training.parameters, training.buffers, training.optimizer)
        self._position.step = meta.step
        self._position.tokens = meta.tokens
        self._position.samples = 0
        guard = meta.guard
        # A checkpoint named in the recipe may be continued on other data, which then starts at sample 0.
        if continues_data(self._cfg, meta, self._data_loader.fingerprints):
            self._position.samples = meta.samples
            self._data_loader.train_sampler.restore(meta.stream)
        elif isinstance(guard, dict):
            guard = guard | {"left_out": []}
        training.guard.restore(guard)
        set_step_count(training.optimizer, meta.step - training.guard.num_skipped)
        self._checkpoint_dp = meta.dp
        self._checked_step = meta.checked_step

    def _startup_messages(self) -> tuple[str, ...]:
        """Return the lines to log before the first step."""
        moe = self._cfg.moe
        dp = self._cfg.parallel.dp
        messages = [
            *self._initial_messages,
            *startup_lines(
                self._cfg,
                self._groups.device.type,
                self._data_loader.train_sampler,
                self._data_loader.validation_sampler,
            ),
        ]
        messages += [
            message
            for message in (self._train_step.model.message, self._init_message, self._data_loader.message)
            if message
        ]
        depends_on_dp = moe.aux_coefficient > 0 and moe.aux_kind == "global_batch" and has_moe_layers(self._cfg.model)
        if depends_on_dp and self._checkpoint_dp not in (None, dp):
            messages.append(
                f"moe.aux_kind='global_batch' depends on dp, which was {self._checkpoint_dp} and is {dp}: the loss "
                "continues with another grouping of micro-batches; 'last_global_batch' does not depend on it"
            )
        return tuple(messages)

    def _init_stragglers(self) -> None:
        """Gather the host names of all ranks for straggler messages; collective."""
        factor = self._cfg.faults.straggler_factor
        layout = self._groups.layout
        if factor and layout.world_size > 1:
            hosts = current_world().all_gather_object(socket.gethostname())
            self._stragglers = Stragglers(factor, layout.attention.groups("dp", "cp", "tp"), hosts)

    def _one_step(self, run_log: "RunLog | None", stop: StopSignals) -> int:
        """Train one step, then evaluate and save if due; return the exit status if the run ends here, else 0."""
        started_s = time.perf_counter()
        self._flight_recorder.begin_step(self._position.step + 1, "loading data")
        self._train_step.start_clock()
        batch, samples = self._data_loader.next_batch(self._position.samples, self._train_step.guard.skipped_ranges)
        self._log_dropped_files(run_log, self._position.step + 1)
        data_s = time.perf_counter() - started_s
        result = self._train_step.run(batch, self._position.step + 1, lambda: stop.flags, data_s, self._host_facts)
        step_time_s = time.perf_counter() - started_s
        self._saver.check()
        if result.decision.reason and not self._handle_fault(result, samples, run_log):
            return 0
        self._position.step += 1
        self._position.samples = samples[-1] + 1
        self._position.tokens += self._cfg.tokens_per_step
        is_last = self._position.step == self._cfg.run.steps
        raised = [number for number, count in zip(SIGNALS, result.flags, strict=True) if count]
        eval_loss = None
        is_eval_due = self._is_evaluation_due()
        is_evaluated = not is_eval_due
        if is_eval_due and not raised:
            eval_loss, raised = self._evaluate(run_log, stop)
            is_evaluated = eval_loss is not None or not raised
        replay_buffer = self._train_step.router_replay
        if replay_buffer is not None and replay_buffer.is_due(self._position.step):
            replay_buffer.save(self._position.step, None if run_log is None else run_log.trace_writer)
        self._flight_recorder.set_phase("writing metrics")
        if run_log is not None:
            run_log.write(self._metrics(result, step_time_s, eval_loss), result.expert_counts)
            run_log.log_stragglers(
                self._position.step, self._stragglers.update(result.rank_times) if self._stragglers else []
            )
        is_save_due = _is_save_due(self._cfg.checkpoint, self._position.step, is_last=is_last, is_stopped=bool(raised))
        divergences = result.divergences
        is_checked = result.replicas is not None
        if is_save_due and not is_checked and self._train_step.checks_replicas:
            # Loading a checkpoint makes all replicas equal, so weights that have diverged would go unnoticed.
            self._flight_recorder.set_phase("comparing replicas")
            divergences = self._train_step.divergences(batch, self._position.step, result.lr, self._host_facts())
            is_checked = True
        self._raise_on_divergence(divergences, run_log)
        self._checked_step = self._position.step if is_checked else self._checked_step
        self._save_s = 0.0
        if is_save_due:
            self._save()
        finished = FinishedStep(self._position.step, result, batch, step_time_s, is_last, raised, eval_loss)
        for callback in self._callbacks:
            self._flight_recorder.set_phase(f"the callback {type(callback).__name__}")
            callback.after_step(self._context, finished)
        return SIGNAL_STATUS + raised[0] if raised and not (is_last and is_evaluated) else 0

    def _is_evaluation_due(self) -> bool:
        return _is_due(self._cfg.train.eval_every, self._position.step, self._position.step == self._cfg.run.steps)

    def _evaluate(self, run_log: "RunLog | None", stop: StopSignals) -> tuple[float | None, list[Signals]]:
        """Return the validation loss, and the signals received during the evaluation; collective.

        The loss is None if a signal interrupted the evaluation, or if all validation samples are lost.
        """
        batches = self._data_loader.eval_batches()
        self._log_dropped_files(run_log, self._position.step)
        if not batches:
            return None, []
        eval_loss, flags = self._train_step.evaluate_or_stop(batches, lambda: stop.flags)
        return eval_loss, [number for number, count in zip(SIGNALS, flags, strict=bool(flags)) if count]

    def _run_missed_evaluation(self, resume: Resume, run_log: "RunLog | None", stop: StopSignals) -> int:
        """Run the evaluation that a signal prevented before the checkpoint was written; collective.

        Returns:
            The exit status if another signal came, else 0.
        """
        is_missing = run_log is not None and run_log.lacks_evaluation(self._position.step)
        if (
            resume.path is None
            or not self._is_evaluation_due()
            or not any(current_world().all_gather_object(is_missing))
        ):
            return 0
        for layer in self._train_step.model.moe_layers().values():
            layer.begin_step(self._position.step)
        eval_loss, raised = self._evaluate(run_log, stop)
        if run_log is not None and eval_loss is not None:
            run_log.add_evaluation(self._position.step, eval_loss)
        return SIGNAL_STATUS + raised[0] if raised and eval_loss is None else 0

    def _host_facts(self) -> list[HostFact]:
        """Return the host state (RNG, data position) before the step, compared across ranks by the replica check."""
        routers = [layer.router.step for layer in self._train_step.model.moe_layers().values()]
        device = self._groups.device
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
        digests = [hashlib.sha256(state.numpy().tobytes()).hexdigest() for state in states]
        data = self._data_loader
        return [
            HostFact("the random number generators", f"{self._cfg.run.seed} {routers} {digests}", ("stage",)),
            HostFact("the data position", f"{self._position.samples} {json.dumps(data.data_state())}", ("world",)),
            # Data-parallel ranks read different samples, so their streams may be at different blocks.
            HostFact(
                "the stream position", json.dumps(data.train_sampler.state(self._position.samples)), ("tp", "cp", "pp")
            ),
        ]

    def _log_dropped_files(self, run_log: "RunLog | None", step: int) -> None:
        """Log each dropped data file once, at the first step without it."""
        if run_log is not None:
            for dropped in self._data_loader.events:
                run_log.log_dropped_file(step, dropped)
        self._data_loader.events.clear()

    def _handle_fault(self, result: StepResult, samples: Sequence[int], run_log: "RunLog | None") -> bool:
        """Log, skip, roll back or stop after a non-finite step or a spike; return False after a rollback. Collective.

        Raises:
            RunError: the recipe stops the run.
        """
        action = result.decision.action
        step_fault = StepFault(
            self._position.step + 1, samples, result, self._cfg, self._groups.layout, self._data_loader.train_sampler
        )
        if run_log is not None:
            run_log.log_step_fault(step_fault)
        if action in ("log", "skip"):
            return True
        self._saver.drain()
        if action == "stop":
            raise RunError(step_fault.stop_message())
        self._roll_back(step_fault, run_log)
        return False

    def _raise_on_divergence(self, divergences: Sequence[Divergence], run_log: "RunLog | None") -> None:
        """End the run, before it saves, if data-parallel replicas hold different values; collective."""
        if not divergences:
            return
        if run_log is not None:
            log_fault(
                Path(self._cfg.run.dir),
                {"step": self._position.step, "kind": "divergence"} | {"found": list(map(asdict, divergences))},
            )
        self._saver.drain()
        hosts = current_world().all_gather_object(socket.gethostname())
        odd_ranks = sorted({rank for divergence in divergences for rank in divergence.ranks})
        last = "it is unknown since when, as no check came before: resume from a checkpoint that you trust"
        if self._checked_step is not None:
            last = f"all were alike at the check of step {self._checked_step}: resume from a checkpoint up to there"
        raise RunError(
            f"step {self._position.step}: replicas have diverged: "
            f"{format_list([divergence.describe() for divergence in divergences])}; look at "
            f"{format_list([f'rank {rank} ({hosts[rank]})' for rank in odd_ranks])}; {last} (checkpoint.resume=PATH)"
        )

    def _roll_back(self, step_fault: StepFault, run_log: "RunLog | None") -> None:
        """Load the newest intact checkpoint and skip the samples of the faulty batch from there on; collective."""
        found = Resume(self._resumed_from)
        if self._has_saved:
            own = replace(self._cfg.checkpoint, resume="auto")
            found = resolve_resume(replace(self._cfg, checkpoint=own), self._data_loader.fingerprints)
        if found.path is None:
            raise RunError(
                f"{step_fault.describe()}; nothing of the step was applied, and there is no checkpoint yet to go back "
                "to: set checkpoint.every lower, or skip such steps"
            )
        self._load(found.path)
        self._train_step.guard.skip_samples(step_fault.samples[0], step_fault.end_sample)
        if run_log is not None:
            run_log.rewind(found, self._position.step)

    def _save(self) -> None:
        self._flight_recorder.set_phase("saving a checkpoint")
        training = self._train_step
        state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
        stream = self._data_loader.train_sampler.state(self._position.samples)
        position = TrainState(
            step=self._position.step,
            samples=self._position.samples,
            tokens=self._position.tokens,
            stream=stream,
            guard=training.guard.state(),
            checked_step=self._checked_step,
            **self._data_loader.data_state(),
        )
        waited_s = self._saver.save(state, position)
        self._save_s += waited_s
        self._total_save_s += waited_s
        self._has_saved = True

    def _finish_saves(self) -> None:
        started_s = time.perf_counter()
        self._saver.finish()
        self._total_save_s += time.perf_counter() - started_s

    def _metrics(self, result: StepResult, step_time_s: float, eval_loss: float | None) -> StepMetrics:
        tokens_per_s = self._cfg.tokens_per_step / step_time_s
        tflops = tokens_per_s * self._flops_per_token / self._groups.layout.world_size / 1e12
        return StepMetrics(
            step=self._position.step,
            loss=result.loss,
            aux_loss=result.aux_loss,
            z_loss=result.z_loss,
            mtp_loss=result.mtp_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self._position.tokens,
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            tflops_per_rank=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops else None,
            memory_gib=result.peak_memory_gib,
            expert_load=result.expert_load,
            dropped_fraction=result.dropped_fraction,
            save_s=self._save_s,
            moe_layers=result.moe_layers,
            eval_loss=eval_loss,
            replicas=result.replicas,
            offload=result.offload,
            memory_by_part=result.memory_by_part,
            rank_times=RankTimeMetrics.from_ranks(result.rank_times),
            skipped=result.decision.reason if result.decision.action == "skip" else None,
        )


@contextmanager
def _explain_disk_full(run_dir: str) -> Iterator[None]:
    """Turn the OSError of a full or read-only disk under the run folder into one message.

    Raises:
        RunError: the disk is full or read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise RunError(
            f"run.dir={run_dir!r} cannot be written any more: {error.strerror}; free disk space, and the same command "
            "goes on from the last checkpoint"
        ) from error


class RunLog:
    """The run folder's files and the progress line; only rank 0 has one."""

    def __init__(self, cfg: Config, first_step: int, resume: Resume, messages: tuple[str, ...]) -> None:
        self._cfg = cfg
        self._dir = Path(cfg.run.dir)
        self._first_step = first_step
        self._resume = resume
        self._messages = messages
        self._stack = ExitStack()
        self._writers = ExitStack()
        self._counts: ExpertCountsWriter | None = None
        self.trace_writer: RoutingTraceWriter | None = None
        """Writes the routing of traced steps; None if the recipe traces nothing."""

    def __enter__(self) -> Self:
        cfg = self._cfg
        done = self._first_step - 1
        self._dir.mkdir(parents=True, exist_ok=True)
        write_config_json(cfg, self._dir / "config.json")
        with ExitStack() as stack:
            # A rollback closes and reopens the writers.
            stack.callback(lambda: self._writers.close())
            removed_lines = self._open_writers(done)
            self._progress = stack.enter_context(Progress(cfg.run.steps, self._first_step, sys.stdout))
            for message in self._messages:
                self._progress.message(message)
            self._log_resume(self._resume, "resumed from", done, removed_lines)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write(self, metrics: StepMetrics, expert_counts: np.ndarray) -> None:
        """Log one step."""
        if self._counts is not None and _is_due(self._cfg.metrics.expert_counts_every, metrics.step, False):
            self._counts.write(metrics.step, expert_counts)
        self._writer.write(metrics)
        self._progress.update(metrics)

    def lacks_evaluation(self, step: int) -> bool:
        """Return whether the log has step `step` but no validation loss for it."""
        return self._writer.lacks_evaluation(step)

    def add_evaluation(self, step: int, eval_loss: float) -> None:
        """Log the validation loss of a step that is already in the log."""
        self._writer.add_evaluation(step, eval_loss)
        self._progress.message(f"step {step}: eval {eval_loss:.4f}, made up after a signal")

    def log_step_fault(self, step_fault: StepFault) -> None:
        """Log a non-finite step or a spike."""
        log_fault(self._dir, step_fault.to_record())
        decision = step_fault.result.decision
        if decision.action != "stop":
            done = {"log": "trained on", "skip": "skipped", "rollback": "rolling back"}[decision.action]
            self._progress.message(f"{step_fault.describe()}; {done}, as faults.{decision.reason} says")

    def log_dropped_file(self, step: int, dropped: DroppedFile | DroppedEvaluation) -> None:
        """Log a dropped data file or a dropped evaluation."""
        log_fault(self._dir, {"step": step} | dropped.to_record())
        self._progress.message(f"step {step}: {dropped.describe()}, as data.corrupt says")

    def log_stragglers(self, step: int, records: list[dict[str, Any]]) -> None:
        """Log ranks that have been slow for several steps."""
        for record in records:
            log_fault(self._dir, {"step": step} | record)
            self._progress.message(describe_straggler(record))

    def rewind(self, resume: Resume, step: int) -> None:
        """Drop the log lines after `step`, where the run resumes."""
        self._writers.close()
        self._log_resume(resume, "rolled back to", step, self._open_writers(step))

    def log_end(self, status: int, step: int, total_save_s: float) -> None:
        """Plot the loss, and log how the run ended and how long saving blocked training, the last save included."""
        if step >= self._first_step:
            plot_loss(self._dir)
        if total_save_s > 0:
            self._progress.message(f"checkpointing blocked training for {total_save_s:.2f} s in total")
        for line in closing_lines(self._cfg, status, step):
            self._progress.message(line)

    def _log_resume(self, resume: Resume, verb: str, step: int, removed_lines: int) -> None:
        for skipped in resume.skipped:
            self._progress.message(f"skipped a damaged checkpoint, {skipped}")
        if resume.path is not None:
            self._progress.message(f"{verb} {resume.path} at step {step}{_format_removed_lines(removed_lines)}")

    def _open_writers(self, resume_step: int) -> int:
        """Open all per-step writers; entries after `resume_step` are removed.

        Returns:
            The number of lines removed from metrics.jsonl.
        """
        cfg = self._cfg
        shape = trace_shape(self._cfg)
        with ExitStack() as stack:
            config = config_to_dict(cfg)
            writer = MetricsWriter(self._dir, cfg.metrics, resume_step=resume_step, config=config)
            self._writer = stack.enter_context(writer)
            truncate_expert_counts(self._dir, resume_step)
            truncate_trace(self._dir, resume_step)
            if cfg.metrics.expert_counts_every and shape.layers:
                counts = ExpertCountsWriter(self._dir, shape.layers, shape.num_experts, resume_step=resume_step)
                self._counts = stack.enter_context(counts)
            if cfg.moe.trace_every:
                self.trace_writer = RoutingTraceWriter(self._dir, shape, resume_step=resume_step)
                if count := self.trace_writer.num_dropped:
                    steps = f"{count} step{'s' if count > 1 else ''}"
                    self._messages += (
                        f"removed {steps} from {TRACE_FOLDER}/: of another batch, sequence length or model",
                    )
            self._writers = stack.pop_all()
        return writer.removed_lines


def _format_removed_lines(removed_lines: int) -> str:
    if not removed_lines:
        return ""
    return f"; {removed_lines} line{'s' if removed_lines > 1 else ''} of metrics.jsonl beyond it removed"


def _is_due(every: int, step: int, is_end: bool) -> bool:
    return every > 0 and (step % every == 0 or is_end)


def _is_save_due(checkpoint: CheckpointConfig, step: int, *, is_last: bool, is_stopped: bool) -> bool:
    """Return whether to save after a step; a run that saves at all also saves when a signal stops it."""
    is_end = (is_last and checkpoint.at_end) or (is_stopped and checkpoint.saves)
    return is_end or _is_due(checkpoint.every, step, False)


def _device_peak_tflops(device: torch.device) -> float | None:
    return peak_bf16_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
