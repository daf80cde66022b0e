"""Model presets and shipped recipes.

A preset is a TOML file of [model] keys in `presets/`. The shipped recipes are the folder recipes/ of a checkout, or its
copy in an installed package.
"""

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from moefold.errors import ConfigError
from moefold.message_text import closest_match


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")))


def load_preset(name: str) -> dict[str, Any]:
    """Return the [model] keys of a preset; raise ConfigError if there is no preset of this name."""
    if name not in preset_names():
        guess = closest_match(name, preset_names(), cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        raise ConfigError(f"model.preset={name!r} is unknown; {hint} presets are {', '.join(preset_names())}")
    return tomllib.loads(_read(name))


def preset_summary(name: str) -> str:
    """Return the one-line summary of a preset: the first comment of its file."""
    return _read(name).splitlines()[0].removeprefix("#").strip()


def _folder() -> Traversable:
    return files("moefold.config") / "presets"


def _read(name: str) -> str:
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


EXTRA_FILES = {
    "dpo": ("preferences.jsonl",),
    "lora": ("conversations.jsonl",),
    "sft": ("conversations.jsonl",),
    "sort-align": ("plain.jinja",),
}
"""Additional files that a recipe reads, by recipe name."""
TEMPLATES = {"slurm": "slurm.sbatch"}
"""Shipped files other than recipes, by name."""
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


def shipped_folder() -> Path:
    """Return the folder of the shipped recipes."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def shipped_files() -> dict[str, tuple[Path, ...]]:
    """Return the files of each recipe or template by name. The first is the recipe or template itself.

    The name of a recipe is its path in the folder of recipes, without .toml: sft, pretrain/mixtral-8x7b.
    """
    folder = shipped_folder()
    files = dict[str, tuple[Path, ...]]()
    for path in folder.rglob("*.toml"):
        name = path.relative_to(folder).with_suffix("").as_posix()
        files[name] = (path, *(folder / extra for extra in EXTRA_FILES.get(name, ())))
    files |= {name: (folder / file,) for name, file in TEMPLATES.items() if (folder / file).is_file()}
    return dict(sorted(files.items()))


def resolve_recipe_paths(tree: dict[str, object], folder: Path) -> None:
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
