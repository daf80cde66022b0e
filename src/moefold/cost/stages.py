"""Pipeline stages of a recipe: resolve `parallel.pipeline_layout`; "auto" balances FLOPs and memory. Torch-free."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from moefold.config.layers import Layer
from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.param_spec import ParamSpec
from moefold.config.schema import Config
from moefold.config.train import TrainConfig
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
    """Forward FLOPs per token; the backward pass is twice that everywhere."""
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
    stages in turn, so their sum counts. The best partition minimises p * p * b: p are the FLOPs of the busiest rank,
    which limits all others, b the bytes of the fullest rank by `cost/stage_memory.py`. So a partition that is 1 %
    slower must save 2 % of memory. None is slower than the fastest one by more than `MAX_SLOWDOWN_PCT`. Ties go to the
    faster one.

    It depends on the recipe only, so that all ranks get the same result.

    Raises:
        ConfigError: the schedule file cannot be read.
    """
    # Lazy import: the memory formulas import this module to resolve stages of explicit layouts.
    from moefold.cost.stage_memory import unit_bytes

    ranks = stage_ranks(cfg.parallel)
    return _split_model(cfg.model, cfg.parallel, cfg.train, cfg.lora, ranks, unit_bytes(cfg, len(ranks)))


def fastest_stages(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, lora: LoraConfig, ranks: tuple[int, ...]
) -> tuple[StageParts, ...]:
    """Return the partition whose busiest rank has the fewest FLOPs.

    For the planner, which compares mappings before the micro-batches in flight are known, and counts memory itself.

    Args:
        model: the model.
        parallel: its shards do not count.
        train: samples and loss.
        lora: adapters.
        ranks: the pipeline rank of each stage, in model order.
    """
    return _split_model(model, parallel, train, lora, ranks)


def _split_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    ranks: tuple[int, ...],
    sizes: Sequence[Sequence[int]] = (),
) -> tuple[StageParts, ...]:
    """Return the stages of `split_units`, which may begin at some units alone: the units between them are one."""
    starts = [0, *(number + 1 for number in stage_starts(model)), model.num_layers + 2]

    def merge(values: Sequence[int]) -> list[float]:
        return [float(sum(values[first:stop])) for first, stop in pairwise(starts)]

    flops = [cost.flops for cost in _unit_costs(model, parallel, train, lora)]
    # numpy: a recipe without "auto" stages is checked without it.
    from moefold.cost.split_units import split_units

    bounds = split_units(merge(flops), ranks, [merge(size) for size in sizes], MAX_SLOWDOWN_PCT)
    return stages_between(model, [starts[bound] for bound in bounds])


def _unit_costs(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, lora: LoraConfig) -> list[StageCost]:
    return [
        embedding_cost(model, parallel),
        *_layer_costs(model, parallel, train, lora),
        loss_cost(model, parallel, train),
    ]


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
    cost = StageCost(0, 0)
    if parts.has_embedding:
        cost += embedding_cost(cfg.model, cfg.parallel)
    for i in parts.layers:
        cost += layer_cost(cfg, i)
    if not parts.has_loss:
        return cost
    is_shared = parts.has_embedding and cfg.model.last_stage_needs_embedding
    return (
        cost
        + loss_cost(cfg.model, cfg.parallel, cfg.train)
        + StageCost(0, -embedding_cost(cfg.model, cfg.parallel).num_parameters if is_shared else 0)
    )


def embedding_cost(model: ModelConfig, parallel: ParallelConfig) -> StageCost:
    """Return the cost of the embedding: no FLOPs, as it is a look-up."""
    return StageCost(0, _num_local(parallel, (embedding_weight(model),)))


def _num_local(parallel: ParallelConfig, weights: Iterable[ParamSpec]) -> int:
    """Return the number of elements of weights that a rank of tensor and expert parallelism has."""
    return sum(weight.shard(parallel.tp, parallel.ep, parallel.etp).numel for weight in weights)


def _layer_costs(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, lora: LoraConfig) -> list[StageCost]:
    """Return the cost of every layer, in order; equal layers are counted once."""
    loads = {layer: _kind_cost(model, parallel, train, lora, layer) for layer in set(model.decoder_layers)}
    return [loads[layer] for layer in model.decoder_layers]


def layer_cost(cfg: Config, number: int) -> StageCost:
    """Return the cost of one layer."""
    return _kind_cost(cfg.model, cfg.parallel, cfg.train, cfg.lora, cfg.model.decoder_layers[number])


def _kind_cost(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, lora: LoraConfig, layer: Layer
) -> StageCost:
    """Return the cost of a layer."""
    flops = layer_flops(model, layer, train.seq_len)
    weights = (*layer.params, *layer_adapters(layer.kind, lora))
    return StageCost(flops.forward, _num_local(parallel, weights))


def loss_cost(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> StageCost:
    """Return the cost of the output head and the MTP layers, each of which uses the head once more.

    With tied embeddings and for MTP layers, the last stage has a copy of the embedding.
    """
    flops = train_flops_per_token(model, train.seq_len)
    embedding = (embedding_weight(model),) if model.last_stage_needs_embedding else ()
    weights = (*head_weights(model), *embedding, *mtp_layer_weights(model) * model.mtp_layers)
    return StageCost(flops.head + flops.mtp, _num_local(parallel, weights))
