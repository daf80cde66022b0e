"""Mapping that samples rollouts where it is another one than that of training (`rollout.tp`, `pp`, `ep`, `etp`).

It has the ranks of training, or `rollout.ranks` ranks of its own, which follow those of training. Torch-free.
"""

from dataclasses import replace

from moefold.config.schema import Config, ParallelConfig

ROLLOUT_DEGREES = ("tp", "pp", "ep", "etp")
"""Degrees of sampling that a recipe may set; all other ranks sample prompts of their own (dp)."""


def rollout_degrees(cfg: Config) -> dict[str, int]:
    """Return the degrees of sampling; those that the recipe leaves at 0 are those of training."""
    return {axis: getattr(cfg.rollout, axis) or getattr(cfg.parallel, axis) for axis in ROLLOUT_DEGREES}


def has_rollout_mapping(cfg: Config) -> bool:
    """Return whether rollouts are sampled by other ranks, or under other degrees, than those of training."""
    has_degrees = any(degree != getattr(cfg.parallel, axis) for axis, degree in rollout_degrees(cfg).items())
    return cfg.is_rl and (cfg.rollout.ranks > 0 or has_degrees)


def rollout_config(cfg: Config) -> Config:
    """Return the recipe of the inference model that samples, without cp, ZeRO and virtual stages."""
    p = cfg.parallel
    degrees = rollout_degrees(cfg)
    parallel = ParallelConfig(
        world_size=cfg.rollout.ranks or p.world_size,
        tp=degrees["tp"],
        pp=degrees["pp"],
        ep=degrees["ep"],
        etp=degrees["etp"],
        order=p.order,
        moe_order=p.moe_order,
        dispatcher=p.dispatcher,
        schedule="gpipe",
        zero=0,
    )
    tp = degrees["tp"]
    train = replace(
        cfg.train,
        seq_len=-(-cfg.train.seq_len // tp) * tp,
        micro_batch_size=1,
        global_batch_size=cfg.rl.group_size * max(1, parallel.dp),
    )
    return replace(cfg, parallel=parallel, train=train)
