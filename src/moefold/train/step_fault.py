"""Faults of a step (non-finite values, spikes, sampler mismatch): log and stop messages, records for faults.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.checkpoint.find_checkpoint import checkpoint_folder, named_checkpoints
from moefold.checkpoint.integrity import quick_validate
from moefold.comm.groups import current_world
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.run import RunConfig
from moefold.data.sampler import SampleCatalog
from moefold.errors import RunError
from moefold.message_text import format_list
from moefold.metrics.writer import MISMATCH_FILE
from moefold.topology.layout import Layout
from moefold.train.step_meter import StepResult

MAX_LISTED_SAMPLES = 64
"""Maximum number of samples whose origin is listed in faults.jsonl. The sample range of the batch is always there."""


class MismatchError(RunError):
    """The sampler's log-probabilities differ from the log-probabilities of training."""


@dataclass(frozen=True)
class StepFault:
    """Report of a non-finite step, a spike, or a mismatch of sampler and training."""

    step: int
    samples: Sequence[int]
    """The samples of the batch, as sample numbers of the run, ascending."""
    result: StepResult
    run: RunConfig
    checkpoint: CheckpointConfig
    faults: FaultsConfig
    samples_per_rank: int
    """Samples of a batch that a data-parallel rank reads, padding included."""
    layout: Layout
    sampler: SampleCatalog

    @property
    def end_sample(self) -> int:
        """The first sample of the run after the batch."""
        return self.samples[-1] + 1

    def describe(self) -> str:
        """Describe the fault: the non-finite values or the spike, with ranks and samples."""
        texts = [f"step {self.step}: {self.result.decision.description}"]
        if self.result.nonfinite_report is not None:
            texts.append(self.result.nonfinite_report.describe())
        suspects = self._suspect_samples()
        origins = format_list([self.sampler.origin(sample) for sample in suspects])
        size = len(self.samples)
        shares = "" if len(suspects) == size else f", of which these ranks read {len(suspects)}"
        among = "" if self.end_sample - self.samples[0] == size else f"{size} among the "
        batch = f"{among}samples {self.samples[0]} to {self.samples[-1]} of the run{shares}"
        return "; ".join([*texts, f"the batch is {batch}: {origins}"])

    def stop_error(self, advice: str) -> RunError:
        """Return the error that stops the run, with the intact checkpoint and the way out. It is collective."""
        decision = self.result.decision
        world = current_world()
        safe = world.all_gather_object(
            _describe_intact_checkpoint(checkpoint_folder(self.run, self.checkpoint)) if world.is_rank0 else ""
        )[0]
        kept = f"nothing of the step was applied, and {safe}"
        if decision.reason == "mismatch":
            worst = self.result.loss_metrics.get("mismatch_max", 0.0)
            rollouts = Path(self.run.dir) / MISMATCH_FILE
            return MismatchError(
                f"step {self.step}: {decision.description} (the worst token: {worst:.3g}); {kept}; the rollouts are in "
                f"{str(rollouts)!r}; {advice}"
            )
        key = f"faults.{decision.reason}"
        others = "'skip' or 'rollback'" if 0 < self.checkpoint.every < self.run.steps else "'skip'"
        action = getattr(self.faults, decision.reason)
        way_out = (
            f"set {key}={others} to go on without such a batch" if action == "stop" else "look at that data and rank"
        )
        return RunError(f"{self.describe()}; {kept}; {way_out}")

    def to_record(self) -> dict[str, Any]:
        """Return the record for faults.jsonl."""
        result = self.result
        suspects = self._suspect_samples()
        record: dict[str, Any] = {
            "step": self.step,
            "kind": result.decision.reason,
            "action": result.decision.action,
            "what": result.decision.description,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "batch": [self.samples[0], self.end_sample],
            "samples": suspects,
            "origins": [self.sampler.origin(sample) for sample in suspects[:MAX_LISTED_SAMPLES]],
        }
        if (report := result.nonfinite_report) is not None:
            record["loss_ranks"] = list(report.loss_ranks)
            record["gradient_ranks"] = list(report.gradient_ranks)
            record["is_lasting"] = report.is_reproducible
            record["parameters"] = {f.rank: list(f.bad_parameters) for f in report.findings if f.bad_parameters}
        return record

    def _suspect_samples(self) -> list[int]:
        """Return the samples that may be at fault: the samples of the faulty ranks, or all."""
        size = len(self.samples)
        report = self.result.nonfinite_report
        ranks = report.loss_ranks or report.gradient_ranks if report else ()
        if report is not None and ranks and report.findings[ranks[0]].samples is not None:
            placed = {
                sample for finding in report.findings if finding.rank in ranks for sample in finding.samples or ()
            }
            # Numbers beyond the batch belong to padding.
            return [self.samples[i] for i in sorted(placed) if i < size]
        replicas = {self.layout.attention.coordinate(rank, "dp") for rank in ranks}
        indices = [i for i in range(size) if not replicas or i // self.samples_per_rank in replicas]
        return [self.samples[i] for i in indices]


def _describe_intact_checkpoint(folder: Path) -> str:
    """Describe the newest checkpoint of a folder whose file sizes are right, and the later, damaged checkpoints."""
    damaged: list[str] = []
    for path in reversed(named_checkpoints(folder)):
        if not (faults := quick_validate(path)):
            name = "the last checkpoint"
            later = ""
            if damaged:
                name = "the last sound checkpoint"
                later = f" ({format_list(damaged)})"
            return f"{name}, {str(path)!r}, is intact as far as file sizes show{later}"
        damaged.append(f"{path.name} is damaged: {format_list(faults)}")
    return f"no checkpoint is intact ({format_list(damaged)})" if damaged else "there is no checkpoint yet"
