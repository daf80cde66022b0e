"""Costs of sampling rollouts and of bringing the weights to the ranks that sample. Torch-free."""

from dataclasses import dataclass, replace
from math import ceil

from moefold.config.groups.linear_attention import LINEAR_CHUNK_SIZE
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RolloutConfig
from moefold.config.schema import Config
from moefold.config.train import TrainConfig
from moefold.cost.hardware import Device
from moefold.cost.kv_cache import kv_cache_bytes, recurrent_state_bytes
from moefold.cost.rollout_memory import rollout_weight_bytes, sampled_itemsize
from moefold.cost.shard_boxes import WeightSharding, held_bytes
from moefold.cost.unit_memory import compute_dtype_bytes
from moefold.planner.cost_model.collective import link_between
from moefold.planner.cost_model.decode import DecodeCost, SamplingDegrees
from moefold.topology.rollout_mapping import ROLLOUT_DEGREES, has_rollout_mapping, rollout_config, rollout_degrees


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTimes:
    """Seconds of sampling the rollouts of one round, and the memory of a rank for it."""

    prefill_s: float
    decode_s: float
    slots: int
    """Rollouts that a rank decodes at once."""
    rollout_bytes: int
    """Cache of one rollout on a rank."""


class SamplingCost:
    """Prices sampling under any mapping.

    Args:
        cfg: the recipe; rl, rollout and train.global_batch_size count.
        device: the device of all ranks.
        lengths: mean lengths of the rollouts.
    """

    def __init__(self, cfg: Config, device: Device, lengths: RolloutLengths) -> None:
        self._cfg = cfg
        self._lengths = lengths
        self._cost = DecodeCost(cfg.model, device, cfg.run.dtype, compute_dtype_bytes(cfg.run), cfg.rollout.cache)

    def times(self, degrees: SamplingDegrees) -> SamplingTimes:
        """Return the seconds of a round under a mapping."""
        cfg = self._cfg
        rollout = cfg.rollout
        lengths = self._lengths
        per_rank = ceil(cfg.rl.updates * cfg.train.global_batch_size / degrees.dp)
        sampling = with_degrees(cfg, degrees)
        if has_rollout_mapping(sampling.parallel, sampling.rl, sampling.rollout):
            sampling = rollout_config(sampling)
        rollout_bytes = kv_cache_bytes(sampling, lengths.total, 1, rollout.cache) + recurrent_state_bytes(sampling)
        slots = max(1, min(rollout.slots, per_rank, int(rollout.cache_gib * 2**30 // rollout_bytes)))
        decode_pass_s = self._cost.pass_s(degrees, slots, lengths.prompt + lengths.new / 2)
        prompt_tokens = ceil(per_rank / cfg.rl.group_size) * lengths.prompt
        passes = ceil(prompt_tokens / rollout.pass_tokens)
        prefill_pass_s = self._cost.pass_s(degrees, prompt_tokens / passes, lengths.prompt / 2, LINEAR_CHUNK_SIZE)
        return SamplingTimes(
            prefill_s=passes * prefill_pass_s,
            decode_s=ceil(per_rank / slots) * lengths.new * decode_pass_s,
            slots=slots,
            rollout_bytes=rollout_bytes,
        )


def with_degrees(cfg: Config, degrees: SamplingDegrees) -> Config:
    """Return a recipe that samples under a mapping."""
    axes = {axis: getattr(degrees, axis) for axis in ROLLOUT_DEGREES}
    return replace(cfg, rollout=replace(cfg.rollout, **axes))


def recipe_sampling_degrees(parallel: ParallelConfig, rollout: RolloutConfig) -> SamplingDegrees:
    """Return the mapping of a recipe for sampling."""
    return SamplingDegrees(rollout.ranks or parallel.world_size, **rollout_degrees(parallel, rollout))


def copy_seconds(parallel: ParallelConfig, rollout: RolloutConfig, device: Device, received_bytes: float) -> float:
    """Return the seconds of receiving weights over the slowest link between the ranks of a job."""
    link = link_between(device, rollout.num_job_ranks(parallel.world_size) - 1)
    return received_bytes / (link.bytes_per_s * link.fraction)


def weights_for_sampling(cfg: Config) -> tuple[float, float]:
    """Return the bytes of weights that a rank holds for sampling, and the most bytes that a rank receives for them.

    On ranks that only sample these are all weights; on a rank that trains, those that it does not hold anyway.
    """
    if cfg.rollout.ranks:
        sampled = WeightSharding.from_config(rollout_config(cfg), for_training=False)
        itemsize = sampled_itemsize(rollout_config(cfg))
        held = max(held_bytes(sampled.boxes(rank), itemsize) for rank in range(cfg.rollout.ranks))
        return held, held
    return copied_bytes(cfg) if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) else gathered_bytes(cfg)


def gathered_bytes(cfg: Config) -> tuple[float, float]:
    """Return the bytes of a rank's gathered weights while its model samples in place, and those that it receives."""
    shards = WeightSharding.from_config(cfg, for_training=True)
    whole = replace(shards, shards_data_parallel=False)
    itemsize = sampled_itemsize(cfg)
    held = held_bytes(whole.boxes(0), itemsize)
    return held, held - held_bytes(shards.boxes(0), itemsize)


def copied_bytes(cfg: Config) -> tuple[float, float]:
    """Return the most bytes that a rank's second model does not share, and the most that a rank receives for it."""
    trained = WeightSharding.from_config(cfg, for_training=True)
    sampled = WeightSharding.from_config(rollout_config(cfg), for_training=False)
    itemsize = sampled_itemsize(rollout_config(cfg))
    received = 0
    for rank in range(cfg.parallel.world_size):
        held = trained.boxes(rank)
        missing = 0
        for name, box in sampled.boxes(rank).items():
            common = box.intersect(held[name]) if name in held else None
            missing += (box.numel - (common.numel if common else 0)) * itemsize[name]
        received = max(received, missing)
    return max(rollout_weight_bytes(cfg)), received
