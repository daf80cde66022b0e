"""An even pipeline: the cut into stages whose busiest one has least to compute, then least to hold. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moefold.config.pipeline_layout import StageParts
from moefold.config.schema import Config, ModelConfig
from moefold.metrics.flops import count_parameters, train_flops_per_token


@dataclass(frozen=True)
class Load:
    """What a part of the model costs."""

    flops: int
    """Of one token through the forward pass; the backward pass is twice that everywhere."""
    weights: int
    """Parameters of one rank: dense ones over tp, experts over ep*etp."""

    def __add__(self, other: "Load") -> "Load":
        return Load(self.flops + other.flops, self.weights + other.weights)


def balanced_stages(cfg: Config) -> tuple[StageParts, ...]:
    """The best cut of the model into pp*virtual_stages consecutive parts, none of them empty.

    The embedding, each layer, and the loss with the layers of multi-token prediction are the units. First the
    operations of the busiest stage are made as few as they can be, as it sets the pace of all; of the cuts with so few,
    one is taken whose fullest stage holds the fewest weights.
    """
    loads = [embedding_load(cfg), *_layer_loads(cfg), loss_load(cfg)]
    num_stages = cfg.parallel.pp * cfg.parallel.virtual_stages
    flops = [load.flops for load in loads]
    pace = _largest(flops, _best_cut(flops, num_stages))
    bounds = _best_cut([load.weights for load in loads], num_stages, limited=flops, limit=pace)
    last = len(loads) - 1
    return tuple(
        StageParts(
            has_embedding=first == 0,
            layers=range(max(first - 1, 0), min(stop, last) - 1),
            num_further=cfg.model.mtp_layers if stop > last else 0,
            has_loss=stop > last,
        )
        for first, stop in zip(bounds, bounds[1:], strict=False)
    )


def stage_load(cfg: Config, parts: StageParts) -> Load:
    """What a stage costs."""
    load = Load(0, 0)
    if parts.has_embedding:
        load += embedding_load(cfg)
    for i in parts.layers:
        load += layer_load(cfg, i)
    return load + loss_load(cfg) if parts.has_loss else load


def embedding_load(cfg: Config) -> Load:
    """A look-up costs no products."""
    return Load(0, cfg.model.vocab_size * cfg.model.hidden_size // cfg.parallel.tp)


def _layer_loads(cfg: Config) -> list[Load]:
    """Of every layer, in order; layers that are alike are counted once."""
    numbers: dict[tuple[str, int], int] = {}
    alike = list(zip(cfg.model.layer_kinds, cfg.model.layer_windows, strict=True))
    for number, kind in enumerate(alike):
        numbers.setdefault(kind, number)
    loads = {kind: layer_load(cfg, number) for kind, number in numbers.items()}
    return [loads[kind] for kind in alike]


def layer_load(cfg: Config, number: int) -> Load:
    """One layer, of its kind and with its window."""
    model = cfg.model
    one = _alone(model, model.layer_kinds[number], model.layer_windows[number])
    count, p = count_parameters(one), cfg.parallel
    dense = count.total - count.embedding - count.head - count.experts
    flops = train_flops_per_token(one, cfg.train.seq_len)
    return Load(flops.forward - flops.head, dense // p.tp + count.experts // (p.ep * p.etp))


def loss_load(cfg: Config) -> Load:
    """The output head, with the layers of multi-token prediction, each of which uses it once more."""
    model, p = cfg.model, cfg.parallel
    flops = train_flops_per_token(model, cfg.train.seq_len)
    load = Load(flops.head + flops.multi_token, model.vocab_size * model.hidden_size // p.tp)
    if model.mtp_layers == 0:
        return load
    further = layer_load(cfg, model.num_layers - 1)
    own = model.mtp_layers * (further.weights + 2 * model.hidden_size**2)
    copy = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size // p.tp
    return Load(load.flops, load.weights + own + copy)


def _alone(model: ModelConfig, kind: str, window: int) -> ModelConfig:
    pattern = "W" if window else "F"
    return replace(model, mtp_layers=0, num_layers=1, layer_pattern=kind, attention_pattern=pattern)


def _largest(costs: Sequence[int], bounds: Sequence[int]) -> int:
    return max(sum(costs[first:stop]) for first, stop in zip(bounds, bounds[1:], strict=False))


def _best_cut(
    costs: Sequence[int], num_stages: int, *, limited: Sequence[int] | None = None, limit: int = 0
) -> list[int]:
    """Bounds of consecutive stages, none empty, whose largest sum of costs is smallest.

    Args:
        costs: of the units.
        num_stages: at most as many.
        limited: other costs of the units.
        limit: what no stage may exceed in those.
    """
    num_units = len(costs)
    assert num_units >= num_stages, (num_units, num_stages)
    # best[i]: largest sum of the best cut of the first i units into the stages so far; came[k][i]: its last bound.
    best: list[float] = [0.0] + [float("inf")] * num_units
    came: list[list[int]] = []
    for _ in range(num_stages):
        now, bound = [float("inf")] * (num_units + 1), [0] * (num_units + 1)
        for stop in range(1, num_units + 1):
            total = other = 0
            for first in range(stop - 1, -1, -1):
                total += costs[first]
                other += limited[first] if limited is not None else 0
                if total > now[stop] or other > limit:
                    break
                if max(best[first], total) < now[stop]:
                    now[stop], bound[stop] = max(best[first], total), first
        best = now
        came.append(bound)
    bounds = [num_units]
    for bound in reversed(came):
        bounds.append(bound[bounds[-1]])
    return bounds[::-1]
