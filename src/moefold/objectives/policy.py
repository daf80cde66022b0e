"""Policy-gradient losses: policy gradient, PPO/GRPO clipping, CISPO, GSPO, the KL penalty and sampler corrections."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moefold.model.head import ModelOutput
from moefold.model.loss import SoftmaxOptions
from moefold.model.loss_function import weighted_sum
from moefold.model.loss_metrics import LossMetric
from moefold.objectives.sequences import Sequences

Objective = Literal["policy", "clip", "cispo", "sequence"]
KLKind = Literal["k3", "k2"]
Correction = Literal["none", "clamp", "mask", "sequence_mask"]

MISMATCH = "mismatch_mean"
"""Metric whose limit is rl.mismatch_limit."""
POLICY_METRICS = (
    LossMetric("entropy", "mean"),
    LossMetric("ratio_max", "max"),
    LossMetric("clipped", "mean"),
    LossMetric("kl", "mean"),
    LossMetric(MISMATCH, "mean"),
    LossMetric("mismatch_max", "max"),
    LossMetric("mismatch_equal", "mean"),
    LossMetric("corrected", "mean"),
)
"""Metrics over the tokens that are trained (nonzero weight): entropy of the policy in nats; largest ratio; fraction of
tokens whose ratio is clipped; KL penalty before its coefficient; absolute difference to the log-probabilities of the
sampler, and the fraction of tokens where they are equal by bits; fraction of tokens whose correction is cut or masked.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss:
    """Minus the advantage-weighted objective of sampled tokens, and a penalty on the KL divergence from a reference.

    Columns that it reads, [N, S/cp] each like "labels" (see `columns`): "weights", which carry all normalisation and
    are 0 for tokens that are not trained; "advantages"; "old_log_probs", of the sampler under `temperature`;
    "trainer_log_probs", of the weights that sampled, computed by the training forward pass; "reference_log_probs", of
    the reference under `temperature`; "sequence_ids", index of the rollout within its row, int64, -1 for none.

    With r = exp(log_probs - old_log_probs) and the advantage A of a token, its loss is

    * policy: -A * log_probs (REINFORCE), for one update per batch, where r would be 1.
    * clip: -min(r * A, clamp(r, 1 - clip_low, 1 + clip_high) * A) (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300, with
      two bounds as DAPO, arXiv:2503.14476).
    * cispo: -clamp(r, 1 - clip_low, 1 + clip_high) * A * log_probs, the factor without gradient (arXiv:2506.13585).
    * sequence: clip with the geometric mean of r over the tokens of the sequence (GSPO, arXiv:2507.18071). The token's
      own advantage and weight count.

    The ratio is taken against "trainer_log_probs" instead of "old_log_probs" where a correction asks for them.
    """

    objective: Objective = "policy"
    clip_low: float = 0.2
    """Lower bound of the ratio is 1 - clip_low; 1: none."""
    clip_high: float = 0.28
    """Upper bound of the ratio is 1 + clip_high."""
    kl: float = 0.0
    """Coefficient of the KL penalty; 0: none."""
    kl_kind: KLKind = "k3"
    """Estimator of each token's penalty, with d = reference_log_probs - log_probs: k3: exp(d) - d - 1; k2: d**2 / 2,
    whose gradient is the gradient of the KL divergence."""
    temperature: float = 1.0
    """Divides the logits, as the sampler does."""
    correction: Correction = "none"
    """For a sampler whose log-probabilities differ from the training forward pass by more than rounding. The
    token's loss is multiplied by c = exp(trainer_log_probs - old_log_probs), without gradient. clamp: c is clamped to
    the bounds (truncated importance sampling). mask: 0 where c is beyond the bounds (IcePop). sequence_mask: 0 for the
    tokens of a sequence whose geometric mean of c is beyond the bounds. With the objective "policy" the
    log-probabilities of this very forward pass are the trainer's."""
    correction_low: float = 0.0
    """Lower bound of the correction."""
    correction_high: float = 2.0
    """Upper bound of the correction."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting is out of its range.
        """
        for name, is_legal, rule in (
            ("clip_low", 0 < self.clip_low <= 1, "must lie in (0, 1]"),
            ("clip_high", self.clip_high > 0, "must be greater than 0"),
            ("kl", self.kl >= 0, "must be at least 0"),
            ("temperature", self.temperature > 0, "must be greater than 0"),
            ("correction_low", 0 <= self.correction_low <= 1, "must lie in [0, 1]"),
            ("correction_high", self.correction_high >= 1, "must be at least 1"),
        ):
            if not is_legal:
                raise ValueError(f"{name}={getattr(self, name)!r} {rule}")

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms."""
        return ("policy", "kl") if self.kl else ("policy",)

    @property
    def metrics(self) -> tuple[LossMetric, ...]:
        """Metrics that may be recorded; metrics of columns that a batch lacks are not."""
        return POLICY_METRICS

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a batch must have, with "labels" and "weights"."""
        names = ["labels", "weights", "advantages"]
        if self.objective != "policy" or self.correction != "none":
            names.append("old_log_probs")
        if self._reads_trainer_log_probs:
            names.append("trainer_log_probs")
        if self.kl:
            names.append("reference_log_probs")
        if self.objective == "sequence" or self.correction == "sequence_mask":
            names.append("sequence_ids")
        return tuple(names)

    @property
    def _reads_trainer_log_probs(self) -> bool:
        return self.correction != "none" and self.objective != "policy"

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Compute the terms, [len(terms)].

        Raises:
            ValueError: the batch lacks a column that the loss reads.
        """
        if missing := [name for name in self.columns if name not in columns]:
            raise ValueError(f"the batch lacks the columns {missing} of objective={self.objective!r}")
        losses = output.token_losses(columns["labels"], SoftmaxOptions(self.temperature, has_entropy=True))
        log_probs = -losses.loss
        is_trained = columns["weights"] != 0
        assert losses.entropy is not None
        output.metrics.record_mean("entropy", losses.entropy, is_trained)
        sequences = None
        if "sequence_ids" in self.columns:
            sequences = Sequences(columns["sequence_ids"], output.context_parallel)
        token_loss = self._token_loss(output, columns, log_probs, sequences)
        correction = self._correction(output, columns, log_probs, sequences)
        if correction is not None:
            token_loss = token_loss * correction
        terms = [weighted_sum(token_loss, columns["weights"])]
        if self.kl:
            penalty = self._kl_penalty(_within(None, columns["reference_log_probs"] - log_probs, is_trained))
            output.metrics.record_mean("kl", penalty, is_trained)
            terms.append(self.kl * weighted_sum(penalty, columns["weights"]))
        return torch.cat(terms)

    def _token_loss(
        self, output: ModelOutput, columns: Mapping[str, Tensor], log_probs: Tensor, sequences: Sequences | None
    ) -> Tensor:
        """Compute the loss of each token before weights and correction, [B, S/cp]; record ratio and clipping."""
        advantages = columns["advantages"]
        is_trained = columns["weights"] != 0
        old = columns.get("trainer_log_probs" if self._reads_trainer_log_probs else "old_log_probs")
        if old is None:
            return -advantages * log_probs
        log_ratio = _within(sequences, log_probs - old, is_trained)
        if self.objective == "sequence":
            assert sequences is not None
            log_ratio = _geometric_mean(sequences, log_ratio)
        ratio = log_ratio.exp()
        output.metrics.record_max("ratio_max", ratio, is_trained)
        if self.objective == "policy":
            return -advantages * log_probs
        clamped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        if self.objective == "cispo":
            output.metrics.record_mean("clipped", (ratio != clamped).double(), is_trained)
            return -clamped.detach() * advantages * log_probs
        gain = ratio * advantages
        clamped_gain = clamped * advantages
        output.metrics.record_mean("clipped", (clamped_gain < gain).double(), is_trained)
        return -torch.minimum(gain, clamped_gain)

    def _correction(
        self, output: ModelOutput, columns: Mapping[str, Tensor], log_probs: Tensor, sequences: Sequences | None
    ) -> Tensor | None:
        """Return the factor of each token's loss, [B, S/cp], without gradient; record the mismatch of the sampler."""
        sampled = columns.get("old_log_probs")
        if sampled is None:
            return None
        trained = columns["trainer_log_probs"] if self._reads_trainer_log_probs else log_probs.detach()
        is_trained = columns["weights"] != 0
        difference = _within(sequences, trained - sampled, is_trained)
        output.metrics.record_mean(MISMATCH, difference.abs(), is_trained)
        output.metrics.record_max("mismatch_max", difference.abs(), is_trained)
        output.metrics.record_mean("mismatch_equal", (difference == 0).double(), is_trained)
        if self.correction == "none":
            return None
        factor = difference.exp()
        if self.correction == "clamp":
            corrected = factor.clamp(self.correction_low, self.correction_high)
        else:
            judged = factor
            if self.correction == "sequence_mask":
                assert sequences is not None
                judged = _geometric_mean(sequences, difference).exp()
            is_kept = (judged >= self.correction_low) & (judged <= self.correction_high)
            corrected = factor.where(is_kept, 0.0)
        output.metrics.record_mean("corrected", (corrected != factor).double(), is_trained)
        return corrected

    def _kl_penalty(self, difference: Tensor) -> Tensor:
        """Estimate the KL divergence from the reference at each token (http://joschu.net/blog/kl-approx.html)."""
        if self.kl_kind == "k2":
            return difference.square() / 2
        return difference.exp() - difference - 1


def _within(sequences: Sequences | None, difference: Tensor, is_trained: Tensor) -> Tensor:
    """Replace differences of log-probabilities by 0 where they are of no sampled token, and may be anything."""
    return difference.where(is_trained if sequences is None else sequences.has_sequence, 0.0)


def _geometric_mean(sequences: Sequences, log_ratio: Tensor) -> Tensor:
    """Return the mean of the logarithms over each token's sequence, [B, S/cp]."""
    total, count = sequences.sums(torch.stack((log_ratio, torch.ones_like(log_ratio)))).unbind(0)
    return sequences.of_tokens(total / count.clamp(min=1))
