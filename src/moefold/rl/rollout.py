"""Rollouts: completions of a version of the policy, their rewards, and their packing into training samples.

Pure functions of numpy arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import chosen_in
from moefold.config.groups.policy import AdvantagePart
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.bin_packing import pack_best_fit
from moefold.data.prompts import Prompt
from moefold.data.sample import Sample, SampleBatch, stack_samples
from moefold.rl.reward import is_mixed, length_penalty

TRUNCATED = "length"
"""Finish reason of a rollout that rollout.max_tokens cut off."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a prompt."""

    prompt_number: int
    """Number of the prompt in the run, with `sample_number` the key of the random numbers."""
    sample_number: int
    prompt_ids: NDArray[np.int64]
    """[prompt tokens]."""
    tokens: NDArray[np.int64]
    """Sampled tokens, [T]. The last is the end-of-text token unless the rollout is truncated."""
    log_probs: NDArray[np.float64]
    """Log-probability of each token in the sampler, [T]. float32 values unless run.dtype is float64."""
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def is_truncated(self) -> bool:
        """Return whether the maximum number of tokens ended the rollout."""
        return self.finish_reason == TRUNCATED


@dataclass(frozen=True, slots=True)
class SampledRouting:
    """Chosen experts of the rollouts of a round, if they are recorded for replay."""

    shard_of_prompt: Mapping[int, int]
    """Data-parallel rank of sampling that sampled each prompt, by the prompt's number."""
    expert_ids: Mapping[tuple[int, int], NDArray[np.integer]]
    """Choices of the rollouts that this rank sampled, by prompt number and sample number, [MoE layers of this rank,
    tokens except the last, K]."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one prompt with their rewards."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    """[G]."""
    scores: NDArray[np.float64]
    """Result of the reward function, or weighted sum of several, [G]. NaN means no result."""
    rewards: NDArray[np.float64]
    """Scores after the rules on truncated and long rollouts, [G]."""
    by_function: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Results of each of several reward functions, [G], by its name. NaN means no result."""

    @property
    def is_mixed(self) -> bool:
        """Return whether two rewards differ."""
        return bool(is_mixed(self.rewards[None])[0])


def adjust_rewards(
    scores: NDArray[np.float64], rollouts: Sequence[Rollout], rl: RLConfig, max_tokens: int
) -> NDArray[np.float64]:
    """Return the rewards of rollouts: scores under rl.truncated="zero" and rl.length_penalty_from, [G]."""
    truncated = np.array([rollout.is_truncated for rollout in rollouts])
    lengths = np.array([len(rollout.tokens) for rollout in rollouts], dtype=np.int64)
    rewards = np.where(truncated & ~np.isnan(scores), 0.0, scores) if rl.truncated == "zero" else scores
    return rewards + length_penalty(lengths, rl.length_penalty_from, max_tokens)


@dataclass(frozen=True, slots=True)
class TrainingRollout:
    """A rollout with its share in the loss."""

    rollout: Rollout
    advantage: float
    weight: float
    """Weight of each token of the rollout in the loss. 0: not trained on."""


def weigh_rollouts(groups: Sequence[RolloutGroup], rl: RLConfig, max_tokens: int) -> list[TrainingRollout]:
    """Return the rollouts of one optimizer step with advantages and token weights.

    The denominators are counts over the whole step, so a loss does not depend on mapping, packing or micro-batches.
    """
    rewards = np.stack([group.rewards for group in groups])
    advantages = chosen_in(rl, AdvantagePart).advantages(rewards).reshape(-1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counts = [
        not np.isnan(advantage) and not (rl.truncated == "ignore" and rollout.is_truncated)
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]
    num_rollouts = max(1, sum(counts))
    num_tokens = max(1, sum(len(rollout.tokens) for rollout, counted in zip(rollouts, counts, strict=True) if counted))
    weighed = []
    for rollout, advantage, counted in zip(rollouts, advantages.tolist(), counts, strict=True):
        share = {
            "token": 1.0 / num_tokens,
            "rollout": 1.0 / (num_rollouts * len(rollout.tokens)),
            "constant": 1.0 / (num_rollouts * max_tokens),
        }[rl.loss_mean]
        weighed.append(TrainingRollout(rollout, advantage if counted else 0.0, share if counted else 0.0))
    return weighed


WEIGHTS = "weights"


def pack_rollouts(rollouts: Sequence[TrainingRollout], *, seq_len: int, pad_id: int) -> list[Sample]:
    """Pack rollouts into samples by best fit. Each is a document, and only its sampled tokens are targets.

    Rollouts have at most seq_len + 1 tokens each. Padding is a separate document.

    Returns:
        Samples with the columns "weights", "advantages", "old_log_probs" (float64 [S]) and "sequence_ids" (int64 [S]:
        number of the rollout in its sample, -1 where no rollout is trained on).
    """
    bins = _bins([weighed.rollout for weighed in rollouts], seq_len)
    return [_pack_sample([rollouts[i] for i in packed], seq_len, pad_id) for packed in bins]


def rollout_positions(
    rollouts: Sequence[Rollout], *, seq_len: int, num_samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sources of the inputs of the samples of `pack_rollouts`, and padding up to N samples.

    Returns:
        Index of the rollout of each input, -1 for padding, and its position in the rollout, int64 [N, S] each.
    """
    indices = np.full((num_samples, seq_len + 1), -1, dtype=np.int64)
    offsets = np.zeros((num_samples, seq_len + 1), dtype=np.int64)
    for sample, packed in enumerate(_bins(rollouts, seq_len)):
        start = 0
        for index in packed:
            stop = start + rollouts[index].num_tokens
            indices[sample, start:stop] = index
            offsets[sample, start:stop] = np.arange(stop - start)
            start = stop
    return indices[:, :-1], offsets[:, :-1]


def _bins(rollouts: Sequence[Rollout], seq_len: int) -> list[list[int]]:
    """Return the indices of the rollouts of each sample."""
    return pack_best_fit([rollout.num_tokens for rollout in rollouts], seq_len + 1)


def empty_sample(seq_len: int, pad_id: int) -> Sample:
    """Return a sample of padding with the columns of `pack_rollouts`."""
    return _pack_sample([], seq_len, pad_id)


def _pack_sample(rollouts: Sequence[TrainingRollout], seq_len: int, pad_id: int) -> Sample:
    tokens = np.full(seq_len + 1, pad_id, dtype=np.int64)
    documents = np.full(seq_len + 1, len(rollouts), dtype=np.int32)
    columns = {name: np.zeros(seq_len) for name in (WEIGHTS, "advantages", "old_log_probs")}
    sequence_ids = np.full(seq_len, -1, dtype=np.int64)
    start = 0
    for number, weighed in enumerate(rollouts):
        rollout = weighed.rollout
        stop = start + rollout.num_tokens
        tokens[start:stop] = np.concatenate((rollout.prompt_ids, rollout.tokens))
        documents[start:stop] = number
        # The input at position i predicts token i + 1.
        targets = slice(start + len(rollout.prompt_ids) - 1, stop - 1)
        columns[WEIGHTS][targets] = weighed.weight
        columns["advantages"][targets] = weighed.advantage
        columns["old_log_probs"][targets] = rollout.log_probs
        sequence_ids[targets] = number
        start = stop
    weights = columns.pop(WEIGHTS)
    token_columns = {**columns, "sequence_ids": sequence_ids}
    is_padding = np.arange(seq_len + 1) >= start
    return Sample(tokens, documents, weights, is_padding=is_padding, token_columns=token_columns)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one data-parallel rank."""

    samples: SampleBatch
    first: int
    """Index of the first row in the global batch."""
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class StepPacking:
    """Packing of the rollouts of one optimizer step, the same under every mapping."""

    parallel: ParallelConfig
    train: TrainConfig
    rl: RLConfig
    rollout: RolloutConfig
    pad_id: int

    def rows(self, groups: Sequence[RolloutGroup], dp_rank: int) -> StepRows:
        """Pack the rollouts of a step, and return the rows of one data-parallel rank."""
        seq_len = self.train.seq_len
        dp = self.parallel.dp
        rollouts = weigh_rollouts(groups, self.rl, self.rollout.max_tokens)
        samples = pack_rollouts(rollouts, seq_len=seq_len, pad_id=self.pad_id)
        size = self.train.micro_batch_size
        # A pipeline schedule has a fixed number of micro-batches.
        count = self.train.num_micro_batches(dp) if self.parallel.pp > 1 else -(-len(samples) // (size * dp))
        per_rank = count * size
        samples += [empty_sample(seq_len, self.pad_id)] * (per_rank * dp - len(samples))
        first = dp_rank * per_rank
        return StepRows(stack_samples(samples[first : first + per_rank], seq_len), first, count)


def split_steps(groups: Sequence[RolloutGroup], updates: int) -> list[Sequence[RolloutGroup]]:
    """Return the groups of each optimizer step of a round."""
    per_step = len(groups) // updates
    return [groups[i : i + per_step] for i in range(0, len(groups), per_step)]
