"""A step that went wrong, in words and as a record of faults.jsonl."""

from dataclasses import dataclass
from typing import Any

from moefold.checkpoint.folder import checkpoint_folder, complete_checkpoints
from moefold.config.schema import Config
from moefold.data import SampleRow
from moefold.errors import some
from moefold.parallel.layout import Layout
from moefold.train.step import StepResult

LISTED_SAMPLES = 64
"""So many samples of a batch have their origin in faults.jsonl; the range of the batch is there in any case."""


@dataclass(frozen=True)
class Incident:
    """What became of a step that is not finite, or a spike."""

    step: int
    first_sample: int
    result: StepResult
    cfg: Config
    layout: Layout
    row: SampleRow

    def words(self) -> str:
        """What was seen, where, and in which samples."""
        parts = [f"step {self.step}: {self.result.verdict.what}"]
        if self.result.culprit is not None:
            parts.append(self.result.culprit.words())
        suspects = self._suspects()
        origins = some([self.row.origin(sample) for sample in suspects])
        size = self.cfg.train.global_batch_size
        which = "" if len(suspects) == size else f", of which these ranks read {len(suspects)}"
        batch = f"samples {self.first_sample} to {self.first_sample + size - 1} of the run{which}"
        return "; ".join([*parts, f"the batch is {batch}: {origins}"])

    def stop_message(self) -> str:
        """Why the run ends, what is safe, and the way out."""
        verdict = self.result.verdict
        saved = complete_checkpoints(checkpoint_folder(self.cfg))
        safe = f"the last checkpoint, {str(saved[-1])!r}, is intact" if saved else "there is no checkpoint yet"
        key = f"faults.{verdict.reason}"
        others = "'skip' or 'rollback'" if self.cfg.checkpoint.every else "'skip'"
        wish = getattr(self.cfg.faults, verdict.reason)
        way_out = (
            f"set {key}={others} to go on without such a batch" if wish == "stop" else "look at that data and rank"
        )
        return f"{self.words()}; nothing of the step was applied, and {safe}; {way_out}"

    def record(self) -> dict[str, Any]:
        """What faults.jsonl keeps."""
        result, suspects = self.result, self._suspects()
        record: dict[str, Any] = {
            "step": self.step,
            "kind": result.verdict.reason,
            "action": result.verdict.action,
            "what": result.verdict.what,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "batch": [self.first_sample, self.first_sample + self.cfg.train.global_batch_size],
            "samples": suspects,
            "origins": [self.row.origin(sample) for sample in suspects[:LISTED_SAMPLES]],
        }
        if (culprit := result.culprit) is not None:
            record["loss_ranks"], record["gradient_ranks"] = list(culprit.loss_ranks), list(culprit.gradient_ranks)
            record["is_lasting"] = culprit.is_lasting
            record["parameters"] = {f.rank: list(f.bad_parameters) for f in culprit.findings if f.bad_parameters}
        return record

    def _suspects(self) -> list[int]:
        """Samples of the batch that can be at fault: those that the ranks at fault read, or all."""
        size = self.cfg.train.global_batch_size
        culprit = self.result.culprit
        ranks = culprit.loss_ranks or culprit.gradient_ranks if culprit else ()
        replicas = {self.layout.attention.coordinate(rank, "dp") for rank in ranks}
        count = size // self.cfg.parallel.dp
        places = [place for place in range(size) if not replicas or place // count in replicas]
        return [self.first_sample + place for place in places]
