"""Pipeline stages of a recipe: resolve `parallel.pipeline_layout`, including "auto". Torch-free."""

from dataclasses import replace

from moefold.config.schema import Config
from moefold.cost.stage_partition import balanced_stages
from moefold.topology.pipeline_layout import Stage, StageParts, StagePlan, even_stages, parse_layout
from moefold.topology.schedules import stage_ranks


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
