"""Files of the run folder and the progress line, on rank 0."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGPIPE
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from moefold.checkpoint.resume import Resume
from moefold.config.schema import Config, config_to_dict, write_config_json
from moefold.config.sections.moe import TRACE_FOLDER
from moefold.config.sections.run import SETTINGS_FILE
from moefold.errors import ConfigError
from moefold.message_text import Problem
from moefold.metrics.expert_counts import COUNTS_FILE, ExpertCountsWriter, truncate_expert_counts
from moefold.metrics.rank_times import describe_straggler
from moefold.metrics.step_line import Progress, StepLine
from moefold.metrics.writer import FAULTS_FILE, AuxiliaryOutputs, MetricsWriter, log_fault
from moefold.terminal import print_escaped
from moefold.train.position import is_due
from moefold.train.run_summary import closing_lines
from moefold.train.signals import StopSignals

if TYPE_CHECKING:
    from moefold.data.routing_trace import RoutingTraceWriter
    from moefold.train.step_data import DataEvent
    from moefold.train.step_fault import StepFault


class RunLog:
    """The run folder's files and the progress line. Only rank 0 has one."""

    def __init__(
        self,
        cfg: Config,
        first_step: int,
        resume: Resume,
        messages: tuple[str, ...],
        stop: StopSignals,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_gpu: bool,
    ) -> None:
        self._cfg = cfg
        self._is_gpu = is_gpu
        self._dir = Path(cfg.run.dir)
        self._first_step = first_step
        self._resume = resume
        self._messages = messages
        self._stop = stop
        self._clock = clock
        self._is_pipe_broken = False
        self.outputs = AuxiliaryOutputs(self.message)
        """Files and trackers that may fail while the run goes on."""
        self._stack = ExitStack()
        self.writer: MetricsWriter
        """Writes metrics.jsonl and logs to the trackers."""
        self._writers = ExitStack()
        self._counts: ExpertCountsWriter | None = None
        self.trace_writer: RoutingTraceWriter | None = None
        """Writes the routing of traced steps, or None if the recipe traces nothing."""

    def __enter__(self) -> Self:
        cfg = self._cfg
        done = self._first_step - 1
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            write_config_json(cfg, self._dir / SETTINGS_FILE)
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            way_out = "free disk space, or set another run.dir"
            raise ConfigError(Problem("run.dir", cfg.run.dir, rule, way_out)) from error
        with ExitStack() as stack:
            line = StepLine(cfg.run.steps, is_gpu=self._is_gpu, evaluates=cfg.train.eval_every > 0)
            progress = Progress(
                cfg.run.steps,
                self._first_step,
                sys.stdout,
                line=line,
                clock=self._clock,
                on_broken_pipe=self._stop_on_broken_pipe,
            )
            self._progress = stack.enter_context(progress)
            for message in self._messages:
                self._progress.message(message)
            # A rollback closes and reopens the writers.
            stack.callback(lambda: self._writers.close())
            self.outputs.rejects_settings = True
            removed_lines = self._open_writers(done)
            self.outputs.rejects_settings = False
            self._log_resume(self._resume, "resumed from", done, removed_lines)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, values: Mapping[str, Any], expert_counts: np.ndarray) -> None:
        """Log one step."""
        counts = self._counts
        if counts is not None and is_due(self._cfg.metrics.expert_counts_every, values["step"]):
            routed = expert_counts[:, : self._cfg.model.experts.num_experts]
            self.outputs.attempt(COUNTS_FILE, lambda: counts.write(values["step"], routed))
        self.writer.write(values)
        self._progress.update(values)

    def log_fault(self, record: Mapping[str, Any]) -> None:
        """Append a fault to faults.jsonl."""
        self.outputs.attempt(FAULTS_FILE, lambda: log_fault(self._dir, record))

    def log_step_fault(self, step_fault: "StepFault") -> None:
        """Log a non-finite step or a spike."""
        self.log_fault(step_fault.to_record())
        decision = step_fault.result.decision
        if decision.action != "stop":
            done = {"log": "trained on", "skip": "skipped", "rollback": "rolling back"}[decision.action]
            self._progress.message(
                f"step {step_fault.step}: {decision.description}; {done} (faults.{decision.reason}); "
                f"see moefold board {self._board_folder}"
            )

    def log_dropped_file(self, step: int, dropped: "DataEvent") -> None:
        """Log dropped data."""
        self.log_fault({"step": step} | dropped.record)
        self._progress.message(f"step {step}: {dropped.text}, as {dropped.setting} says")

    def log_skipped_round(self, step: int, why: str) -> None:
        """Log a round of the sites that was not applied."""
        self.log_fault({"step": step, "kind": "sites", "action": "round skipped", "what": why})
        self._progress.message(f"step {step}: the round of the sites is skipped: {why}")

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._progress.message(text)

    def report_stop(self, step: int, stopped_s: float) -> None:
        """Show for how long this process was stopped before the end of a step, if it was."""
        if stopped_s > 0:
            self.message(
                f"step {step}: the run was stopped for {stopped_s:.1f} s (by a signal, its scheduler, or a suspended "
                "machine) and goes on; times, rates and faults.timeout_s leave that out"
            )

    def log_stragglers(self, step: int, records: list[dict[str, Any]]) -> None:
        """Log ranks that have been slow for several steps."""
        for record in records:
            self.log_fault({"step": step} | record)
            self._progress.message(describe_straggler(record))

    @property
    def _board_folder(self) -> str:
        """Folder of the runs, as an argument of `moefold board`."""
        return shlex.quote(str(self._dir.parent))

    def rewind(self, resume: Resume, step: int) -> None:
        """Drop the log lines after `step`, where the run resumes."""
        self._writers.close()
        self._log_resume(resume, "rolled back to", step, self._open_writers(step))

    def log_end(self, status: int, step: int, total_save_s: float) -> None:
        """Plot the loss if asked. Log how the run ended and how long saving blocked it, including the last save."""
        self._progress.end()
        if self._cfg.metrics.plot and step >= self._first_step:
            from moefold.metrics.plot import LOSS_PLOT_FILE, plot_loss

            curves = self.outputs.attempt(LOSS_PLOT_FILE, lambda: plot_loss(self._dir))
            if curves is not None:
                self._progress.message(f"curves: {curves}; all runs: moefold board {self._board_folder}")
        if total_save_s > 0:
            self._progress.message(f"checkpointing blocked training for {total_save_s:.2f} s in total")
        for line in closing_lines(self._cfg, status, step):
            if self._is_pipe_broken:
                # Standard error may be the same closed pipe.
                with suppress(BrokenPipeError):
                    print_escaped(f"moefold: {line}", file=sys.stderr, flush=True)
            else:
                self._progress.message(line)

    def _stop_on_broken_pipe(self) -> None:
        self._is_pipe_broken = True
        self._stop.request(SIGPIPE)

    def _log_resume(self, resume: Resume, verb: str, step: int, removed_lines: int) -> None:
        for skipped in resume.skipped:
            self._progress.message(f"skipped a damaged checkpoint, {skipped}")
        if resume.path is not None:
            removed = f"; {removed_lines} line{'s' * (removed_lines > 1)} of metrics.jsonl beyond it removed"
            self._progress.message(f"{verb} {resume.path} at step {step}{removed if removed_lines else ''}")

    def _open_writers(self, resume_step: int) -> int:
        """Open all per-step writers. Entries after `resume_step` are removed.

        Returns:
            The number of lines removed from metrics.jsonl.
        """
        cfg = self._cfg
        moe_layers = cfg.model.moe_layer_numbers
        with ExitStack() as stack:
            config = config_to_dict(cfg)
            writer = MetricsWriter(self._dir, cfg.metrics, resume_step=resume_step, config=config, outputs=self.outputs)
            self.writer = stack.enter_context(writer)
            self.outputs.attempt(COUNTS_FILE, lambda: truncate_expert_counts(self._dir, resume_step))
            if (self._dir / TRACE_FOLDER).is_dir():
                from moefold.data.routing_trace import truncate_trace

                self.outputs.attempt(TRACE_FOLDER, lambda: truncate_trace(self._dir, resume_step))
            self._counts = None
            if cfg.metrics.expert_counts_every and moe_layers:
                count = cfg.model.experts.num_experts
                self._counts = self.outputs.attempt(
                    COUNTS_FILE,
                    lambda: ExpertCountsWriter(self._dir, moe_layers, count, resume_step=resume_step),
                )
            if self._counts is not None:
                stack.callback(self._close, COUNTS_FILE, self._counts)
            if cfg.moe.trace_every:
                from moefold.data.routing_trace import RoutingTraceWriter, trace_shape

                shape = trace_shape(cfg.model, cfg.train)
                self.trace_writer = self.outputs.attempt(
                    TRACE_FOLDER, lambda: RoutingTraceWriter(self._dir, shape, resume_step=resume_step)
                )
            if self.trace_writer is not None and (count := self.trace_writer.num_dropped):
                steps = f"{count} step{'s' if count > 1 else ''}"
                self.message(f"removed {steps} from {TRACE_FOLDER}/: of another batch, sequence length or model")
            self._writers = stack.pop_all()
        return writer.removed_lines

    def _close(self, name: str, writer: ExpertCountsWriter) -> None:
        """Close a writer. A writer that has failed would write the rest of its buffer again."""
        if self.outputs.has_failed(name):
            with suppress(OSError):
                writer.close()
        self.outputs.attempt(name, writer.close)
