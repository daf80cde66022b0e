"""Loss of reinforcement learning: the frame of objectives, sampler corrections and the KL penalty (`parts/`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moefold.config.groups.policy import CorrectionPart, KlPart, ObjectivePart, PolicyTokens
from moefold.model.head import ModelOutput
from moefold.model.loss import SoftmaxOptions
from moefold.model.loss_function import weighted_sum
from moefold.model.loss_metrics import MISMATCH, LossMetric
from moefold.objectives.sequences import Sequences

FRAME_METRICS = (
    LossMetric("entropy", "mean"),
    LossMetric("ratio_max", "max"),
    LossMetric("kl", "mean"),
    LossMetric(MISMATCH, "mean"),
    LossMetric("mismatch_max", "max"),
    LossMetric("mismatch_equal", "mean"),
    LossMetric("corrected", "mean"),
)
"""Metrics of every objective."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss:
    """Policy-gradient loss of sampled tokens, with a penalty on the KL divergence from a reference model.

    The first term is minus the objective, weighted by the advantages. The loss reads columns (see `columns`) of the
    shape of "labels", [N, S/cp]:

    * "weights": share of each token in the loss, with all normalisation. It is 0 for tokens that are not trained.
    * "advantages": factor of the objective of each token.
    * "old_log_probs", "reference_log_probs": log-probabilities of the sampler and the reference, under `temperature`.
    * "trainer_log_probs": log-probabilities that training computes with the weights that sampled. A correction may
      replace "old_log_probs" by them in the ratio of the policy. An objective that does not read the sampler takes
      the log-probabilities of this forward pass.
    * "sequence_ids": index of the rollout within its row, int64, or -1.
    """

    objective: ObjectivePart
    correction: CorrectionPart
    kl_penalty: KlPart
    kl: float = 0.0
    """Coefficient of the KL penalty. 0: none."""
    temperature: float = 1.0
    """Divides the logits, as the sampler does."""

    def __post_init__(self) -> None:
        for name, is_legal, rule in (
            ("kl", self.kl >= 0, "must be at least 0"),
            ("temperature", self.temperature > 0, "must be greater than 0"),
        ):
            if not is_legal:
                raise ValueError(f"{name}={getattr(self, name)!r} {rule}")
        if clashing := {metric.name for metric in FRAME_METRICS} & {*self.objective.mean_metrics}:
            raise ValueError(
                f"objective={self.objective.kind!r} records {sorted(clashing)}, which the loss records itself"
            )

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms."""
        return ("policy", "kl") if self.kl else ("policy",)

    @property
    def metrics(self) -> tuple[LossMetric, ...]:
        """Metrics over the tokens that are trained (nonzero weight), without metrics of columns that a batch lacks.

        These are the entropy of the policy in nats, the largest ratio, metrics of the objective and the KL penalty
        before its coefficient. The absolute difference to the log-probabilities of the sampler has a mean, a maximum,
        and the fraction of tokens with equal bits. The last is the fraction of tokens with a cut or masked correction.
        """
        names = ("clipped", *(name for name in self.objective.mean_metrics if name != "clipped"))
        return (*FRAME_METRICS[:2], *(LossMetric(name, "mean") for name in names), *FRAME_METRICS[2:])

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a batch must have, with "labels" and "weights"."""
        names = ["labels", "weights", "advantages"]
        if self.objective.reads_sampler or self.correction.corrects:
            names.append("old_log_probs")
        if self.reads_trainer_log_probs:
            names.append("trainer_log_probs")
        if self.kl:
            names.append("reference_log_probs")
        if self.objective.reads_rollouts or self.correction.reads_rollouts:
            names.append("sequence_ids")
        return tuple(names)

    @property
    def reads_trainer_log_probs(self) -> bool:
        """True if a batch has the log-probabilities of the training forward pass at the start of a round."""
        return self.correction.corrects and self.objective.reads_sampler

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Compute the terms, [len(terms)]."""
        if missing := [name for name in self.columns if name not in columns]:
            raise ValueError(f"the batch lacks the columns {missing} of objective={self.objective.kind!r}")
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
            difference = _within(None, columns["reference_log_probs"] - log_probs, is_trained)
            penalty = self.kl_penalty.penalty(difference)
            output.metrics.record_mean("kl", penalty, is_trained)
            terms.append(self.kl * weighted_sum(penalty, columns["weights"]))
        return torch.cat(terms)

    def _token_loss(
        self, output: ModelOutput, columns: Mapping[str, Tensor], log_probs: Tensor, sequences: Sequences | None
    ) -> Tensor:
        """Compute the loss of each token before weights and correction, [B, S/cp]. Record ratio and clipping."""
        is_trained = columns["weights"] != 0
        old = columns.get("trainer_log_probs" if self.reads_trainer_log_probs else "old_log_probs")

        def record_mean(name: str, values: Tensor) -> None:
            output.metrics.record_mean(name, values, is_trained)

        tokens = PolicyTokens(
            log_probs=log_probs,
            log_ratio=None if old is None else _within(sequences, log_probs - old, is_trained),
            advantages=columns["advantages"],
            is_trained=is_trained,
            geometric_mean=partial(_geometric_mean, sequences),
            record_mean=record_mean,
        )
        tokens = replace(tokens, log_ratio=self.objective.log_ratio(tokens))
        if tokens.log_ratio is not None:
            output.metrics.record_max("ratio_max", tokens.ratio, is_trained)
        return self.objective.token_loss(tokens)

    def _correction(
        self, output: ModelOutput, columns: Mapping[str, Tensor], log_probs: Tensor, sequences: Sequences | None
    ) -> Tensor | None:
        """Return the factor of each token's loss, [B, S/cp], without gradient. Record the mismatch of the sampler."""
        sampled = columns.get("old_log_probs")
        if sampled is None:
            return None
        trained = columns["trainer_log_probs"] if self.reads_trainer_log_probs else log_probs.detach()
        is_trained = columns["weights"] != 0
        difference = _within(sequences, trained - sampled, is_trained)
        output.metrics.record_mean(MISMATCH, difference.abs(), is_trained)
        output.metrics.record_max("mismatch_max", difference.abs(), is_trained)
        output.metrics.record_mean("mismatch_equal", (difference == 0).double(), is_trained)
        if not self.correction.corrects:
            return None
        factor = difference.exp()
        corrected = self.correction.limited(factor, difference, partial(_geometric_mean, sequences))
        output.metrics.record_mean("corrected", (corrected != factor).double(), is_trained)
        return corrected


def _within(sequences: Sequences | None, difference: Tensor, is_trained: Tensor) -> Tensor:
    """Replace differences of log-probabilities by 0 at tokens that were not sampled, where they are undefined."""
    return difference.where(is_trained if sequences is None else sequences.has_sequence, 0.0)


def _geometric_mean(sequences: Sequences | None, log_ratio: Tensor) -> Tensor:
    """Return the mean of the logarithms over each token's sequence, [B, S/cp]."""
    assert sequences is not None, "reads_rollouts"
    total, count = sequences.sums(torch.stack((log_ratio, torch.ones_like(log_ratio)))).unbind(0)
    return sequences.of_tokens(total / count.clamp(min=1))
