"""Rules on SPSA, which trains without gradients, and its keys without effect."""

from collections.abc import Iterator

from moefold.config.chosen import chosen
from moefold.config.groups.schedule import SchedulePart
from moefold.config.schema import Config
from moefold.cost.optimizers import optimizer_of
from moefold.validate.unused_rule import UnusedKeyRule


def has_gradients(cfg: Config) -> bool:
    """Return whether a step has a backward pass."""
    return optimizer_of(cfg).needs_gradients


def validate_spsa(cfg: Config) -> Iterator[str]:
    """Refuse what needs a backward pass, and what would need a meaning of its own without one."""
    if has_gradients(cfg):
        return
    name = "train.optimizer='spsa'"
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
            f"parallel.schedule={p.schedule!r} splits the backward pass, and {name} has none; choose schedule='1f1b' "
            "or 'interleaved'"
        )
    if cfg.run.cuda_graphs != "none":
        yield (
            f"run.cuda_graphs={cfg.run.cuda_graphs!r} records forward and backward passes, and {name} has no backward "
            "pass; set cuda_graphs='none'"
        )
    if cfg.model.index_topk:
        yield (
            f"model.index_topk={cfg.model.index_topk} trains indexers by the gradient of a loss of their own, and "
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


SPSA_RULES = (validate_spsa,)

UNUSED_SPSA_KEYS = (
    UnusedKeyRule(
        "train.spsa_eps train.spsa_max_gradient",
        has_gradients,
        "only train.optimizer='spsa' reads it",
        "choose train.optimizer='spsa'",
    ),
    UnusedKeyRule(
        "train.beta1 train.beta2 train.eps train.moment_dtype train.reset_moments_every train.offload_optimizer",
        lambda cfg: not has_gradients(cfg),
        "train.optimizer='spsa' has no moments",
        "choose train.optimizer='adamw'",
    ),
    UnusedKeyRule(
        "train.clip_grad",
        lambda cfg: not has_gradients(cfg),
        "train.optimizer='spsa' clamps its projected gradient by train.spsa_max_gradient",
        "set train.spsa_max_gradient",
    ),
    UnusedKeyRule(
        "train.recompute train.memory_budget_gib train.offload",
        lambda cfg: not has_gradients(cfg),
        "train.optimizer='spsa' has no backward pass, for which activations would be saved",
        "choose train.optimizer='adamw'",
    ),
)
