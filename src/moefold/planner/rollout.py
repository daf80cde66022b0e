"""Plan of reinforcement learning: pairs of a training mapping and a mapping that samples, or a split. Torch-free.

An optimizer step takes the seconds of sampling its rollouts, of copying the weights to the mapping of sampling,
and of training. On the same GPUs they add up: the pairs of the fastest training mappings with every legal mapping for
sampling are priced. Some GPUs may also sample while the others train (rollout.ranks): then the longer part counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moefold.config.schema import Config
from moefold.cost.hardware import Device
from moefold.cost.unit_memory import compute_dtype_bytes, master_dtype_bytes
from moefold.errors import ConfigError
from moefold.planner.cost_model.decode import SamplingDegrees
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.rollout_cost import (
    RolloutLengths,
    SamplingCost,
    copy_seconds,
    gathered_bytes,
    packed_fraction,
    weights_for_sampling,
    with_degrees,
)
from moefold.planner.search.search import PlannedMapping
from moefold.planner.simulator.rounds import RoundTimes
from moefold.topology.layout import divisors
from moefold.topology.rollout_mapping import ROLLOUT_DEGREES, has_rollout_mapping
from moefold.validate.config import check_rollout_mapping

MAX_TRAINING_PLANS = 5
"""Training mappings that are paired with every mapping for sampling."""
MAX_COPIES_PRICED = 6
"""Mappings for sampling, the best without the copy of the weights, for which the copy is priced."""
SPLIT_SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs that only sample, of the splits that are priced if rollout.ranks names none."""
MAX_RANKS = 1024
"""Largest number of GPUs whose shards are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """A training mapping with a mapping for sampling, and the seconds of an optimizer step by part."""

    training: PlannedMapping
    degrees: SamplingDegrees
    is_in_place: bool
    """Whether the model in training samples itself, and nothing is copied."""
    times: RoundTimes
    """Seconds of an optimizer step by part: a round of one update."""
    slots: int
    """Rollouts that a rank decodes at once."""
    memory_bytes: float
    """Of the fullest GPU, in training or in sampling."""
    ranks: int = 0
    """GPUs that only sample; 0: those that train sample in turn."""
    rounds_ahead: int | None = None
    """Rounds between the weights that sample and those that train, with GPUs that only sample."""

    @property
    def total_s(self) -> float:
        """Seconds of an optimizer step: the sum of the parts, or less where GPUs sample while others train."""
        return self.times.step_s(self.rounds_ahead)

    @property
    def fits(self) -> bool:
        """True if the device has the memory."""
        return self.memory_bytes <= self.training.memory.capacity


def plan_rollouts(planner: Planner, lengths: RolloutLengths) -> list[RolloutPlan]:
    """Return pairs of mappings for training and sampling, best first: on the same GPUs, and on GPUs of their own.

    On the same GPUs: the best mapping for sampling of each of the best training mappings, and sampling in place. Pairs
    that do not fit into memory are returned only if none fits.

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
        cfg = _with_ranks(planner.config_for(plan), 0)
        pricing = _Pricing(cfg, plan, planner.request.usable_device, lengths)
        found.append(pricing.in_place())
        if (best := pricing.best_other()) is not None:
            found.append(best)
    found += _split_plans(planner.request, lengths)
    return sorted([plan for plan in found if plan.fits] or found, key=_sort_key)


def _split_plans(request: PlanRequest, lengths: RolloutLengths) -> Iterator[RolloutPlan]:
    """Yield the best pair of each split of the GPUs into some that train and some that only sample."""
    num_gpus = request.num_gpus
    given = request.base_config.rollout.ranks
    splits = [given] if given else sorted({round(num_gpus * share) for share in SPLIT_SHARES})
    for ranks in splits:
        if not 0 < ranks < num_gpus:
            continue
        planner = Planner(request.with_num_gpus(num_gpus - ranks))
        try:
            (plan,) = planner.top_plans(1)
        except ConfigError:
            # No mapping of this number of GPUs is legal.
            continue
        cfg = _with_ranks(planner.config_for(plan), ranks)
        best = _Pricing(cfg, plan, request.usable_device, lengths).best_other()
        if best is not None:
            yield best


def _with_ranks(cfg: Config, ranks: int) -> Config:
    """Return a recipe with some ranks that only sample, and rounds one ahead if it has none ahead.

    All mappings are priced, also those with whole experts; GPUs do not read each other's.
    """
    rl = replace(cfg.rl, staleness=(cfg.rl.staleness or cfg.rl.updates) if ranks else 0)
    return replace(cfg, rl=rl, rollout=replace(cfg.rollout, ranks=ranks, experts="exchange"))


def sampling_mappings(cfg: Config) -> Iterator[SamplingDegrees]:
    """Yield every legal mapping for sampling on the GPUs of a recipe other than the mapping of training."""
    world_size = cfg.rollout.ranks or cfg.parallel.world_size
    model = cfg.model
    for pp in (pp for pp in divisors(world_size) if pp <= model.num_layers):
        stage = world_size // pp
        softmax = [layer.attention for layer in model.distinct_kinds if not layer.attention.is_recurrent]
        units = {part.tp_unit(model.hidden_size)[1] for part in softmax}
        tps = [tp for tp in divisors(stage) if all(unit % tp == 0 for unit in units)]
        eps = [ep for ep in divisors(stage) if model.routed is None or model.routed.num_experts % ep == 0]
        for tp, ep, etp in product(tps, eps, divisors(stage)):
            degrees = SamplingDegrees(world_size, tp, pp, ep, etp)
            changed = with_degrees(cfg, degrees)
            if stage % (ep * etp) or not has_rollout_mapping(changed.parallel, changed.rl, changed.rollout):
                continue
            try:
                check_rollout_mapping(changed)
            except ConfigError:
                continue
            yield degrees


class _Pricing:
    """Prices mappings for sampling with one training mapping."""

    def __init__(self, cfg: Config, plan: PlannedMapping, device: Device, lengths: RolloutLengths) -> None:
        self._cfg = cfg
        self._plan = plan
        self._device = device
        self._lengths = lengths
        self._cost = SamplingCost(cfg, device, lengths)
        self._ranks = cfg.rollout.ranks
        self._rounds_ahead = cfg.rl.staleness // cfg.rl.updates if self._ranks else None

    def in_place(self) -> RolloutPlan:
        """Price sampling by the model in training, whose weights are gathered once a round."""
        p = self._cfg.parallel
        degrees = SamplingDegrees(p.world_size, **{axis: getattr(p, axis) for axis in ROLLOUT_DEGREES})
        held, received = gathered_bytes(self._cfg)
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
            changed = with_degrees(self._cfg, bound.degrees)
            priced = self._priced(bound.degrees, *weights_for_sampling(changed), is_in_place=False)
            best = priced if best is None else min(best, priced, key=_sort_key)
        return best

    def _least_held_bytes(self, degrees: SamplingDegrees) -> float:
        """Return a lower bound of the second model's bytes; 0 if it may share parameters, of the type of training."""
        itemsize = compute_dtype_bytes(self._cfg.run)
        if not self._ranks and itemsize == master_dtype_bytes(self._cfg.run):
            return 0.0
        model = self._cfg.model
        numel = sum(
            weight.shard(degrees.tp, degrees.ep, degrees.etp).numel
            for layer in model.decoder_layers
            for weight in layer.params
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
        updates = cfg.rl.updates
        sampling = self._cost.times(degrees)
        memory = self._plan.memory
        states = 0.0 if self._ranks else memory.weights + memory.optimizer + memory.buffers
        cache = sampling.slots * sampling.rollout_bytes
        return RolloutPlan(
            training=self._plan,
            degrees=degrees,
            is_in_place=is_in_place,
            times=RoundTimes(
                copy_s=copy_seconds(cfg.parallel, cfg.rollout, self._device, received) / updates,
                prefill_s=sampling.prefill_s / updates,
                decode_s=sampling.decode_s / updates,
                # Rollouts are packed into samples of train.seq_len, for which the step was priced.
                train_s=self._plan.time.total_s * packed_fraction(cfg.parallel, cfg.train, self._lengths),
            ),
            slots=sampling.slots,
            memory_bytes=max(memory.total + (0 if is_in_place or self._ranks else held), states + held + cache),
            ranks=self._ranks,
            rounds_ahead=self._rounds_ahead,
        )


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
                "sampling_gpus": plan.ranks,
                "rounds_ahead": plan.rounds_ahead,
                "step_time_s": plan.total_s,
                "train_s": plan.times.train_s,
                "prefill_s": plan.times.prefill_s,
                "decode_s": plan.times.decode_s,
                "reshard_s": plan.times.copy_s,
                "slots": plan.slots,
                "memory_gib": plan.memory_bytes / 2**30,
                "fits": plan.fits,
            }
            for plan in plans
        ],
    }
