"""Mapping that samples rollouts where it differs from the mapping of training (`rollout.tp`, `pp`, `ep`, `etp`).

It has the ranks of training, or `rollout.ranks` separate ranks, which follow the ranks of training.
"""

from dataclasses import replace

from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.message_text import Setting

FETCH = Setting("rollout.experts", "fetch")
ROLLOUT_DEGREES = ("tp", "pp", "ep", "etp")
"""Degrees of sampling that a recipe may set. They decide dp, whose ranks sample different prompts."""


def rollout_degrees(parallel: ParallelConfig, rollout: RolloutConfig) -> dict[str, int]:
    """Return the degrees of sampling. A degree that the recipe leaves at 0 is the degree of training.

    With rollout.experts="whole", ep and etp are 1 instead.
    """
    defaults = {axis: getattr(parallel, axis) for axis in ROLLOUT_DEGREES}
    if rollout.experts == "whole":
        defaults |= {"ep": 1, "etp": 1}
    return {axis: getattr(rollout, axis) or default for axis, default in defaults.items()}


def has_rollout_mapping(parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig) -> bool:
    """Return whether a second model samples: on other ranks, under other degrees, or with fetched experts."""
    if not rl.is_on:
        return False
    has_degrees = any(degree != getattr(parallel, axis) for axis, degree in rollout_degrees(parallel, rollout).items())
    return rollout.ranks > 0 or fetches_experts(rollout) or has_degrees


def fetches_experts(rollout: RolloutConfig) -> bool:
    """Return whether ranks that sample read each other's experts from shared memory."""
    return rollout.experts == "fetch"


def rollout_parallel(p: ParallelConfig, rollout: RolloutConfig) -> ParallelConfig:
    """Return the mapping of the inference model that samples: no cp, ZeRO and virtual stages."""
    degrees = rollout_degrees(p, rollout)
    return ParallelConfig(
        world_size=rollout.ranks or p.world_size,
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


def rollout_config(cfg: Config) -> Config:
    """Return the recipe of the inference model that samples: its mapping, and merged adapters."""
    parallel = rollout_parallel(cfg.parallel, cfg.rollout)
    tp = parallel.tp
    train = replace(
        cfg.train,
        seq_len=-(-cfg.train.seq_len // tp) * tp,
        micro_batch_size=1,
        global_batch_size=cfg.rl.group_size * max(1, parallel.dp),
    )
    return replace(cfg, parallel=parallel, train=train, lora=LoraConfig())
