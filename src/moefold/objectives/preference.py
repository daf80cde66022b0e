"""Preference losses: DPO, IPO and SimPO on pairs of completions, KTO on single completions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.model.head import ModelOutput
from moefold.model.loss_function import weighted_sum
from moefold.model.loss_metrics import LossMetric
from moefold.objectives.sequences import Sequences

PreferenceMethod = Literal["dpo", "ipo", "simpo", "kto"]

PAIR_METRICS = (
    LossMetric("chosen_reward", "mean"),
    LossMetric("rejected_reward", "mean"),
    LossMetric("margin", "mean"),
    LossMetric("accuracy", "mean"),
)
"""Implicit rewards beta * score of both completions, their difference, and the fraction of pairs where it is
positive."""
KTO_METRICS = (
    LossMetric("desirable_reward", "mean"),
    LossMetric("undesirable_reward", "mean"),
    LossMetric("kl", "mean"),
)
"""Implicit rewards of desirable and undesirable completions, and the estimate of the KL divergence of each row."""


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """Loss of pairs of completions that a row packs as sequences 2k (chosen) and 2k + 1 (rejected).

    With the score of a completion, its log-probability minus the log-probability of the reference model:

    * dpo: -log sigmoid(beta * (chosen - rejected)) (arXiv:2305.18290).
    * ipo: (chosen - rejected - 1 / (2 beta))**2 with scores per token (arXiv:2310.12036; TRL's normalisation).
    * simpo: -log sigmoid(beta * (chosen - rejected) - gamma) with log-probabilities per token and without a reference
      (arXiv:2405.14734).
    * kto: sequence 2k is a completion and 2k + 1 the completion of another prompt after the same prompt; with z the
      mean score of the latter over the row, at least 0 and without gradient, 1 - sigmoid(beta * (score - z)) for a
      desirable completion and 1 - sigmoid(beta * (z - score)) for another (arXiv:2402.01306).

    Columns, besides "labels": "weights" [N, S], whose sum over the tokens of sequence 2k is the share of pair k in the
    loss; "sequence_ids" [N, S], -1 for tokens of prompts and padding; "reference_log_probs" [N, K], the sum over each
    sequence under the reference, but for simpo; "is_desirable", bool [N, K / 2], for kto.
    """

    method: PreferenceMethod
    beta: float = 0.1
    gamma: float = 0.5
    """Target margin (simpo)."""
    desirable_weight: float = 1.0
    """Factor of the loss of desirable completions (kto)."""
    undesirable_weight: float = 1.0
    """Factor of the loss of the others (kto)."""

    terms = ("preference",)

    @property
    def metrics(self) -> tuple[LossMetric, ...]:
        """Metrics over the pairs or completions of a step."""
        return KTO_METRICS if self.method == "kto" else PAIR_METRICS

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return self.method != "simpo"

    @property
    def _is_per_token(self) -> bool:
        return self.method in ("ipo", "simpo")

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Compute the term, [1]."""
        sequences = Sequences(columns["sequence_ids"], output.context_parallel)
        log_probs = output.log_probs(columns["labels"])
        total, count = sequences.sums(torch.stack((log_probs, torch.ones_like(log_probs)))).unbind(0)
        # A row has at most as many pairs as half its slots; those without a sequence have a weight of 0.
        num_slots = total.shape[1] // 2 * 2
        if self.needs_reference:
            num_slots = columns["reference_log_probs"].shape[1]
        score = total[:, :num_slots]
        count = count[:, :num_slots]
        if self.needs_reference:
            score = score - columns["reference_log_probs"]
        if self._is_per_token:
            score = score / count.clamp(min=1)
        first = score[:, 0::2]
        second = score[:, 1::2]
        is_pair = count[:, 0::2] > 0
        if self.method == "kto":
            loss_of_pair = self._kto_loss(output, first, second, is_pair, columns["is_desirable"])
        else:
            loss_of_pair = self._pair_loss(output, first, second, is_pair)
        of_slots = F.pad(loss_of_pair.repeat_interleave(2, 1), (0, total.shape[1] - num_slots))
        return weighted_sum(sequences.of_tokens(of_slots), columns["weights"])

    def _pair_loss(self, output: ModelOutput, chosen: Tensor, rejected: Tensor, is_pair: Tensor) -> Tensor:
        """Compute the loss of each pair, [B, K / 2], from the scores."""
        difference = chosen - rejected
        output.metrics.record_mean("chosen_reward", self.beta * chosen, is_pair)
        output.metrics.record_mean("rejected_reward", self.beta * rejected, is_pair)
        output.metrics.record_mean("margin", self.beta * difference, is_pair)
        output.metrics.record_mean("accuracy", (difference > 0).double(), is_pair)
        if self.method == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        gamma = self.gamma if self.method == "simpo" else 0.0
        return -F.logsigmoid(self.beta * difference - gamma)

    def _kto_loss(
        self, output: ModelOutput, score: Tensor, mismatched: Tensor, is_pair: Tensor, is_desirable: Tensor
    ) -> Tensor:
        """Compute the loss of each completion, [B, K / 2], from its score and the score of a mismatched completion."""
        num_pairs = is_pair.sum(1, keepdim=True).clamp(min=1)
        kl = (mismatched.detach().where(is_pair, 0.0).sum(1, keepdim=True) / num_pairs).clamp(min=0)
        output.metrics.record_mean("desirable_reward", self.beta * score, is_pair & is_desirable)
        output.metrics.record_mean("undesirable_reward", self.beta * score, is_pair & ~is_desirable)
        output.metrics.record_mean("kl", kl, is_pair.any(1, keepdim=True))
        sign = is_desirable.to(score.dtype) * 2 - 1
        # Of the scores' dtype: numbers alone would make the factor float32.
        weight = torch.full_like(score, self.undesirable_weight).masked_fill(is_desirable, self.desirable_weight)
        return weight * (1 - torch.sigmoid(self.beta * sign * (score - kl)))
