"""Model presets: TOML files of [model] keys in `presets/`."""

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from moefold.errors import ConfigError
from moefold.message_text import closest_match


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")))


def load_preset(name: str) -> dict[str, Any]:
    """Return the [model] keys of a preset, or raise ConfigError if there is no preset of this name."""
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
