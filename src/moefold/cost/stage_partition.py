"""An even pipeline: the cut into stages that are quick and not too full. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from moefold.config.schema import Config, ModelConfig
from moefold.cost.flops import count_parameters, train_flops_per_token
from moefold.topology.pipeline_layout import StageParts

MAX_SLOWDOWN_PCT = 10
"""Per cent of operations that the busiest stage may have above the least possible."""


@dataclass(frozen=True)
class StageCost:
    """What a part of the model costs."""

    flops: int
    """Of one token through the forward pass; the backward pass is twice that everywhere."""
    num_parameters: int
    """Parameters of one rank: dense ones over tp, experts over ep*etp."""

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(self.flops + other.flops, self.num_parameters + other.num_parameters)


@lru_cache(maxsize=256)
def balanced_stages(cfg: Config) -> tuple[StageParts, ...]:
    """The best cut of the model into pp*virtual_stages consecutive parts, none of them empty.

    The embedding, each layer, and the loss with the layers of multi-token prediction are the units. The best cut has
    the least product of p * p and b: p are the operations of the busiest stage, which sets the pace of all, b the bytes
    of the fullest stage as `cost/stage_memory.py` counts them. So a cut that is 1 % slower must save 2 % of memory.
    None is slower than the fastest one by more than `MAX_SLOWDOWN_PCT`. Of equals the faster one is taken.

    It follows from the recipe alone, so that all ranks have the same.
    """
    # The formulas of memory ask for stages themselves, of layouts that are spelled out.
    from moefold.cost.stage_memory import unit_bytes

    num_stages = cfg.parallel.pp * cfg.parallel.virtual_stages
    flops = [load.flops for load in _unit_costs(cfg)]
    return _stages_between(cfg, _best_bounds(flops, unit_bytes(cfg, num_stages), MAX_SLOWDOWN_PCT))


def fastest_stages(cfg: Config) -> tuple[StageParts, ...]:
    """The same with the fastest cut, and of these the one whose fullest stage holds the fewest weights.

    For the planner, which compares mappings before it knows what is in flight, and counts their memory itself.
    """
    loads, num_stages = _unit_costs(cfg), cfg.parallel.pp * cfg.parallel.virtual_stages
    flops, weights = [load.flops for load in loads], [load.num_parameters for load in loads]
    return _stages_between(cfg, _best_bounds(flops, [weights] * num_stages, 0))


def _unit_costs(cfg: Config) -> list[StageCost]:
    return [embedding_cost(cfg), *_layer_costs(cfg), loss_cost(cfg)]


def _stages_between(cfg: Config, bounds: Sequence[int]) -> tuple[StageParts, ...]:
    """The stages between bounds among the units."""
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
    """What a stage costs."""
    load = StageCost(0, 0)
    if parts.has_embedding:
        load += embedding_cost(cfg)
    for i in parts.layers:
        load += layer_cost(cfg, i)
    return load + loss_cost(cfg) if parts.has_loss else load


def embedding_cost(cfg: Config) -> StageCost:
    """A look-up costs no products."""
    return StageCost(0, cfg.model.vocab_size * cfg.model.hidden_size // cfg.parallel.tp)


def _layer_costs(cfg: Config) -> list[StageCost]:
    """Of every layer, in order; layers that are alike are counted once."""
    numbers: dict[tuple[str, int], int] = {}
    alike = list(zip(cfg.model.layer_kinds, cfg.model.layer_windows, strict=True))
    for number, kind in enumerate(alike):
        numbers.setdefault(kind, number)
    loads = {kind: layer_cost(cfg, number) for kind, number in numbers.items()}
    return [loads[kind] for kind in alike]


def layer_cost(cfg: Config, number: int) -> StageCost:
    """One layer, of its kind and with its window."""
    model = cfg.model
    one = _single_layer(model, model.layer_kinds[number], model.layer_windows[number])
    count, p = count_parameters(one), cfg.parallel
    dense = count.total - count.embedding - count.head - count.experts
    flops = train_flops_per_token(one, cfg.train.seq_len)
    return StageCost(flops.forward - flops.head, dense // p.tp + count.experts // (p.ep * p.etp))


def loss_cost(cfg: Config) -> StageCost:
    """The output head, with the layers of multi-token prediction, each of which uses it once more."""
    model, p = cfg.model, cfg.parallel
    flops = train_flops_per_token(model, cfg.train.seq_len)
    load = StageCost(flops.head + flops.mtp, model.vocab_size * model.hidden_size // p.tp)
    if model.mtp_layers == 0:
        return load
    further = layer_cost(cfg, model.num_layers - 1)
    own = model.mtp_layers * (further.num_parameters + 2 * model.hidden_size**2)
    copy = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size // p.tp
    return StageCost(load.flops, load.num_parameters + own + copy)


def _single_layer(model: ModelConfig, kind: str, window: int) -> ModelConfig:
    pattern = "W" if window else "F"
    return replace(model, mtp_layers=0, num_layers=1, layer_pattern=kind, attention_pattern=pattern)


def _best_bounds(flops: Sequence[int], sizes: Sequence[Sequence[int]], max_slowdown_pct: int) -> list[int]:
    """Bounds of the cut with the least product of operations squared and size.

    Args:
        flops: of the units.
        sizes: of the units on each stage.
        max_slowdown_pct: per cent above the fastest cut that are allowed.
    """
    fastest = _min_max_partition([flops] * len(sizes), flops, sum(flops))[0]
    sums = [0, *accumulate(flops)]
    paces = {stop - first for i, first in enumerate(sums) for stop in sums[i + 1 :]}
    best: tuple[int, list[int]] | None = None
    for pace in sorted(pace for pace in paces if fastest <= pace <= fastest * (100 + max_slowdown_pct) // 100):
        fullest, bounds = _min_max_partition(sizes, flops, pace)
        if best is None or pace * pace * fullest < best[0]:
            best = pace * pace * fullest, bounds
    assert best is not None, "the fastest cut has its own pace"
    return best[1]


def _min_max_partition(costs: Sequence[Sequence[int]], limited: Sequence[int], limit: int) -> tuple[int, list[int]]:
    """The least that the largest cost of a stage can be, and bounds of consecutive stages with it, none empty.

    Args:
        costs: of the units on each stage; as many units as stages, or more.
        limited: other costs of the units.
        limit: what no stage may exceed in those.
    """
    num_units = len(limited)
    assert num_units >= len(costs), (num_units, len(costs))
    # best[i]: largest cost in the best cut of the first i units into the stages so far; came[k][i]: its last bound.
    best: list[float] = [0.0] + [float("inf")] * num_units
    came: list[list[int]] = []
    for of_stage in costs:
        now, bound = [float("inf")] * (num_units + 1), [0] * (num_units + 1)
        for stop in range(1, num_units + 1):
            total = other = 0
            for first in range(stop - 1, -1, -1):
                total += of_stage[first]
                other += limited[first]
                if total > now[stop] or other > limit:
                    break
                if max(best[first], total) < now[stop]:
                    now[stop], bound[stop] = max(best[first], total), first
        best = now
        came.append(bound)
    bounds = [num_units]
    for bound in reversed(came):
        bounds.append(bound[bounds[-1]])
    return int(best[num_units]), bounds[::-1]
