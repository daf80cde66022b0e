"""Rules on optimizers without gradients: a step has forward passes alone."""

from collections.abc import Iterator

from moefold.config.chosen import chosen, chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.groups.schedule import SchedulePart
from moefold.config.schema import Config


def validate_forward_only(cfg: Config) -> Iterator[str]:
    """Refuse what needs a backward pass, and what would need a meaning of its own without one."""
    optimizer = chosen_in(cfg.train, OptimizerPart)
    if optimizer.needs_gradients:
        return
    name = f"train.optimizer={optimizer.kind!r}"
    p = cfg.parallel
    if cfg.train.gradient_delay:
        yield f"train.gradient_delay=1 delays gradients, and {name} has none; set gradient_delay=0"
    if p.overlap_experts:
        yield (
            f"parallel.overlap_experts=true overlaps forward with backward passes, and {name} has only forward passes; "
            "set overlap_experts=false"
        )
    if p.pp > 1 and chosen(cfg, SchedulePart).splits_backward:
        yield (
            f"parallel.schedule='{p.schedule}' splits the backward pass, and {name} has none; choose schedule='1f1b' "
            "or 'interleaved'"
        )
    if cfg.run.uses_cuda_graphs:
        yield (
            f"run.cuda_graphs={cfg.run.cuda_graphs!r} records forward and backward passes, and {name} has no backward "
            "pass; set cuda_graphs='none'"
        )
    if cfg.model.selected_keys:
        yield (
            f"model.index_topk={cfg.model.selected_keys} trains indexers by the gradient of a loss of their own, and "
            f"{name} has no gradients; set index_topk=0, or choose optimizer='adamw'"
        )
    if cfg.moe.trace_every:
        yield (
            f"moe.trace_every={cfg.moe.trace_every} stores one choice of experts for each token of a step, and {name} "
            "makes two; set trace_every=0"
        )
    if cfg.is_rl:
        yield (
            f"rl.group_size={cfg.rl.group_size} updates by the gradient of sampled rewards, and {name} has no "
            "gradients; choose optimizer='adamw'"
        )
    if cfg.sites.is_active:
        yield (
            f"sites.method={cfg.sites.method!r} exchanges the weights of sites, and {name} has no exchange of bytes "
            "between them; leave [sites] out: data-parallel ranks already send two numbers a step"
        )
