"""Pipeline stages of a recipe: resolve `parallel.pipeline_layout`.

`auto` balances FLOPs and memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from moefold.config.base.param_spec import ParamSpec
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import layer_adapters
from moefold.cost.flops import layer_flops, train_flops_per_token
from moefold.cost.layer_spec import embedding_weight, head_weights, mtp_layer_weights
from moefold.topology.pipeline_layout import Stage, StageParts, StagePlan, even_stages, parse_layout
from moefold.topology.schedules import stage_ranks
from moefold.topology.selection_groups import stage_starts

MAX_SLOWDOWN_PCT = 10
"""Maximum excess of the busiest rank's FLOPs over the best partition, in per cent."""


@dataclass(frozen=True)
class StageCost:
    """FLOPs and parameters of a part of the model."""

    flops: int
    """Forward FLOPs per token. The backward pass is twice that everywhere."""
    num_parameters: int
    """Parameters on one rank without data-parallel sharding: what tensor parallelism shards over tp, experts over
    ep*etp, and the rest (norms, routers, latent projections) whole."""

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(self.flops + other.flops, self.num_parameters + other.num_parameters)


def plan_stages(cfg: Config) -> StagePlan:
    """Return the stages of a recipe that passed `check_config`.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    ranks = stage_ranks(cfg.parallel)
    parts = stage_parts(cfg)
    return StagePlan(tuple(Stage(i, rank, part) for i, (rank, part) in enumerate(zip(ranks, parts, strict=True))))


def with_explicit_layout(cfg: Config) -> Config:
    """Return the recipe with an automatic layout resolved, for a change that must not move the stages."""
    if cfg.parallel.pipeline_layout != "auto":
        return cfg
    return replace(cfg, parallel=replace(cfg.parallel, pipeline_layout=plan_stages(cfg).layout))


def stage_parts(cfg: Config) -> tuple[StageParts, ...]:
    """Return the parts of the model on each stage, by `parallel.pipeline_layout`."""
    p = cfg.parallel
    model = cfg.model
    if p.pipeline_layout == "":
        return even_stages(model.num_layers, model.mtp_layers, p.pp * p.virtual_stages)
    if p.pipeline_layout == "auto":
        return balanced_stages(cfg)
    return parse_layout(p.pipeline_layout)


@lru_cache(maxsize=256)
def balanced_stages(cfg: Config) -> tuple[StageParts, ...]:
    """Partition the model into pp*virtual_stages consecutive non-empty stages, balanced in FLOPs and memory.

    The units are the embedding, each layer, and the loss with the MTP layers. A pipeline rank computes all of its
    stages one after another, so their sum counts. The best partition minimises p * p * b. Here p is the FLOPs of the
    busiest rank, which limits all others, and b is the bytes of the fullest rank by `cost/auto_layout_memory.py`. So a
    partition that is 1 % slower must save 2 % of memory. None is slower than the fastest one by more than
    `MAX_SLOWDOWN_PCT`. Ties go to the faster one.

    It depends on the recipe only, so that all ranks get the same result.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    # Lazy import: the memory formulas import this module to resolve stages of explicit layouts.
    from moefold.cost.auto_layout_memory import unit_bytes

    ranks = stage_ranks(cfg.parallel)
    return split_model(cfg.model, cfg.train, cfg.lora, ranks, unit_bytes(cfg, len(ranks)))


def split_model(
    model: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    ranks: tuple[int, ...],
    sizes: Sequence[Sequence[int]] = (),
) -> tuple[StageParts, ...]:
    """Return the stages of `split_units`. They begin only at certain units. The units between those count as one.

    Args:
        ranks: the pipeline rank of each stage, in model order.
        sizes: bytes of the units on each stage. The planner gives none: it compares mappings before the micro-batches
            in flight are known, and counts memory itself, so the busiest rank has the fewest FLOPs.
    """
    starts = [0, *(number + 1 for number in stage_starts(model)), model.num_layers + 2]

    def merge(values: Sequence[int]) -> list[float]:
        return [float(sum(values[first:stop])) for first, stop in pairwise(starts)]

    flops = [cost.flops for cost in unit_costs(model, ParallelConfig(), train, lora)]
    # numpy: a recipe without "auto" stages is checked without it.
    from moefold.cost.split_units import split_units

    bounds = split_units(merge(flops), ranks, [merge(size) for size in sizes], MAX_SLOWDOWN_PCT)
    return stages_between(model, [starts[bound] for bound in bounds])


def stages_between(model: ModelConfig, bounds: Sequence[int]) -> tuple[StageParts, ...]:
    """Return the stages between bounds in the list of units."""
    last = model.num_layers + 1
    return tuple(
        StageParts(
            has_embedding=first == 0,
            layers=range(max(first - 1, 0), min(stop, last) - 1),
            num_mtp_layers=model.mtp_layers if stop > last else 0,
            has_loss=stop > last,
        )
        for first, stop in zip(bounds, bounds[1:], strict=False)
    )


def stage_cost(cfg: Config, parts: StageParts) -> StageCost:
    """Return the cost of a stage."""
    embedding, *layers, loss = unit_costs(cfg.model, cfg.parallel, cfg.train, cfg.lora)
    own = [embedding] * parts.has_embedding + layers[parts.layers.start : parts.layers.stop] + [loss] * parts.has_loss
    is_shared = parts.has_embedding and parts.has_loss and cfg.model.last_stage_needs_embedding
    return sum(own, StageCost(0, -embedding.num_parameters if is_shared else 0))


def unit_costs(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, lora: LoraConfig) -> list[StageCost]:
    """Return the costs of the embedding, of each layer, and of the loss with the MTP layers.

    The embedding is a look-up without FLOPs. Each MTP layer uses the output head once more. With tied embeddings and
    for MTP layers, the last stage has a copy of the embedding.
    """

    def num_local(*weights: ParamSpec) -> int:
        return sum(weight.shard(parallel.tp, parallel.ep, parallel.etp).numel for weight in weights)

    kinds = {
        layer: StageCost(
            layer_flops(model, layer, train.seq_len).forward,
            num_local(*layer.params, *layer_adapters(layer.kind, lora)),
        )
        for layer in set(model.decoder_layers)
    }
    flops = train_flops_per_token(model, train.seq_len)
    embedding = embedding_weight(model)
    copies = (embedding,) if model.last_stage_needs_embedding else ()
    loss = num_local(*head_weights(model), *copies, *mtp_layer_weights(model) * model.mtp_layers)
    return [
        StageCost(0, num_local(embedding)),
        *(kinds[layer] for layer in model.decoder_layers),
        StageCost(flops.head + flops.mtp, loss),
    ]
