"""Recipe loading: read TOML, apply overrides, adapt to shorter runs, infer vocab_size, follow an elastic launcher."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from math import lcm
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from moefold.bounded_read import MAX_RECIPE_BYTES, parse_toml, read_text
from moefold.config.base.limits import MAX_NUMBER, MAX_STEPS, check_format
from moefold.config.keys.learning_rates import LR_KEY
from moefold.config.keys.paths import default_of
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.overrides import AUTO_MAPPING, apply_overrides
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.tables.part_class import import_part_files
from moefold.config.tables.tree import Tree
from moefold.data.input_paths import existing_path
from moefold.errors import ConfigError
from moefold.message_text import closest_match, nearest_numbers
from moefold.validate.config import check_config, is_legal
from moefold.validate.unused import check_unused_keys

STEP_COUNT_KEYS = ("train.warmup_steps", "train.lr_schedule.decay_steps")
"""Keys that count steps and must fit into run.steps together."""
PATH_KEYS = (
    ("data", "path"),
    ("data", "tokenizer"),
    ("data", "chat_template"),
    ("parallel", "schedule"),
    ("checkpoint", "init_from"),
    ("checkpoint", "upcycle"),
    ("lora", "init_from"),
    ("moe", "replay"),
    ("rl", "reference"),
    ("sites", "secret"),
)
"""Recipe keys that name an input file or folder, by themselves or by `path` or `dense` of their table."""


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


NEAR_WORLD_SIZES = 8
"""Limit of the world sizes in messages, as a multiple of the available ranks."""


def with_world_size(cfg: Config, world_size: int) -> Config:
    """Return the recipe for another number of ranks: dp and edp change, other degrees and global batch stay.

    Raises:
        ConfigError: the recipe does not fit that number. The message names numbers that fit.
    """
    changed = _replace_world_size(cfg, world_size)
    try:
        check_config(changed)
    except ConfigError as error:
        p = cfg.parallel
        fitting = fitting_world_sizes(cfg, largest=NEAR_WORLD_SIZES * world_size)
        if not fitting:
            raise
        raise ConfigError(
            f"parallel.elastic=true: the launcher started {world_size} processes, and the recipe with tp={p.tp}, "
            f"cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and train.global_batch_size={cfg.train.global_batch_size} "
            f"fits {nearest_numbers(world_size, fitting)}: {error}"
        ) from None
    return changed


def fitting_world_sizes(cfg: Config, largest: int | None = None) -> list[int]:
    """Return the world sizes that the recipe fits, ascending.

    All degrees except dp and edp are fixed, so that a world size is a multiple of tp*cp*pp and of ep*etp*pp. The number
    of micro-batches of the global batch must be a multiple of dp, unless `ParallelConfig.may_pad_batch`.

    Args:
        largest: largest world size to consider, or None if there is no limit.
    """
    p = cfg.parallel
    count = max(1, cfg.train.global_batch_size // cfg.train.micro_batch_size)
    dense = p.tp * p.cp * p.pp
    multiple = lcm(dense, p.ep * p.etp * p.pp)
    limit = count * dense if largest is None else min(largest, count * dense)
    return [
        number
        for number in range(multiple, limit + 1, multiple)
        if (cfg.parallel.may_pad_batch or count % (number // dense) == 0) and is_legal(_replace_world_size(cfg, number))
    ]


def without_lost_ranks(cfg: Config, world_size: int) -> Config:
    """Return the recipe for the remaining ranks. The last of them may have padding, as in elastic jobs.

    The rules on `faults.on_loss` apply to the start of a job, so its keys have their defaults.
    """
    parallel = replace(cfg.parallel, world_size=world_size, elastic=True)
    changed = replace(cfg, parallel=parallel, faults=replace(cfg.faults, on_loss="stop", min_ranks=1))
    if changed.parallel.dp > 1:
        return changed
    # A single replica has no peers.
    return replace(changed, checkpoint=replace(changed.checkpoint, peer_every=0))


def world_sizes_after_rank_loss(cfg: Config) -> list[int]:
    """Return the numbers of ranks that can continue a job which has lost ranks, ascending. See faults.on_loss."""
    limit = cfg.parallel.world_size - 1
    sizes = fitting_world_sizes(without_lost_ranks(cfg, cfg.parallel.world_size), largest=limit)
    return [size for size in sizes if size >= cfg.faults.min_ranks]


def _replace_world_size(cfg: Config, world_size: int) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world_size))


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
    path = None if path is None else Path(path)
    tree = read_recipe(path) if path is not None else {}
    if tree.get("parallel") == AUTO_MAPPING:
        tree["parallel"] = {"mapping": AUTO_MAPPING}
    if path is not None:
        _resolve_paths(tree, path.parent)
        import_part_files(tree, path.parent)
    recipe = deepcopy(tree)
    folder = Path() if path is None else path.parent
    messages = []
    if path is not None and not any(tree.values()):
        messages.append(f"recipe {str(path)!r} sets no key, so the defaults apply; `moefold init` writes a recipe")
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


def _resolve_paths(tree: dict[str, object], folder: Path) -> None:
    """Resolve the paths of a recipe that exist relative to the recipe's folder, in place.

    Other paths stay relative to the current folder.

    Args:
        tree: the sections of the recipe, unchecked.
    """
    for section, key in PATH_KEYS:
        keys = tree.get(section)
        if isinstance(keys, dict) and key in keys:
            value = keys[key]
            if isinstance(value, list):
                keys[key] = [_resolve_path(path, folder) for path in value]
            elif isinstance(value, dict):
                paths = {name: _resolve_path(value[name], folder) for name in ("path", "dense") if name in value}
                keys[key] = value | paths
            else:
                keys[key] = _resolve_path(value, folder)


def _resolve_path(path: object, folder: Path) -> object:
    if not isinstance(path, str) or not path or "\0" in path:
        return path
    target = folder / path
    try:
        return str(target) if target.exists() else path
    except OSError:
        return path


def read_recipe(path: Path) -> Tree:
    """Parse a TOML file.

    Returns:
        The sections of the recipe.

    Raises:
        ConfigError: the file is missing, unreadable, not text or not TOML, or its format is newer.
    """
    try:
        tree = parse_toml(read_text(path, MAX_RECIPE_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"recipe {str(path)!r} does not exist{_nearest_recipe(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"recipe {str(path)!r} is a folder; name a TOML file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {str(path)!r} is not text in UTF-8; a recipe is a TOML file") from None
    except OSError as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        hint = _overwrite_advice(path, str(error)) if "overwrite" in str(error) else ""
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}{hint}") from None
    return check_format(tree, f"recipe {str(path)!r}")


def _overwrite_advice(path: Path, error: str) -> str:
    """Return the way out where a key has two values: it is set twice, or it is a kind and a table."""
    number = re.search(r"at line (\d+)", error)
    # Without a number, the error is at the end of the document. A line may be the last of a value of several lines.
    lines = read_text(path, MAX_RECIPE_BYTES).splitlines()[: int(number[1]) if number else None]
    keys: list[str] = []
    for line in lines:
        if line.lstrip().startswith("[") and "=" not in line:
            keys = []
        elif match := re.match(r"\s*([\w.-]+)\s*=", line):
            keys.append(match[1])
    if keys and keys[-1] in keys[:-1]:
        return f": {keys[-1]} is set twice; remove one"
    return '; the kind of a table stands in the table: kind = "mla"'


def _nearest_recipe(path: Path) -> str:
    from moefold.config.shipped_recipes import shipped_files

    folders = [path.parent, path.parent / "recipes"] if path.parent.is_dir() else [Path("."), Path("recipes")]
    files = [file for folder in folders for file in sorted(folder.glob("*.toml")) if file.name != "pyproject.toml"]
    by_stem = {file.stem: file for file in reversed(files)}
    guess = closest_match(path.name.removesuffix(".toml"), by_stem)
    if guess:
        return f"; did you mean {str(by_stem[guess])!r}?"
    shipped = next((name for name in shipped_files() if name.rpartition("/")[2] == path.stem), None)
    if shipped is not None:
        return f"; `moefold init {shipped}` writes it, or name another"
    if by_stem:
        return "; recipes near it: " + ", ".join(sorted(str(file) for file in by_stem.values())[:8])
    return ""
