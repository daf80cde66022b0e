"""The training run: steps, evaluation, checkpoints and metrics, from the recipe to the loss curve."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from moefold.checkpoint.folder import find_resume
from moefold.checkpoint.store import load_checkpoint, save_checkpoint
from moefold.config.load import config_to_dict, write_config_json
from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.metrics.flops import train_flops_per_token
from moefold.metrics.memory import peak_memory_gib
from moefold.metrics.peak import peak_bf16_tflops
from moefold.metrics.plot import plot_loss
from moefold.metrics.progress import Progress
from moefold.metrics.step import StepMetrics
from moefold.metrics.writer import MetricsWriter
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import StepResult, TrainingStep
from moefold.train.stop import SIGNALS, StopSignals

SIGNAL_STATUS = 128
"""A run that a signal ended exits with 128 + its number, as shells do: 130 for Ctrl-C."""


class Trainer:
    """One rank's part in a run. Everything that ranks must agree on is decided from values equal on all of them."""

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        self._cfg = cfg
        self._groups = groups
        self._model = parallelize(cfg, groups)
        self._training = TrainingStep(self._model, cfg)
        data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        self._batches = BatchLoader(data.train, cfg, groups, self._model.positions)
        self._held_out = BatchLoader(data.validation, cfg, groups, self._model.positions)
        self._step = self._samples = self._tokens = 0
        self._flops_per_token = train_flops_per_token(cfg.model, cfg.train.seq_len).total
        self._peak_tflops = cfg.metrics.peak_tflops or _device_peak(groups.device)
        self._is_first_rank = groups.rank == 0

    def run(self) -> int:
        """Train to the last step, or until a signal; returns the exit status. Collective."""
        resume = find_resume(self._cfg)
        if resume is not None:
            meta = load_checkpoint(resume, self._training.parameters, self._training.optimizer)
            self._step, self._samples, self._tokens = meta.step, meta.samples, meta.tokens
        run_dir, steps = Path(self._cfg.run.dir), self._cfg.run.steps
        first_step = self._step + 1
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignals())
            report = None
            if self._is_first_rank:
                run_dir.mkdir(parents=True, exist_ok=True)
                write_config_json(self._cfg, run_dir / "config.json")
                report = stack.enter_context(_Report(self._cfg, first_step))
                if resume is not None:
                    report.message(f"resumed from {resume} at step {self._step}")
            status = 0
            while self._step < steps and status == 0:
                status = self._one_step(report, stop)
            if report is not None:
                report.message(_farewell(status, self._step, steps))
        if self._is_first_rank and self._step >= first_step:
            plot_loss(run_dir)
        return status

    def _one_step(self, report: "_Report | None", stop: StopSignals) -> int:
        """Train, evaluate and save as the recipe says; returns the exit status if the run is to end, else 0."""
        started_s = time.perf_counter()
        memory = peak_memory_gib(self._groups.device.type)
        result = self._training.run(self._batches.batch(self._samples), self._step + 1, stop.flags, memory)
        step_time_s = time.perf_counter() - started_s
        self._step += 1
        self._samples += self._cfg.train.global_batch_size
        self._tokens += self._cfg.tokens_per_step
        is_last = self._step == self._cfg.run.steps
        raised = [number for number, count in zip(SIGNALS, result.flags, strict=True) if count]
        eval_loss = self._evaluate() if _is_due(self._cfg.train.eval_every, self._step, is_last) else None
        if report is not None:
            report.write(self._metrics(result, step_time_s, eval_loss))
        if _is_due(self._cfg.checkpoint.every, self._step, is_last or bool(raised)):
            self._save()
        return SIGNAL_STATUS + raised[0] if raised and not is_last else 0

    def _evaluate(self) -> float:
        size = self._cfg.train.global_batch_size
        count = -(-self._cfg.train.eval_samples // size)
        return self._training.evaluate([self._held_out.batch(i * size) for i in range(count)])

    def _save(self) -> None:
        save_checkpoint(
            self._cfg,
            self._training.parameters,
            self._training.optimizer,
            step=self._step,
            samples=self._samples,
            tokens=self._tokens,
            is_first_rank=self._is_first_rank,
        )

    def _metrics(self, result: StepResult, step_time_s: float, eval_loss: float | None) -> StepMetrics:
        tokens_per_s = self._cfg.tokens_per_step / step_time_s
        tflops = tokens_per_s * self._flops_per_token / self._groups.layout.world_size / 1e12
        return StepMetrics(
            step=self._step,
            loss=result.loss,
            aux_loss=result.aux_loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self._tokens,
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            tflops_per_rank=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops else None,
            memory_gib=result.peak_memory_gib,
            expert_load=result.expert_load,
            dropped_fraction=result.dropped_fraction,
            eval_loss=eval_loss,
        )


class _Report:
    """The metrics file and the progress line, on the one rank that keeps them."""

    def __init__(self, cfg: Config, first_step: int) -> None:
        self._writer = MetricsWriter(
            Path(cfg.run.dir), cfg.metrics, resume_step=first_step - 1, config=config_to_dict(cfg)
        )
        self._progress = Progress(cfg.run.steps, first_step, sys.stdout)

    def __enter__(self) -> "_Report":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)  # type: ignore[arg-type]
        self._writer.close()

    def write(self, metrics: StepMetrics) -> None:
        self._writer.write(metrics)
        self._progress.update(metrics)

    def message(self, text: str) -> None:
        self._progress.message(text)


def _is_due(every: int, step: int, is_end: bool) -> bool:
    return every > 0 and (step % every == 0 or is_end)


def _farewell(status: int, step: int, steps: int) -> str:
    if status:
        return f"stopped by signal {status - SIGNAL_STATUS} after step {step} of {steps}"
    return f"done: {step} steps"


def _device_peak(device: torch.device) -> float | None:
    return peak_bf16_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
