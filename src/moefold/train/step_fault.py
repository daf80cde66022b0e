"""A step that went wrong, in words and as a record of faults.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.checkpoint.checkpoint_dir import checkpoint_folder, named_checkpoints, quick_validate
from moefold.comm.groups import current_world
from moefold.config.schema import Config
from moefold.data import Sampler
from moefold.errors import format_list
from moefold.topology.layout import Layout
from moefold.train.train_step import StepResult

MAX_LISTED_SAMPLES = 64
"""So many samples of a batch have their origin in faults.jsonl; the range of the batch is there in any case."""


@dataclass(frozen=True)
class StepFault:
    """What became of a step that is not finite, or a spike."""

    step: int
    samples: Sequence[int]
    """The samples of the run that are its batch, ascending."""
    result: StepResult
    cfg: Config
    layout: Layout
    sampler: Sampler

    @property
    def end_sample(self) -> int:
        """Where the run goes on behind the batch."""
        return self.samples[-1] + 1

    def describe(self) -> str:
        """What was seen, where, and in which samples."""
        parts = [f"step {self.step}: {self.result.decision.description}"]
        if self.result.nonfinite_report is not None:
            parts.append(self.result.nonfinite_report.describe())
        suspects = self._suspect_samples()
        origins = format_list([self.sampler.origin(sample) for sample in suspects])
        size = len(self.samples)
        which = "" if len(suspects) == size else f", of which these ranks read {len(suspects)}"
        among = "" if self.end_sample - self.samples[0] == size else f"{size} among the "
        batch = f"{among}samples {self.samples[0]} to {self.samples[-1]} of the run{which}"
        return "; ".join([*parts, f"the batch is {batch}: {origins}"])

    def stop_message(self) -> str:
        """Why the run ends, what is safe, and the way out; collective over all ranks, of which one looks."""
        verdict = self.result.decision
        crew = current_world()
        safe = crew.all_gather_object(
            _describe_intact_checkpoint(checkpoint_folder(self.cfg)) if crew.is_rank0 else ""
        )[0]
        key = f"faults.{verdict.reason}"
        others = "'skip' or 'rollback'" if 0 < self.cfg.checkpoint.every < self.cfg.run.steps else "'skip'"
        wish = getattr(self.cfg.faults, verdict.reason)
        way_out = (
            f"set {key}={others} to go on without such a batch" if wish == "stop" else "look at that data and rank"
        )
        return f"{self.describe()}; nothing of the step was applied, and {safe}; {way_out}"

    def to_record(self) -> dict[str, Any]:
        """What faults.jsonl keeps."""
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
        if (culprit := result.nonfinite_report) is not None:
            record["loss_ranks"] = list(culprit.loss_ranks)
            record["gradient_ranks"] = list(culprit.gradient_ranks)
            record["is_lasting"] = culprit.is_reproducible
            record["parameters"] = {f.rank: list(f.bad_parameters) for f in culprit.findings if f.bad_parameters}
        return record

    def _suspect_samples(self) -> list[int]:
        """Samples of the batch that can be at fault: those that the ranks at fault read, or all."""
        size = len(self.samples)
        culprit = self.result.nonfinite_report
        ranks = culprit.loss_ranks or culprit.gradient_ranks if culprit else ()
        replicas = {self.layout.attention.coordinate(rank, "dp") for rank in ranks}
        count = size // self.cfg.parallel.dp
        places = [place for place in range(size) if not replicas or place // count in replicas]
        return [self.samples[place] for place in places]


def _describe_intact_checkpoint(folder: Path) -> str:
    """The newest checkpoint of a folder that sizes of files find nothing wrong with, and later ones, in words."""
    damaged: list[str] = []
    for path in reversed(named_checkpoints(folder)):
        if not (faults := quick_validate(path)):
            which = "the last checkpoint"
            later = ""
            if damaged:
                which = "the last sound checkpoint"
                later = f" ({format_list(damaged)})"
            return f"{which}, {str(path)!r}, is intact as far as sizes of files tell{later}"
        damaged.append(f"{path.name} is damaged: {format_list(faults)}")
    return f"no checkpoint is intact ({format_list(damaged)})" if damaged else "there is no checkpoint yet"
