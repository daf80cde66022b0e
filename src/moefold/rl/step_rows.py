"""Rows of packed rollouts that one data-parallel rank trains on in one optimizer step. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.config.train import TrainConfig
from moefold.data.sample import SampleBatch, stack_samples
from moefold.rl.rollout import RolloutGroup, empty_sample, pack_rollouts, weigh_rollouts


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one data-parallel rank."""

    samples: SampleBatch
    first: int
    """Index of the first row in the global batch."""
    num_micro_batches: int


def pack_step(
    groups: Sequence[RolloutGroup],
    parallel: ParallelConfig,
    train: TrainConfig,
    rl: RLConfig,
    rollout: RolloutConfig,
    pad_id: int,
    dp_rank: int,
) -> StepRows:
    """Pack the rollouts of one step and return the rows of one rank; the packing is the same under every mapping."""
    seq_len = train.seq_len
    dp = parallel.dp
    rollouts = weigh_rollouts(groups, rl, rollout.max_tokens)
    samples = pack_rollouts(rollouts, seq_len=seq_len, pad_id=pad_id)
    micro_batch_size = train.micro_batch_size
    # A pipeline schedule has a fixed number of micro-batches.
    count = train.num_micro_batches(parallel.dp) if parallel.pp > 1 else -(-len(samples) // (micro_batch_size * dp))
    per_rank = count * micro_batch_size
    samples += [empty_sample(seq_len, pad_id)] * (per_rank * dp - len(samples))
    first = dp_rank * per_rank
    return StepRows(stack_samples(samples[first : first + per_rank], seq_len), first, count)


def split_steps(groups: Sequence[RolloutGroup], updates: int) -> list[Sequence[RolloutGroup]]:
    """Return the groups of each optimizer step of a round."""
    per_step = len(groups) // updates
    return [groups[i : i + per_step] for i in range(0, len(groups), per_step)]
