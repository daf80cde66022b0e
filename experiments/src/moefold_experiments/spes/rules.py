"""Rules on experts of each site."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moefold.config.base.param_spec import expert_dp_dim
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.adapter_spec import expert_names, training_weights
from moefold.message_text import Problem
from moefold_experiments.spes.part import NUM_SIMILAR

if TYPE_CHECKING:
    from moefold_experiments.spes.part import SPES

KEY = "sites.method"
OTHER = "choose another sites.method"


def spes_problems(method: "SPES", cfg: Config) -> Iterator[Problem]:
    """Yield what is incompatible with experts of each site in a recipe, so that they learn and every rank has some."""
    sites = cfg.sites
    if sites.count == 1:
        yield Problem(KEY, "spes", "divides experts among sites, and sites.count=1", "set sites.count")
        return
    if not cfg.model.has_moe_layers:
        yield Problem(KEY, "spes", "needs MoE layers, and the model has none", OTHER)
        return
    if cfg.train.trains_indexers_only(cfg.model):
        yield Problem(
            KEY, "spes", 'divides the training of experts, and train.indexer_stage="warmup" freezes them', OTHER
        )
    if sites.moments == "average":
        yield Problem(
            "sites.moments",
            "average",
            "needs moments of the same experts on all sites, and sites.method='spes' has moments of each site's own",
            "choose moments='keep' or 'reset'",
        )
    for rows, where in sorted(set(_expert_rows(cfg.model, cfg.parallel, cfg.lora))):
        if rows % sites.count:
            yield Problem(
                "sites.count",
                sites.count,
                f"must divide the {rows} experts {where}, so that each rank has experts of every site",
                "choose another sites.count, model.ffn.moe.num_experts or parallel.ep, or "
                f"{OTHER.removeprefix('choose ')}",
            )
            break
    if method.merge_experts:
        yield from _merging_problems(method, cfg)


def _merging_problems(method: "SPES", cfg: Config) -> Iterator[Problem]:
    """Yield what is incompatible with the merging of experts."""
    sites = cfg.sites
    if cfg.model.experts.num_experts <= NUM_SIMILAR:
        yield Problem(
            f"{KEY}.merge_experts",
            method.merge_experts,
            f"merges each expert with the {NUM_SIMILAR} most similar ones, and model.ffn.moe.num_experts="
            f"{cfg.model.experts.num_experts}",
            "choose 0",
        )
    if method.merge_every % sites.every:
        above = -(-method.merge_every // sites.every) * sites.every
        yield Problem(
            f"{KEY}.merge_every",
            method.merge_every,
            f"must be a multiple of sites.every={sites.every}, as experts are merged after a round",
            f"choose {above}",
        )
    if sites.overlap:
        yield Problem(
            "sites.overlap",
            sites.overlap,
            f"lets training go on from the weights of a round, which {KEY}.merge_experts changes",
            "choose overlap=0 or merge_experts=0",
        )
    if cfg.lora.rank:
        yield Problem(
            "lora.rank", cfg.lora.rank, f"freezes the experts that {KEY}.merge_experts merges", "set merge_experts=0"
        )


def _expert_rows(model: ModelConfig, p: ParallelConfig, lora: LoraConfig) -> Iterator[tuple[int, str]]:
    """Yield the number of experts of which each rank holds whole shards, for each parameter of experts; and where."""
    for name, weight in training_weights(model, lora).items():
        if name in expert_names(model, lora):
            shape = weight.shard(p.tp, p.ep, p.etp).shape
            is_by_expert = p.edp > 1 and expert_dp_dim(shape, p.edp) == 0
            if is_by_expert and shape[0] % p.edp == 0:
                yield shape[0] // p.edp, f"of a rank (parallel.ep={p.ep}, sharded over {p.edp} data-parallel ranks)"
            elif is_by_expert:
                yield 1, f"of a rank, which {p.edp} data-parallel ranks share unevenly"
            else:
                yield shape[0], f"of a rank (parallel.ep={p.ep})"
