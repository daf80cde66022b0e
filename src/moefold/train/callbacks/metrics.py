"""Callbacks that write the metrics of each step, and the routing of traced steps."""

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moefold.comm.groups import current_world
from moefold.config.sections.metrics import MetricsConfig
from moefold.config.sections.moe import TRACE_FOLDER
from moefold.config.sections.run import RunConfig
from moefold.metrics.rank_times import Stragglers, rank_time_metrics
from moefold.metrics.writer import to_record
from moefold.train.callbacks.callback import Callback, CallbackStage, FinishedStep, StageCallback, TrainingContext

if TYPE_CHECKING:
    from moefold.metrics.rank_times import Stragglers


class MetricsLogging(StageCallback):
    """Callback that computes the metrics of each step, and writes them and the expert counts on rank 0.

    Args:
        flops_per_token: FLOPs of a step for each token of the batch.
    """

    stage = CallbackStage.METRICS

    def __init__(
        self,
        run: RunConfig,
        metrics: MetricsConfig,
        flops_per_token: float,
        device: torch.device,
        callbacks: Sequence[Callback],
    ) -> None:
        self._flops_per_token = flops_per_token
        self._measuring = [callback for callback in callbacks if callback.has_metrics]
        self._peak_tflops: float | None = metrics.peak_tflops
        if not self._peak_tflops and run.dtype == "bfloat16" and device.type == "cuda":
            from moefold.cost.device_peaks import peak_bf16_tflops

            self._peak_tflops = peak_bf16_tflops(torch.cuda.get_device_name(device))

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Compute and write the metrics of the step."""
        context.groups.recorder.set_phase("writing metrics")
        from moefold.metrics.definitions import measured, reduced, step_values

        values = self._values(context, step)
        further = [metric for callback in self._measuring for metric in callback.metrics]
        if self._measuring:
            by_callback = [measured(cb.metrics, cb.measure(context, step), type(cb).__name__) for cb in self._measuring]
            local = {name: value for metrics in by_callback for name, value in metrics.items()}
            values |= reduced(further, current_world().all_gather_object(local))
        context.metrics = step_values(values, further)
        if context.log is not None:
            context.log.write(context.metrics, step.result.expert_counts)

    def _values(self, context: TrainingContext, step: FinishedStep) -> dict[str, Any]:
        result = step.result
        tokens_per_s = step.num_tokens / step.step_time_s
        tflops = tokens_per_s * self._flops_per_token / context.groups.layout.world_size / 1e12
        return result.numbers() | {
            "step": step.number,
            "loss_terms": result.loss_terms if len(result.loss_terms) > 1 else None,
            "loss_metrics": None if step.rl else result.loss_metrics or None,
            "tokens": context.position.tokens,
            "tokens_consumed": context.position.tokens_consumed,
            "step_time_s": step.step_time_s,
            "tokens_per_s": tokens_per_s,
            "tflops_per_rank": tflops,
            "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "memory_gib": result.peak_memory_gib,
            "save_s": context.save_s,
            "eval_loss": step.eval_loss,
            "rank_times": rank_time_metrics(result.rank_times),
            "rl": step.rl and step.rl | result.loss_metrics,
            "sites": step.sites,
            "skipped": result.decision.reason if result.decision.action == "skip" else None,
        }


class StepReporting(Callback):
    """Callback that passes the metrics of each step to a function of the program, on each rank, and keeps the last."""

    def __init__(self, on_step: Callable[[dict[str, Any]], None] | None) -> None:
        self._on_step = on_step
        self.last: dict[str, Any] | None = None
        """Metrics of the step that ended the run, or None before it."""

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Report the step, and keep its metrics if it is the last step."""
        if step.is_last or step.signals:
            self.last = to_record(context.metrics)
        if self._on_step is not None:
            self._on_step(to_record(context.metrics))


class RoutingTraceSaving(StageCallback):
    """Callback that gathers the recorded routing and writes it on rank 0 (moe.trace_every)."""

    stage = CallbackStage.METRICS

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Save the routing of the step if it was traced. It is collective."""
        buffer = context.training.router_replay
        if buffer is not None and buffer.is_due(step.number):
            writer = None if context.log is None else context.log.trace_writer
            if context.log is None or writer is None or context.log.outputs.has_failed(TRACE_FOLDER):
                buffer.save(step.number, None)
            else:
                # Errors of the gather concern the whole job, and end it.
                context.log.outputs.attempt(TRACE_FOLDER, lambda: buffer.save(step.number, writer), (OSError,))


class StragglerDetection(StageCallback):
    """Callback that logs slow ranks with the names of their hosts."""

    stage = CallbackStage.REPORTS

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._stragglers: Stragglers | None = None

    def on_start(self, context: TrainingContext) -> None:
        """Gather the host names of all ranks. It is collective."""
        layout = context.groups.layout
        if self._factor and layout.world_size > 1:
            hosts = current_world().all_gather_object(socket.gethostname())
            self._stragglers = Stragglers(self._factor, layout.attention.groups("dp", "cp", "tp"), hosts)

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Log the ranks that are slow after this step, on rank 0."""
        if context.log is not None and self._stragglers is not None:
            context.log.log_stragglers(step.number, self._stragglers.update(step.result.rank_times))
