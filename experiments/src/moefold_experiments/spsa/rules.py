"""Rules on SPSA, whose step has forward passes alone."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.schedule import SchedulePart
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.rl import RLConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.config.sites import SitesConfig


def spsa_problems(name: str, cfg: Config) -> Iterator[str]:
    """Yield what forward passes alone do not go with in a recipe.

    Args:
        name: the optimizer, as a message names it.
        cfg: the recipe.
    """
    yield from _schedule_problems(name, cfg.run, cfg.parallel)
    yield from _model_problems(name, cfg.model, cfg.moe)
    yield from _method_problems(name, cfg.rl, cfg.sites)


def _schedule_problems(name: str, run: RunConfig, p: ParallelConfig) -> Iterator[str]:
    """Refuse what schedules backward passes."""
    if p.overlap_experts:
        yield (
            f"parallel.overlap_experts=true overlaps forward with backward passes, and {name} has only forward passes; "
            "set overlap_experts=false"
        )
    if p.pp > 1 and chosen_in(p, SchedulePart).splits_backward:
        yield (
            f"parallel.schedule='{p.schedule}' splits the backward pass, and {name} has none; choose schedule='1f1b' "
            "or 'interleaved'"
        )
    if run.uses_cuda_graphs:
        yield (
            f"run.cuda_graphs={run.cuda_graphs!r} records forward and backward passes, and {name} has no backward "
            "pass; set cuda_graphs='none'"
        )


def _model_problems(name: str, model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    """Refuse what learns by a gradient of its own, and records of one forward pass."""
    if model.selected_keys:
        yield (
            f"model.attention.indexer.top_k={model.selected_keys} trains indexers by the gradient of a loss of their "
            "own, and "
            f"{name} has no gradients; set indexer='none', or choose optimizer='adamw'"
        )
    if moe.trace_every:
        yield (
            f"moe.trace_every={moe.trace_every} stores one choice of experts for each token of a step, and {name} "
            "makes two; set trace_every=0"
        )


def _method_problems(name: str, rl: RLConfig, sites: SitesConfig) -> Iterator[str]:
    """Refuse methods that send or sample gradients."""
    if rl.is_on:
        yield (
            f"rl.group_size={rl.group_size} updates by the gradient of sampled rewards, and {name} has no "
            "gradients; choose optimizer='adamw'"
        )
    if sites.is_active:
        yield (
            f"sites.method='{sites.method}' exchanges the weights of sites, and {name} has no exchange of bytes "
            "between them; leave [sites] out: data-parallel ranks already send two numbers a step"
        )
