"""A recipe that is started for fewer steps than it was written for: its warm-up and decay shrink with the run.

The rows of the embedding where no recipe says how many: those that the tokenizer of the data needs.

`parallel.elastic`: the recipe follows the number of ranks that a launcher started.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

from moefold.bounded_read import MAX_RECIPE_BYTES, parse_toml, read_text
from moefold.config.load import AUTO, Tree, apply_overrides, config_from_dict
from moefold.config.presets import load_preset, resolve_recipe_paths, shipped_files
from moefold.config.schema import Config
from moefold.config.suggestions import closest_match, default_of, nearest_numbers
from moefold.errors import ConfigError
from moefold.topology.layout import divisors
from moefold.validate.config import check_config
from moefold.validate.unused import check_unused_keys

STEP_COUNT_KEYS = ("warmup_steps", "decay_steps")
"""Keys of [train] that count steps and must fit into run.steps."""


def shorten_lr_schedule(tree: Mapping[str, Any], recipe: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Shrink warm-up and decay in proportion where run.steps of the command line leaves no room for the recipe's.

    They stay as they are where they fit, and where the command line sets one of them, which is refused if it does not.

    Args:
        tree: the sections of the recipe with the overrides in them; its [train] is changed.
        recipe: the sections of the recipe alone.
        overrides: the overrides.

    Returns:
        What was changed, in words.
    """
    typed = {word.partition("=")[0].strip() for word in overrides}
    if "run.steps" not in typed or typed & {f"train.{key}" for key in STEP_COUNT_KEYS}:
        return []
    steps, planned = _int_or_zero(tree, "run", "steps"), _int_or_zero(recipe, "run", "steps")
    given = {key: _int_or_zero(recipe, "train", key) for key in STEP_COUNT_KEYS}
    wanted = given["warmup_steps"] + given["decay_steps"]
    if not 0 < steps < wanted <= planned:
        return []
    notes = []
    for key, count in given.items():
        if count > 0:
            shorter = count * steps // planned
            tree["train"][key] = shorter
            notes.append(
                f"train.{key} is {shorter} instead of {count}: run.steps={steps} instead of the {planned} of the recipe"
            )
    return notes


def _int_or_zero(tree: Mapping[str, Any], section: str, key: str) -> int:
    """An integer of a tree that nothing has checked yet, or its default; 0 for anything else."""
    keys = tree.get(section, {})
    value = keys.get(key, default_of(section, key)) if isinstance(keys, dict) else 0
    return value if type(value) is int else 0


VOCAB_MULTIPLE = 64
"""The rows are a multiple of this, which tensor parallelism of any usual degree divides, and which kernels like."""


def infer_vocab_size(cfg: Config, explicit_keys: frozenset[str]) -> tuple[Config, str]:
    """Take model.vocab_size from data.tokenizer where neither the recipe, an override nor a preset gives it.

    The size is that of the tokenizer or the default, whichever is larger, rounded up to a multiple of 64 and of
    parallel.tp. The tokenizer "bytes" and data without text keep the default.

    Args:
        cfg: a valid recipe.
        explicit_keys: the keys that the recipe and the overrides set, as "section.key".

    Returns:
        The recipe, and what was changed in words; empty if nothing was.

    Raises:
        ConfigError: the tokenizer.json is missing or broken.
    """
    data, model = cfg.data, cfg.model
    if data.tokenizer in ("", "bytes") or data.kind == "synthetic" or "model.vocab_size" in explicit_keys:
        return cfg, ""
    if model.preset and "vocab_size" in load_preset(model.preset):
        return cfg, ""
    # The tokenizers package is not needed where a recipe gives the size.
    from moefold.data.input_paths import existing_path
    from moefold.data.tokenizer import JsonTokenizer

    try:
        num_ids = JsonTokenizer(existing_path("data.tokenizer", data.tokenizer)).vocab_size
    except ConfigError as error:
        raise ConfigError(f"{error}; model.vocab_size is not set, so its size is read from the tokenizer") from error
    multiple = math.lcm(VOCAB_MULTIPLE, max(1, cfg.parallel.tp))
    size = math.ceil(max(num_ids, default_of("model", "vocab_size")) / multiple) * multiple
    if size == model.vocab_size:
        return cfg, ""
    note = (
        f"model.vocab_size is {size}: data.tokenizer={data.tokenizer!r} has {num_ids} ids, rounded up to a multiple "
        f"of {multiple}"
    )
    return replace(cfg, model=replace(model, vocab_size=size)), note


def with_world_size(cfg: Config, world_size: int) -> Config:
    """The recipe on another number of ranks: dp and edp follow, every other degree and the global batch stay.

    Raises:
        ConfigError: the recipe does not fit that number; the message has those that it fits.
    """
    changed = _replace_world_size(cfg, world_size)
    try:
        check_config(changed)
    except ConfigError as error:
        p = cfg.parallel
        fitting = fitting_world_sizes(cfg)
        if not fitting:
            raise
        raise ConfigError(
            f"parallel.elastic=true: the launcher started {world_size} processes, and the recipe with tp={p.tp}, "
            f"cp={p.cp}, pp={p.pp}, ep={p.ep}, etp={p.etp} and train.global_batch_size={cfg.train.global_batch_size} "
            f"fits {nearest_numbers(world_size, fitting)}: {error}"
        ) from None
    return changed


def fitting_world_sizes(cfg: Config) -> list[int]:
    """All numbers of ranks that the recipe fits, ascending."""
    p, train = cfg.parallel, cfg.train
    dense = p.tp * p.cp * p.pp
    replicas = divisors(max(1, train.global_batch_size // train.micro_batch_size))
    candidates = [dense * dp for dp in replicas if dense * dp % lcm(dense, p.ep * p.etp * p.pp) == 0]
    return [number for number in candidates if _is_valid(_replace_world_size(cfg, number))]


def _replace_world_size(cfg: Config, world_size: int) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world_size))


def _is_valid(cfg: Config) -> bool:
    try:
        check_config(cfg)
    except ConfigError:
        return False
    return True


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply the overrides in order, fill in the preset and validate.

    What the keys mean to each other is the matter of `check_config`; only settings that were given and cannot have an
    effect are refused here, because the finished config no longer tells what was given.

    Args:
        path: a TOML file; None starts from the defaults.
        overrides: words of the form `section.key=value`. The value is TOML, and text needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or a section, key, type, choice or preset is wrong. All such faults of
            a readable file are listed, one a line. Or model.vocab_size is left out, and the tokenizer that it is
            taken from is missing or broken.
    """
    return load_recipe(path, overrides).cfg


class LoadedRecipe(NamedTuple):
    """A recipe, and what was said to make it so."""

    cfg: Config
    explicit_keys: frozenset[str]
    """The keys that the recipe and the overrides set, as "section.key"."""
    messages: tuple[str, ...]
    """What was changed so that the two go together, in words."""


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe as `load_config` does, and tell which keys were given and what was adapted.

    Raises:
        ConfigError: as `load_config`.
    """
    tree = read_recipe(path) if path is not None else {}
    if tree.get("parallel") == AUTO:
        tree["parallel"] = {"mapping": AUTO}
    if path is not None:
        resolve_recipe_paths(tree, path.parent)
    recipe = deepcopy(tree)
    apply_overrides(tree, overrides)
    notes = shorten_lr_schedule(tree, recipe, overrides)
    given = frozenset(f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) for key in keys)
    cfg = config_from_dict(tree)
    check_unused_keys(given, cfg)
    cfg, note = infer_vocab_size(cfg, given)
    return LoadedRecipe(cfg, given, (*notes, note) if note else tuple(notes))


def read_recipe(path: Path) -> Tree:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, not text or not TOML.
    """
    try:
        return parse_toml(read_text(path, MAX_RECIPE_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"recipe {str(path)!r} does not exist{_nearest_recipe(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"recipe {str(path)!r} is a folder; name a TOML file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {str(path)!r} is not text in UTF-8; a recipe is a TOML file") from None
    except OSError as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from None


def _nearest_recipe(path: Path) -> str:
    folders = [path.parent, path.parent / "recipes"] if path.parent.is_dir() else [Path("."), Path("recipes")]
    found = [file for folder in folders for file in sorted(folder.glob("*.toml")) if file.name != "pyproject.toml"]
    by_stem = {file.stem: file for file in reversed(found)}
    guess = closest_match(path.name.removesuffix(".toml"), by_stem)
    if guess:
        return f"; did you mean {str(by_stem[guess])!r}?"
    if path.stem in shipped_files():
        return f"; `moefold init {path.stem}` writes it, or name another"
    if by_stem:
        return "; recipes near it: " + ", ".join(sorted(str(file) for file in by_stem.values())[:8])
    return ""
