"""Pipeline partitioning: choose stages that are balanced in FLOPs and memory. Torch-free."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from moefold.config.model import ModelConfig
from moefold.config.param_spec import ParamSpec
from moefold.config.schema import Config
from moefold.cost.adapter_spec import layer_adapters
from moefold.cost.flops import train_flops_per_token
from moefold.cost.layer_spec import embedding_weight, head_weights, layer_weights, mtp_layer_weights
from moefold.topology.pipeline_layout import StageParts
from moefold.topology.selection_groups import stage_starts

MAX_SLOWDOWN_PCT = 10
"""Maximum excess of the busiest stage's FLOPs over the best partition, in per cent."""


@dataclass(frozen=True)
class StageCost:
    """FLOPs and parameters of a part of the model."""

    flops: int
    """Forward FLOPs per token; the backward pass is twice that everywhere."""
    num_parameters: int
    """Parameters on one rank without data-parallel sharding: what tensor parallelism shards over tp, experts over
    ep*etp, and the rest (norms, routers, latent projections) whole."""

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(self.flops + other.flops, self.num_parameters + other.num_parameters)


@lru_cache(maxsize=256)
def balanced_stages(cfg: Config) -> tuple[StageParts, ...]:
    """Partition the model into pp*virtual_stages consecutive non-empty stages, balanced in FLOPs and memory.

    The units are the embedding, each layer, and the loss with the MTP layers. The best partition minimises p * p * b: p
    are the FLOPs of the busiest stage, which limits all others, b the bytes of the fullest stage by
    `cost/stage_memory.py`. So a partition that is 1 % slower must save 2 % of memory. None is slower than the fastest
    one by more than `MAX_SLOWDOWN_PCT`. Ties go to the faster one.

    It depends on the recipe only, so that all ranks get the same result.
    """
    # Lazy import: the memory formulas import this module to resolve stages of explicit layouts.
    from moefold.cost.stage_memory import unit_bytes

    num_stages = cfg.parallel.pp * cfg.parallel.virtual_stages
    flops = [cost.flops for cost in _unit_costs(cfg)]
    return _stages_between(cfg, _best_bounds(flops, unit_bytes(cfg, num_stages), MAX_SLOWDOWN_PCT, _unit_bounds(cfg)))


def fastest_stages(cfg: Config) -> tuple[StageParts, ...]:
    """Return the fastest partition whose fullest stage has the fewest parameters.

    For the planner, which compares mappings before the micro-batches in flight are known, and counts memory itself.
    """
    costs = _unit_costs(cfg)
    num_stages = cfg.parallel.pp * cfg.parallel.virtual_stages
    flops = [cost.flops for cost in costs]
    weights = [cost.num_parameters for cost in costs]
    return _stages_between(cfg, _best_bounds(flops, [weights] * num_stages, 0, _unit_bounds(cfg)))


def _unit_bounds(cfg: Config) -> frozenset[int]:
    """Return the units at which a stage may begin: the embedding, some layers by `stage_starts`, and the loss."""
    return frozenset((0, *(number + 1 for number in stage_starts(cfg.model))))


def _unit_costs(cfg: Config) -> list[StageCost]:
    return [embedding_cost(cfg), *_layer_costs(cfg), loss_cost(cfg)]


def _stages_between(cfg: Config, bounds: Sequence[int]) -> tuple[StageParts, ...]:
    """Return the stages between bounds in the list of units."""
    last = cfg.model.num_layers + 1
    return tuple(
        StageParts(
            has_embedding=first == 0,
            layers=range(max(first - 1, 0), min(stop, last) - 1),
            num_mtp_layers=cfg.model.mtp_layers if stop > last else 0,
            has_loss=stop > last,
        )
        for first, stop in zip(bounds, bounds[1:], strict=False)
    )


def stage_cost(cfg: Config, parts: StageParts) -> StageCost:
    """Return the cost of a stage."""
    cost = StageCost(0, 0)
    if parts.has_embedding:
        cost += embedding_cost(cfg)
    for i in parts.layers:
        cost += layer_cost(cfg, i)
    if not parts.has_loss:
        return cost
    is_shared = parts.has_embedding and cfg.model.last_stage_needs_embedding
    return cost + loss_cost(cfg) + StageCost(0, -embedding_cost(cfg).num_parameters if is_shared else 0)


def embedding_cost(cfg: Config) -> StageCost:
    """Return the cost of the embedding: no FLOPs, as it is a look-up."""
    return StageCost(0, _num_local(cfg, (embedding_weight(cfg.model),)))


def _num_local(cfg: Config, weights: Iterable[ParamSpec]) -> int:
    """Return the number of elements of weights that a rank of tensor and expert parallelism has."""
    p = cfg.parallel
    return sum(weight.shard(p.tp, p.ep, p.etp).numel for weight in weights)


def _layer_costs(cfg: Config) -> list[StageCost]:
    """Return the cost of every layer, in order; equal layers are counted once."""
    kinds = list(zip(cfg.model.block_kinds, cfg.model.attention_letters, strict=True))
    loads = {kind: _kind_cost(cfg, *kind) for kind in set(kinds)}
    return [loads[kind] for kind in kinds]


def layer_cost(cfg: Config, number: int) -> StageCost:
    """Return the cost of one layer, of its kind and with its attention."""
    return _kind_cost(cfg, cfg.model.block_kinds[number], cfg.model.attention_letters[number])


def _kind_cost(cfg: Config, kind: str, letter: str) -> StageCost:
    """Return the cost of a layer of one of `BLOCK_KINDS`, with the letter of its attention."""
    flops = train_flops_per_token(single_layer(cfg.model, kind, letter), cfg.train.seq_len)
    weights = (*layer_weights(cfg.model, kind), *layer_adapters(cfg.model, cfg.lora, kind))
    return StageCost(flops.forward - flops.head, _num_local(cfg, weights))


def loss_cost(cfg: Config) -> StageCost:
    """Return the cost of the output head and the MTP layers, each of which uses the head once more.

    With tied embeddings and for MTP layers, the last stage has a copy of the embedding.
    """
    model = cfg.model
    flops = train_flops_per_token(model, cfg.train.seq_len)
    embedding = (embedding_weight(model),) if model.last_stage_needs_embedding else ()
    weights = (*head_weights(model), *embedding, *mtp_layer_weights(model) * model.mtp_layers)
    return StageCost(flops.head + flops.mtp, _num_local(cfg, weights))


def single_layer(model: ModelConfig, kind: str, letter: str) -> ModelConfig:
    """Return the model with one layer, of one of `BLOCK_KINDS`, with the letter of its attention."""
    index_letter = "S" if kind.endswith("S") else "F"
    return replace(
        model,
        mtp_layers=0,
        num_layers=1,
        layer_pattern=kind[0],
        attention_pattern=letter,
        index_pattern=index_letter,
    )


def _best_bounds(
    flops: Sequence[int], sizes: Sequence[Sequence[int]], max_slowdown_pct: int, allowed: frozenset[int]
) -> list[int]:
    """Return the bounds of the partition with the least product of squared FLOPs and size.

    Args:
        flops: FLOPs of the units.
        sizes: sizes of the units on each stage.
        max_slowdown_pct: allowed excess over the fastest partition, in per cent.
        allowed: units at which a stage may begin.
    """
    fastest = _min_max_partition([flops] * len(sizes), flops, sum(flops), allowed)[0]
    sums = [0, *accumulate(flops)]
    paces = {stop - first for i, first in enumerate(sums) for stop in sums[i + 1 :]}
    best: tuple[int, list[int]] | None = None
    for pace in sorted(pace for pace in paces if fastest <= pace <= fastest * (100 + max_slowdown_pct) // 100):
        largest, bounds = _min_max_partition(sizes, flops, pace, allowed)
        if best is None or pace * pace * largest < best[0]:
            best = pace * pace * largest, bounds
    assert best is not None, "the fastest partition is always a candidate"
    return best[1]


def _min_max_partition(
    costs: Sequence[Sequence[int]], limited: Sequence[int], limit: int, allowed: frozenset[int]
) -> tuple[int, list[int]]:
    """Return the minimum over partitions of the largest stage cost, and the bounds that reach it.

    Args:
        costs: costs of the units on each stage; at least as many units as stages.
        limited: a second cost of the units.
        limit: maximum of the second cost per stage.
        allowed: units at which a stage may begin, at least as many as stages.
    """
    num_units = len(limited)
    assert num_units >= len(costs), (num_units, len(costs))
    # best[i]: largest cost in the best partition of the first i units into the stages so far.
    # last_bound[k][i]: last bound of that partition.
    best: list[float] = [0.0] + [float("inf")] * num_units
    last_bound: list[list[int]] = []
    for stage_costs in costs:
        new_best = [float("inf")] * (num_units + 1)
        bound = [0] * (num_units + 1)
        for stop in range(1, num_units + 1):
            total = other = 0
            for first in range(stop - 1, -1, -1):
                total += stage_costs[first]
                other += limited[first]
                if total > new_best[stop] or other > limit:
                    break
                if first in allowed and max(best[first], total) < new_best[stop]:
                    new_best[stop] = max(best[first], total)
                    bound[stop] = first
        best = new_best
        last_bound.append(bound)
    bounds = [num_units]
    for bound in reversed(last_bound):
        bounds.append(bound[bounds[-1]])
    return int(best[num_units]), bounds[::-1]
