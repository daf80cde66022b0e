"""Rules on SPSA, whose step has forward passes alone."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.schedule import SchedulePart
from moefold.config.groups.site_method import SiteMethodPart
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.message_text import Problem


def spsa_problems(name: str, cfg: Config) -> Iterator[Problem]:
    """Yield what is incompatible with forward passes alone in a recipe.

    Args:
        name: the optimizer, as a message names it.
        cfg: the recipe.
    """
    yield from _schedule_problems(name, cfg.run, cfg.parallel)
    yield from _model_problems(name, cfg.model, cfg.moe)
    yield from _method_problems(name, cfg.rl, cfg.sites)


def _schedule_problems(name: str, run: RunConfig, p: ParallelConfig) -> Iterator[Problem]:
    """Refuse what schedules backward passes."""
    if p.overlap_experts:
        rule = f"overlaps forward with backward passes, and {name} has only forward passes"
        yield Problem("parallel.overlap_experts", True, rule, "set overlap_experts=false")
    schedule = chosen_in(p, SchedulePart)
    if p.pp > 1 and schedule.splits_backward:
        rule = f"splits the backward pass, and {name} has none"
        yield Problem("parallel.schedule", schedule.kind, rule, "choose schedule='1f1b' or 'interleaved'")
    if run.uses_cuda_graphs:
        rule = f"records forward and backward passes, and {name} has no backward pass"
        yield Problem("run.cuda_graphs", run.cuda_graphs, rule, "set cuda_graphs='none'")


def _model_problems(name: str, model: ModelConfig, moe: MoEConfig) -> Iterator[Problem]:
    """Refuse what learns by a gradient of its own, and records of one forward pass."""
    if model.selected_keys:
        rule = f"trains indexers by the gradient of a loss of their own, and {name} has no gradients"
        way_out = "set indexer='none', or choose optimizer='adamw'"
        yield Problem("model.attention.indexer.top_k", model.selected_keys, rule, way_out)
    if moe.trace_every:
        rule = f"stores one choice of experts for each token of a step, and {name} makes two"
        yield Problem("moe.trace_every", moe.trace_every, rule, "set trace_every=0")


def _method_problems(name: str, rl: RLConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Refuse methods that send or sample gradients."""
    if rl.is_on:
        rule = f"updates by the gradient of sampled rewards, and {name} has no gradients"
        yield Problem("rl.group_size", rl.group_size, rule, "choose optimizer='adamw'")
    if sites.is_active:
        rule = f"exchanges the weights of sites, and {name} has no exchange of bytes between them"
        way_out = "leave [sites] out: data-parallel ranks already send two numbers a step"
        yield Problem("sites.method", chosen_in(sites, SiteMethodPart).kind, rule, way_out)
