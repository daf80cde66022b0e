"""Plan of reinforcement learning: pairs of a training mapping and a mapping that samples on the same GPUs. Torch-free.

The seconds of an optimizer step are those of sampling its rollouts, of copying the weights to the mapping of sampling,
and of training. The pairs of the fastest training mappings with every legal mapping for sampling are priced; since the
parts follow each other on the same GPUs, no search is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from moefold.config.schema import Config
from moefold.cost.hardware import Device
from moefold.cost.layer_spec import attention_spec, layer_weights
from moefold.cost.rollout_memory import rollout_weight_bytes, sampled_itemsize
from moefold.cost.shard_boxes import WeightSharding, held_bytes
from moefold.cost.unit_memory import compute_dtype_bytes, master_dtype_bytes
from moefold.errors import ConfigError
from moefold.planner.cost_model.collective import link_between
from moefold.planner.cost_model.decode import DecodeCost, SamplingDegrees
from moefold.planner.planner import Planner
from moefold.planner.search.search import PlannedMapping
from moefold.topology.layout import divisors
from moefold.topology.rollout_mapping import ROLLOUT_DEGREES, has_rollout_mapping, rollout_config
from moefold.validate.config import check_rollout_mapping

MAX_TRAINING_PLANS = 5
"""Training mappings that are paired with every mapping for sampling."""
MAX_COPIES_PRICED = 6
"""Mappings for sampling, the best without the copy of the weights, for which the copy is priced."""
MAX_RANKS = 1024
"""Largest number of GPUs whose shards are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLengths:
    """Lengths of a rollout, in tokens."""

    prompt: int
    new: int

    @property
    def total(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt + self.new


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """A training mapping with a mapping for sampling, and the seconds of an optimizer step by part."""

    training: PlannedMapping
    degrees: SamplingDegrees
    is_in_place: bool
    """Whether the model in training samples itself, and nothing is copied."""
    train_s: float
    prefill_s: float
    decode_s: float
    reshard_s: float
    slots: int
    """Rollouts that a rank decodes at once."""
    memory_bytes: float
    """Of the fullest GPU, in training or in sampling."""
    capacity_bytes: float

    @property
    def total_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.train_s + self.prefill_s + self.decode_s + self.reshard_s

    @property
    def fits(self) -> bool:
        """True if the device has the memory."""
        return self.memory_bytes <= self.capacity_bytes


def default_lengths(cfg: Config) -> RolloutLengths:
    """Return the longest completion, and the longest prompt that fits into a sample with it."""
    new = cfg.rollout.max_tokens
    return RolloutLengths(prompt=max(1, cfg.train.seq_len + 1 - new), new=new)


def plan_rollouts(planner: Planner, lengths: RolloutLengths) -> list[RolloutPlan]:
    """Return the best mapping for sampling of each of the best training mappings, and sampling in place, best first.

    Pairs that do not fit into memory are returned only if none fits.

    Args:
        planner: of a recipe of reinforcement learning.
        lengths: mean lengths of the rollouts.

    Raises:
        ConfigError: there are too many GPUs.
    """
    num_gpus = planner.request.num_gpus
    if num_gpus > MAX_RANKS:
        raise ConfigError(f"--num-gpus {num_gpus} is above {MAX_RANKS}, up to which mappings for sampling are priced")
    found = []
    for plan in planner.top_plans(MAX_TRAINING_PLANS):
        cfg = planner.config_for(plan)
        # All mappings are priced, also those with whole experts; GPUs do not read each other's.
        cfg = replace(cfg, rollout=replace(cfg.rollout, experts="exchange"))
        pricing = _Pricing(cfg, plan, planner.request.usable_device, lengths)
        found.append(pricing.in_place())
        if (best := pricing.best_other()) is not None:
            found.append(best)
    return sorted([plan for plan in found if plan.fits] or found, key=_sort_key)


def sampling_mappings(cfg: Config) -> Iterator[SamplingDegrees]:
    """Yield every legal mapping for sampling on the GPUs of a recipe other than that of training."""
    world_size = cfg.parallel.world_size
    model = cfg.model
    for pp in (pp for pp in divisors(world_size) if pp <= model.num_layers):
        stage = world_size // pp
        tps = [tp for tp in divisors(stage) if model.num_attention_heads % tp == 0]
        eps = [ep for ep in divisors(stage) if not model.moe_layer_numbers or model.num_experts % ep == 0]
        for tp, ep, etp in product(tps, eps, divisors(stage)):
            degrees = dict(zip(ROLLOUT_DEGREES, (tp, pp, ep, etp), strict=True))
            changed = _with_degrees(cfg, degrees)
            if stage % (ep * etp) or not has_rollout_mapping(changed):
                continue
            try:
                check_rollout_mapping(changed)
            except ConfigError:
                continue
            yield SamplingDegrees(world_size, **degrees)


def _with_degrees(cfg: Config, degrees: dict[str, int]) -> Config:
    return replace(cfg, rollout=replace(cfg.rollout, **degrees))  # type: ignore[arg-type]  # degrees are integers


class _Pricing:
    """Prices mappings for sampling with one training mapping."""

    def __init__(self, cfg: Config, plan: PlannedMapping, device: Device, lengths: RolloutLengths) -> None:
        self._cfg = cfg
        self._plan = plan
        self._device = device
        self._lengths = lengths
        self._cost = DecodeCost(cfg.model, device, cfg.run.dtype, compute_dtype_bytes(cfg))

    def in_place(self) -> RolloutPlan:
        """Price sampling by the model in training, whose weights are gathered once a round."""
        p = self._cfg.parallel
        degrees = SamplingDegrees(p.world_size, **{axis: getattr(p, axis) for axis in ROLLOUT_DEGREES})
        held, received = _gathered_bytes(self._cfg)
        return self._priced(degrees, held, received, is_in_place=True)

    def best_other(self) -> RolloutPlan | None:
        """Return the best other mapping that fits, or the best of those that do not; None if none is legal."""
        bounds = sorted(
            (
                self._priced(degrees, self._least_held_bytes(degrees), 0, is_in_place=False)
                for degrees in sampling_mappings(self._cfg)
            ),
            key=_sort_key,
        )
        best: RolloutPlan | None = None
        for bound in bounds[:MAX_COPIES_PRICED]:
            # Without the copy of the weights, which is slower to price.
            if best is not None and _sort_key(best) <= _sort_key(bound):
                break
            degrees = {axis: getattr(bound.degrees, axis) for axis in ROLLOUT_DEGREES}
            priced = self._priced(bound.degrees, *_copied_bytes(_with_degrees(self._cfg, degrees)), is_in_place=False)
            best = priced if best is None else min(best, priced, key=_sort_key)
        return best

    def _least_held_bytes(self, degrees: SamplingDegrees) -> float:
        """Return a lower bound of the second model's bytes; 0 if it may share parameters, of the type of training."""
        itemsize = compute_dtype_bytes(self._cfg)
        if itemsize == master_dtype_bytes(self._cfg):
            return 0.0
        model = self._cfg.model
        numel = sum(
            weight.shard(degrees.tp, degrees.ep, degrees.etp).numel
            for kind in model.layer_kinds
            for weight in layer_weights(model, kind)
        )
        return itemsize * numel / degrees.pp

    def _priced(self, degrees: SamplingDegrees, held: float, received: float, *, is_in_place: bool) -> RolloutPlan:
        """Price a mapping.

        Args:
            degrees: the mapping for sampling.
            held: bytes of the weights for sampling that a rank has in addition.
            received: bytes that a rank receives before each round.
            is_in_place: whether the model in training samples.
        """
        cfg = self._cfg
        rollout = cfg.rollout
        lengths = self._lengths
        updates = cfg.rl.updates
        model = cfg.model
        per_rank = ceil(updates * cfg.train.global_batch_size / degrees.dp)
        width = attention_spec(model).cache_width(model, degrees.tp) * compute_dtype_bytes(cfg)
        rollout_bytes = lengths.total * ceil(model.num_layers / degrees.pp) * width
        slots = max(1, min(rollout.slots, per_rank, int(rollout.cache_gib * 2**30 // rollout_bytes)))
        decode_pass_s = self._cost.pass_s(degrees, slots, lengths.prompt + lengths.new / 2)
        prompt_tokens = ceil(per_rank / cfg.rl.group_size) * lengths.prompt
        passes = ceil(prompt_tokens / rollout.pass_tokens)
        prefill_pass_s = self._cost.pass_s(degrees, prompt_tokens / passes, lengths.prompt / 2)
        link = link_between(self._device, cfg.parallel.world_size - 1)
        memory = self._plan.memory
        states = memory.weights + memory.optimizer + memory.buffers
        return RolloutPlan(
            training=self._plan,
            degrees=degrees,
            is_in_place=is_in_place,
            # Rollouts are packed into samples of train.seq_len, for which the step was priced.
            train_s=self._plan.time.total_s * min(1.0, lengths.total / cfg.train.seq_len),
            prefill_s=passes * prefill_pass_s / updates,
            decode_s=ceil(per_rank / slots) * lengths.new * decode_pass_s / updates,
            reshard_s=received / (link.bytes_per_s * link.fraction) / updates,
            slots=slots,
            memory_bytes=max(memory.total + (0 if is_in_place else held), states + held + slots * rollout_bytes),
            capacity_bytes=memory.capacity,
        )


def _gathered_bytes(cfg: Config) -> tuple[float, float]:
    """Return the bytes of a rank's gathered weights while its model samples in place, and those that it receives."""
    shards = WeightSharding.from_config(cfg, for_training=True)
    whole = replace(shards, shards_data_parallel=False)
    itemsize = sampled_itemsize(cfg)
    held = held_bytes(whole.boxes(0), itemsize)
    return held, held - held_bytes(shards.boxes(0), itemsize)


def _copied_bytes(cfg: Config) -> tuple[float, float]:
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


def _sort_key(plan: RolloutPlan) -> tuple[bool, float, float]:
    return not plan.fits, plan.total_s, plan.memory_bytes


def rollouts_as_dict(plans: Sequence[RolloutPlan], lengths: RolloutLengths) -> dict[str, object]:
    """Return the plans in the form of `moefold plan --json`."""
    return {
        "calibrated": False,
        "prompt_tokens": lengths.prompt,
        "new_tokens": lengths.new,
        "pairs": [
            {
                "training": plan.training.mapping.as_dict(),
                "sampling": {axis: getattr(plan.degrees, axis) for axis in (*ROLLOUT_DEGREES, "dp", "edp")},
                "in_place": plan.is_in_place,
                "step_time_s": plan.total_s,
                "train_s": plan.train_s,
                "prefill_s": plan.prefill_s,
                "decode_s": plan.decode_s,
                "reshard_s": plan.reshard_s,
                "slots": plan.slots,
                "memory_gib": plan.memory_bytes / 2**30,
                "fits": plan.fits,
            }
            for plan in plans
        ],
    }
