"""Recipe loading: read TOML, apply overrides, adapt to shorter runs, infer vocab_size."""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from moefold.config.base.limits import MAX_NUMBER, MAX_STEPS
from moefold.config.keys.learning_rates import LR_KEY
from moefold.config.keys.paths import default_of
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.overrides import AUTO_MAPPING, apply_overrides
from moefold.config.recipe_file import read_recipe, resolve_paths
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.tables.part_class import import_part_files
from moefold.config.tables.tree import Tree
from moefold.data.input_paths import existing_path
from moefold.errors import ConfigError
from moefold.validate.unused import check_unused_keys

STEP_COUNT_KEYS = ("train.warmup_steps", "train.lr_schedule.decay_steps")
"""Keys that count steps and must fit into run.steps together."""


def shorten_lr_schedule(tree: Mapping[str, Any], recipe: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Shrink warm-up and decay in proportion if the command line sets run.steps below their sum.

    They are unchanged if they fit, or if the command line sets one of them. A value that does not fit is then refused.

    Args:
        tree: the sections of the recipe with overrides applied. Its [train] is changed in place.
        recipe: the sections of the recipe without overrides.

    Returns:
        A message for each change.
    """
    overridden = {override.partition("=")[0].strip() for override in overrides}
    if "run.steps" not in overridden or overridden & {*STEP_COUNT_KEYS}:
        return []
    steps = _int_or_zero(tree, "run.steps")
    planned = _int_or_zero(recipe, "run.steps")
    counts = {name: _int_or_zero(tree, name) for name in STEP_COUNT_KEYS}
    # An override may have replaced the table of the schedule.
    is_typed = any(count not in (0, _int_or_zero(recipe, name)) for name, count in counts.items())
    if is_typed or not 0 < steps < sum(counts.values()) <= planned:
        return []
    messages = []
    for name, count in counts.items():
        if count > 0:
            shorter = count * steps // planned
            *tables, key = name.split(".")
            table: Any = reduce(getitem, tables, tree)
            table[key] = shorter
            messages.append(
                f"{name} is {shorter} instead of {count}: run.steps={steps} instead of the {planned} of the recipe"
            )
    return messages


def _int_or_zero(tree: Mapping[str, Any], name: str) -> int:
    """Return an integer of an unvalidated tree, or its default, or 0 for anything else."""
    value: Any = tree
    names = name.split(".")
    for inner in names:
        value = value.get(inner, {}) if isinstance(value, dict) else 0
    if value == {} and name.count(".") == 1:
        value = default_of(*names)
    return value if type(value) is int else 0


def _is_count(value: Any) -> bool:
    """Return whether a value of an unvalidated tree is a number of steps or epochs."""
    return type(value) in (int, float) and 0 < value <= MAX_NUMBER


def choose_length(tree: Tree, recipe: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Keep one of run.steps and run.epochs: the key of the command line if the recipe has the other key.

    With epochs, run.steps is the largest legal number until the length of the data is known.

    Args:
        tree: the sections of the recipe with overrides applied. Its [run] is changed in place.
        recipe: the sections of the recipe without overrides.

    Returns:
        A message on the replaced key.

    Raises:
        ConfigError: the recipe has both keys, or the command line does.
    """
    run = tree.get("run")
    if not isinstance(run, dict) or not _is_count(run.get("epochs")) or not _is_count(run.get("steps", 1)):
        # Values that are not counts are refused by name later.
        return []
    overridden = {override.partition("=")[0].strip() for override in overrides}
    lengths = [key for key in ("epochs", "steps") if f"run.{key}" in overridden]
    if "steps" not in run:
        run["steps"] = MAX_STEPS
        return []
    if len(lengths) != 1 or {"epochs", "steps"} <= recipe.get("run", {}).keys():
        raise ConfigError(
            f"run.steps={run['steps']} and run.epochs={run['epochs']} both give the length of the run; leave one out"
        )
    other_key = "steps" if lengths[0] == "epochs" else "epochs"
    message = f"run.{lengths[0]}={run[lengths[0]]} replaces run.{other_key}={run[other_key]} of the recipe"
    run[other_key] = MAX_STEPS if other_key == "steps" else 0
    return [message]


VOCAB_MULTIPLE = 64
"""The vocabulary is rounded up to a multiple of this: efficient for kernels, and equal under every mapping."""


def infer_vocab_size(model: ModelConfig, data: DataConfig, explicit_keys: frozenset[str]) -> tuple[ModelConfig, str]:
    """Take model.vocab_size from data.tokenizer if no recipe or override sets it.

    The size is the tokenizer's or the default, whichever is larger, rounded up to a multiple of 64. A preset's size
    stays if it holds the tokenizer's ids. The tokenizer "bytes" and data without text keep the default.

    Args:
        model, data: sections of a valid recipe.
        explicit_keys: the keys that the recipe and the overrides set, as "section.key".

    Returns:
        The section [model], and a message on the change, or "" if there is none.

    Raises:
        ConfigError: the tokenizer.json is missing or broken.
    """
    if data.tokenizer in ("", "bytes") or data.kind == "synthetic" or "model.vocab_size" in explicit_keys:
        return model, ""
    from moefold.config.presets import load_preset

    preset_size = load_preset(model.preset).get("vocab_size") if model.preset else None
    # Lazy import: the tokenizers package is not needed if a recipe sets the size.
    from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer

    try:
        num_ids = JsonTokenizer(existing_path("data.tokenizer", data.tokenizer)).vocab_size
    except ConfigError as error:
        if preset_size is not None:
            # The size does not depend on the tokenizer, which may be on another machine. Training reports this.
            return model, ""
        raise ConfigError(f"{error}; model.vocab_size is not set, so its size is read from the tokenizer") from error
    if preset_size is not None and num_ids <= preset_size:
        return model, ""
    size = math.ceil(max(num_ids, default_of("model", "vocab_size")) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if size == model.vocab_size:
        return model, ""
    message = (
        f"model.vocab_size is {size}: data.tokenizer={data.tokenizer!r} has {num_ids} ids, rounded up to a multiple "
        f"of {VOCAB_MULTIPLE}"
    )
    return replace(model, vocab_size=size), message


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply the overrides in order, fill in the preset and validate.

    `check_config` checks keys against each other. Only explicit settings without effect are refused here, because the
    config does not record which keys were set explicitly.

    Args:
        path: a TOML file. None means the defaults.
        overrides: strings `section.key=value`. The value is TOML, and text needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or a section, key, type, choice or preset is wrong. All such errors of
            a readable file are listed, one per line. Or model.vocab_size is left out, and the tokenizer that defines
            it is missing or broken.
    """
    return load_recipe(path, overrides).cfg


RESOLVED_KEYS = frozenset({LR_KEY, "train.loss_chunk"})
"""Keys whose defaults depend on other keys or on the version: a run keeps the resolved values."""


class LoadedRecipe(NamedTuple):
    """Loaded recipe, with the explicitly set keys and the messages on adapted settings."""

    cfg: Config
    explicit_keys: frozenset[str]
    """Keys that the recipe and the overrides set, as "section.key"."""
    messages: tuple[str, ...]
    """Messages on adapted settings."""
    left_out: frozenset[str] = frozenset()
    """Keys of RESOLVED_KEYS that are not set by the recipe or an override."""


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe and apply the overrides. Also return the keys that were set, and messages on adapted settings.

    Arguments and errors are as for `load_config`.
    """
    folder = Path() if path is None else Path(path).parent
    tree = {} if path is None else read_recipe(Path(path))
    is_empty = path is not None and not any(tree.values())
    messages = [f"recipe {str(path)!r} sets no key, so the defaults apply; `moefold init` writes a recipe"] * is_empty
    if tree.get("parallel") == AUTO_MAPPING:
        tree["parallel"] = {"mapping": AUTO_MAPPING}
    resolve_paths(tree, folder)
    import_part_files(tree, folder)
    recipe = deepcopy(tree)
    messages += apply_overrides(tree, overrides, folder)
    import_part_files(tree, folder)
    messages += shorten_lr_schedule(tree, recipe, overrides)
    explicit_keys = frozenset(_names_of_keys(tree))
    messages += choose_length(tree, recipe, overrides)
    cfg = config_from_dict(tree)
    check_unused_keys(explicit_keys, cfg)
    model, message = infer_vocab_size(cfg.model, cfg.data, explicit_keys)
    notices = (*messages, message) if message else tuple(messages)
    return LoadedRecipe(replace(cfg, model=model), explicit_keys, notices, RESOLVED_KEYS - explicit_keys)


def _names_of_keys(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of sections and of their tables by their paths, such as "model.ffn.moe.top_k"."""
    for section, keys in tree.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            yield f"{section}.{key}"
            if isinstance(value, dict):
                yield from (f"{section}.{name}" for name in _names_of_keys({key: value}))
