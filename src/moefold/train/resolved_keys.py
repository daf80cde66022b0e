"""Keys that a recipe leaves out and a run has resolved: a resumed run keeps them, even if the defaults change.

Defaults change between versions, and a resumed run must not change with them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.config.keys.learning_rates import (
    LR_KEY,
    METHOD_KEYS,
    PRETRAINING,
    default_learning_rate,
    describe_method,
    method_of,
    method_settings,
)
from moefold.config.schema import Config
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig

CHUNK_KEY = "train.loss_chunk"


def keep_resolved(cfg: Config, settings: Mapping[str, Any], left_out: frozenset[str]) -> Config:
    """Return a recipe with the values that a run has resolved for keys that the recipe leaves out.

    The learning rate is kept if the method of training is the same, and the steps of run.epochs if data files may have
    been lost meanwhile.

    Args:
        settings: the keys of the run as "section.key". It may lack some, and hold anything.
        left_out: keys of `recipe.RESOLVED_KEYS` that the recipe leaves out.
    """
    # The settings that determine the number of steps, with the files of the data.
    length = {
        "train.seq_len": cfg.train.seq_len,
        "train.global_batch_size": cfg.train.global_batch_size,
        "run.epochs": cfg.run.epochs,
        "data.kind": cfg.data.kind,
        "data.path": list(cfg.data.path) if isinstance(cfg.data.path, tuple) else cfg.data.path,
    }
    same_length = all(settings.get(key) == value for key, value in length.items())
    if cfg.run.epochs and cfg.data.corrupt == "skip" and same_length and type(settings.get("run.steps")) is int:
        cfg = replace(cfg, run=replace(cfg.run, steps=settings["run.steps"]))
    chunk = settings.get(CHUNK_KEY)
    if CHUNK_KEY in left_out and type(chunk) is int and -1 <= chunk < cfg.train.loss_tokens(cfg.parallel.cp):
        cfg = replace(cfg, train=replace(cfg.train, loss_chunk=chunk))
    rate = settings.get(LR_KEY)
    before = method_settings(TrainConfig(), DataConfig(), AlignConfig(), LoraConfig(), RLConfig()) | {
        key: settings[key] for key in METHOD_KEYS if key in settings
    }
    ours = method_settings(cfg.train, cfg.data, cfg.align, cfg.lora, cfg.rl)
    if LR_KEY not in left_out or describe_method(before) != describe_method(ours):
        return cfg
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < math.inf:
        return cfg
    return replace(cfg, train=replace(cfg.train, lr=float(rate)))


def settings_of_checkpoint(
    meta: CheckpointMeta, train: TrainConfig, data: DataConfig, align: AlignConfig, rl: RLConfig
) -> dict[str, Any]:
    """Return the settings of a run that its checkpoint records, as "section.key", and the optimizer of the recipe."""
    order = meta.order
    return meta.state_of("schedule") | {
        "data.kind": order.get("kind", data.kind),
        "align.method": order.get("align.method", align.method),
        "rl.group_size": 0 if meta.state_of("data").get("rl") is None else max(1, rl.group_size),
        "lora.rank": meta.lora.get("rank", 0),
        "train.optimizer": train.optimizer,
    }


def describe_learning_rate(cfg: Config, left_out: frozenset[str]) -> str:
    """Return the line of the log about a learning rate that the recipe leaves out, or "" if it sets one."""
    if LR_KEY not in left_out:
        return ""
    settings = method_settings(cfg.train, cfg.data, cfg.align, cfg.lora, cfg.rl)
    default = default_learning_rate(settings)
    if cfg.train.lr != default:
        return (
            f"train.lr={cfg.train.lr:g}, as the run has it: the recipe sets none, and the default of "
            f"{describe_method(settings)} is {default:g}"
        )
    begins_random = not (cfg.checkpoint.start or cfg.lora.init_from)
    hint = ""
    if method_of(settings) != PRETRAINING and begins_random and cfg.data.kind != "program":
        hint = f"; the run begins with random weights, for which {PRETRAINING.all_weights:g} is usual"
    return f"train.lr={default:g} is the default of {describe_method(settings)}{hint}"
