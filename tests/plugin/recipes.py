"""Recipes with the parts of the package, by entry point and by file."""

from dataclasses import replace
from pathlib import Path

import moefold_plugin_example

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.recipe import load_config

PACKAGE = Path(moefold_plugin_example.__file__).parent
PARTS = {
    "model.attention": ("gated", "gated_attention.py:Gated", "num_heads = 4, head_dim = 16"),
    "parallel.dispatcher": ("gathering", "gathering.py:Gathering", ""),
    "parallel.schedule": ("eager", "eager.py:Eager", ""),
    "train.optimizer": ("sgd", "momentum_sgd.py:MomentumSgd", "momentum = 0.5"),
    "train.lr_schedule": ("inverse_sqrt", "inverse_sqrt.py:InverseSqrt", "floor = 0.2, timescale = 2"),
    "rl.objective": ("simple_policy", "simple_policy.py:SimplePolicy", "epsilon = 0.3"),
}
"""Kind, file and settings of the part of each key."""
BUILT_IN = (
    "model.attention.gate={}",
    "model.attention.num_heads=4",
    "model.attention.num_kv_heads=4",
    "model.attention.head_dim=16",
)
"""The attention of the package by keys of gqa."""
FOUR = ("parallel.world_size=4", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2")
EIGHT = ("parallel.world_size=8", *FOUR[1:])
SIZES = (
    "model.preset=tiny",
    "run.steps=2",
    "run.device=cpu",
    "run.dtype=float64",
    "data.kind=synthetic",
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.lr=1e-2",
    "train.warmup_steps=0",
)


def words(*keys: str, by_file: bool = False) -> tuple[str, ...]:
    """Return the overrides that choose parts of the package, with settings.

    Args:
        keys: as in PARTS; none: all but the loss of reinforcement learning.
        by_file: name the files instead of the entry points.
    """
    found = []
    for key in keys or [key for key in PARTS if key != "rl.objective"]:
        kind, file, settings = PARTS[key]
        table = [f'kind = "{PACKAGE / file if by_file else kind}"', settings]
        found.append(f"{key}={{{', '.join(filter(None, table))}}}")
    return tuple(found)


def recipe(*overrides: str) -> Config:
    """Return a small recipe in float64."""
    return load_config(None, [*SIZES, *overrides])


def mapped(cfg: Config, mapping: dict[str, object]) -> Config:
    return replace(cfg, parallel=ParallelConfig(**mapping))
