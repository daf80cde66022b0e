"""Named model shapes. They are data: one TOML file of [model] keys each, in `presets/` beside this file.

The recipes that come with moefold: in a checkout the folder recipes/, in an installed package a copy of it.
"""

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from moefold.config.suggestions import closest_match
from moefold.errors import ConfigError


def preset_names() -> tuple[str, ...]:
    """All presets, by name."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")))


def load_preset(name: str) -> dict[str, Any]:
    """The [model] keys of a preset.

    Raises:
        ConfigError: there is no preset of this name.
    """
    if name not in preset_names():
        guess = closest_match(name, preset_names(), cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        raise ConfigError(f"model.preset={name!r} is unknown; {hint} presets are {', '.join(preset_names())}")
    return tomllib.loads(_read(name))


def preset_summary(name: str) -> str:
    """What a preset is, in one line: the first comment of its file."""
    return _read(name).splitlines()[0].removeprefix("#").strip()


def _folder() -> Traversable:
    return files("moefold.config") / "presets"


def _read(name: str) -> str:
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


EXTRA_FILES = {"sft": ("conversations.jsonl",)}
"""Files that a recipe reads, by its name."""
TEMPLATES = {"slurm": "slurm.sbatch"}
"""Files that are no recipes, by name."""
PATH_KEYS = (
    ("data", "path"),
    ("data", "tokenizer"),
    ("data", "chat_template"),
    ("parallel", "schedule_csv"),
    ("checkpoint", "init_from"),
    ("model", "upcycle_from"),
    ("moe", "replay"),
)
"""Keys of a recipe that name a file or folder to read."""


def shipped_folder() -> Path:
    """Return the folder of the recipes that come with this installation."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def shipped_files() -> dict[str, tuple[Path, ...]]:
    """Return the files of each recipe or template by its name; the first is the one to use."""
    folder = shipped_folder()
    files = {
        path.stem: (path, *(folder / more for more in EXTRA_FILES.get(path.stem, ()))) for path in folder.glob("*.toml")
    }
    files |= {name: (folder / file,) for name, file in TEMPLATES.items() if (folder / file).is_file()}
    return dict(sorted(files.items()))


def resolve_recipe_paths(tree: dict[str, object], folder: Path) -> None:
    """Turn the paths of a recipe that exist relative to its own folder into paths of these files, in place.

    What does not exist there is left as it is, relative to the current folder.

    Args:
        tree: the sections of the recipe, unchecked.
        folder: where the recipe is.
    """
    for section, key in PATH_KEYS:
        keys = tree.get(section)
        if isinstance(keys, dict) and key in keys:
            value = keys[key]
            keys[key] = (
                [_resolve_path(path, folder) for path in value]
                if isinstance(value, list)
                else _resolve_path(value, folder)
            )


def _resolve_path(path: object, folder: Path) -> object:
    if not isinstance(path, str) or not path or "\0" in path:
        return path
    found = folder / path
    try:
        return str(found) if found.exists() else path
    except OSError:
        return path
