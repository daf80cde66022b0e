"""Model presets: TOML files of [model] keys in `presets/`."""

import tomllib
from typing import Any

from moefold.errors import ConfigError
from moefold.message_text import closest_match
from moefold.package_table import package_text, table_names


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return table_names("config/presets")


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


def _read(name: str) -> str:
    return package_text(f"config/presets/{name}.toml")
