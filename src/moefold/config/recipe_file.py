"""File of a recipe: its TOML, and the paths in it."""

import re
from pathlib import Path

from moefold.bounded_read import MAX_RECIPE_BYTES, parse_toml, read_text
from moefold.config.base.limits import check_format
from moefold.config.tables.tree import Tree
from moefold.errors import ConfigError
from moefold.message_text import closest_match

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


def resolve_paths(tree: dict[str, object], folder: Path) -> None:
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
