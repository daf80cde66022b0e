"""Costs of sampling rollouts and of bringing the weights to the ranks that sample. Torch-free."""

from dataclasses import dataclass, replace
from math import ceil

from moefold.config.groups.linear_attention import LINEAR_CHUNK_SIZE
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RolloutConfig
from moefold.config.schema import Config
from moefold.config.train import TrainConfig
from moefold.cost.hardware import Device
from moefold.cost.kv_cache import cache_sizes
from moefold.cost.rollout_memory import sampled_itemsize
from moefold.cost.shard_boxes import WeightSharding, held_bytes
from moefold.cost.unit_memory import compute_dtype_bytes
from moefold.planner.cost_model.collective import link_between
from moefold.planner.cost_model.decode import DecodeCost, SamplingDegrees
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config, rollout_degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLengths:
    """Lengths of a rollout, in tokens."""

    prompt: int
    new: int

    @property
    def total(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt + self.new


def given_lengths(train: TrainConfig, rollout: RolloutConfig, prompt: int | None, new: int | None) -> RolloutLengths:
    """Return the given lengths; by default the longest completion, and the longest prompt that fits with it."""
    most = rollout.max_tokens
    return RolloutLengths(prompt=prompt or max(1, train.seq_len + 1 - most), new=new or most)


def packed_fraction(parallel: ParallelConfig, train: TrainConfig, lengths: RolloutLengths) -> float:
    """Return the samples of a step over train.global_batch_size: several rollouts are packed into a sample.

    A pipeline fills the batch up with padding.
    """
    return 1.0 if parallel.pp > 1 else min(1.0, lengths.total / train.seq_len)


def sampling_seconds(cfg: Config, device: Device, lengths: RolloutLengths) -> tuple[float, float]:
    """Return the seconds of the prompts and of the decoding of a round, under the recipe's mapping for sampling.

    Args:
        cfg: the recipe; rl, rollout and train.global_batch_size count.
        device: the device of all ranks.
        lengths: mean lengths of the rollouts.
    """
    rollout = cfg.rollout
    degrees = SamplingDegrees(rollout.ranks or cfg.parallel.world_size, **rollout_degrees(cfg.parallel, cfg.rollout))
    cost = DecodeCost(cfg.model, device, cfg.run.dtype, compute_dtype_bytes(cfg.run), rollout.cache)
    per_rank = ceil(cfg.rl.updates * cfg.train.global_batch_size / degrees.dp)
    slots = max(1, min(rollout.slots, per_rank, int(rollout.cache_gib * 2**30 // rollout_bytes(cfg, lengths.total))))
    decode_pass_s = cost.pass_s(degrees, slots, lengths.prompt + lengths.new / 2)
    prompt_tokens = ceil(per_rank / cfg.rl.group_size) * lengths.prompt
    passes = ceil(prompt_tokens / rollout.pass_tokens)
    prefill_pass_s = cost.pass_s(degrees, prompt_tokens / passes, lengths.prompt / 2, LINEAR_CHUNK_SIZE)
    return passes * prefill_pass_s, ceil(per_rank / slots) * lengths.new * decode_pass_s


def rollout_bytes(cfg: Config, num_tokens: int) -> int:
    """Return the bytes of the cache of one rollout on a rank."""
    sampling = rollout_config(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else cfg
    sizes = cache_sizes(sampling)
    return sizes.kv_bytes(num_tokens, cfg.rollout.cache) + sizes.state_bytes


def copy_seconds(parallel: ParallelConfig, rollout: RolloutConfig, device: Device, received_bytes: float) -> float:
    """Return the seconds of receiving weights over the slowest link between the ranks of a job."""
    link = link_between(device, rollout.num_job_ranks(parallel.world_size) - 1)
    return received_bytes / (link.bytes_per_s * link.fraction)


def received_bytes(cfg: Config) -> float:
    """Return the most bytes of weights that a rank receives before a round.

    On ranks that only sample these are all weights; on a rank that trains, those that it does not hold anyway.
    """
    trained = WeightSharding.from_config(cfg, for_training=True)
    if not has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout):
        # The model in training samples; its weights are gathered.
        whole = replace(trained, shards_data_parallel=False)
        itemsize = sampled_itemsize(cfg)
        return held_bytes(whole.boxes(0), itemsize) - held_bytes(trained.boxes(0), itemsize)
    sampling = rollout_config(cfg)
    sampled = WeightSharding.from_config(sampling, for_training=False)
    itemsize = sampled_itemsize(sampling)
    received = 0
    for rank in range(sampling.parallel.world_size):
        held = {} if cfg.rollout.ranks else trained.boxes(rank)
        missing = 0
        for name, box in sampled.boxes(rank).items():
            common = box.intersect(held[name]) if name in held else None
            missing += (box.numel - (common.numel if common else 0)) * itemsize[name]
        received = max(received, missing)
    return received
