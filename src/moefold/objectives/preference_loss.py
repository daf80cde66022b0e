"""Preference losses: the frame of the methods that compare completions (`parts/alignment.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.config.groups.alignment import PairScores, PreferencePart
from moefold.model.head import ModelOutput
from moefold.model.loss_function import weighted_sum
from moefold.model.loss_metrics import LossMetric
from moefold.objectives.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """Loss of pairs of completions that a row packs as sequences 2k (chosen) and 2k + 1 (rejected).

    The score of a completion is its log-probability, minus the log-probability of the reference model if the method has
    a reference. For a method with labels, sequence 2k is a completion, and sequence 2k + 1 has the same prompt with the
    completion of another prompt.

    In addition to "labels" it reads the columns:

    * "sequence_ids" [N, S]: the sequence of each token, -1 for prompts and padding.
    * "weights" [N, S]: their sum over the tokens of sequence 2k is the share of pair k in the loss.
    * "reference_log_probs" [N, K]: sum over each sequence, for a method with a reference.
    * "is_desirable", bool [N, K / 2]: label of each pair, for a method with labels.
    """

    method: PreferencePart

    terms = ("preference",)

    @property
    def metrics(self) -> tuple[LossMetric, ...]:
        """Metrics over the pairs or completions of a step."""
        return tuple(LossMetric(name, "mean") for name in self.method.mean_metrics)

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Compute the term, [1]."""
        method = self.method
        sequences = Sequences(columns["sequence_ids"], output.context_parallel)
        log_probs = output.log_probs(columns["labels"])
        total, count = sequences.sums(torch.stack((log_probs, torch.ones_like(log_probs)))).unbind(0)
        # A row has at most half as many pairs as slots; pairs without a sequence have a weight of 0.
        num_slots = total.shape[1] // 2 * 2
        if method.has_reference:
            num_slots = columns["reference_log_probs"].shape[1]
        score = total[:, :num_slots]
        count = count[:, :num_slots]
        if method.has_reference:
            score = score - columns["reference_log_probs"]
        if method.is_per_token:
            score = score / count.clamp(min=1)
        scores = PairScores(
            first=score[:, 0::2],
            second=score[:, 1::2],
            is_pair=count[:, 0::2] > 0,
            is_desirable=columns["is_desirable"] if method.labelled else None,
            record_mean=output.metrics.record_mean,
        )
        slot_losses = F.pad(method.pair_loss(scores).repeat_interleave(2, 1), (0, total.shape[1] - num_slots))
        return weighted_sum(sequences.of_tokens(slot_losses), columns["weights"])
