"""Change settings of a config by their names. Torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.config.load import config_from_dict
from moefold.config.part import Part
from moefold.config.part_table import checked_settings, settings_of_other_kind
from moefold.config.schema import Config
from moefold.config.suggestions import part_marks
from moefold.errors import raise_all

FILLING_KEYS = ("model.preset", "sites.method")
"""Keys that fill others while a recipe is read."""


def edit(cfg: Config, settings: Mapping[str, Any]) -> Config:
    """Return a config with other values, checked as the values of a recipe are.

    Another kind of a part keeps the settings that it has too. `check_config` checks the result.

    Args:
        cfg: a config.
        settings: values by "section.key", and of a part also by "section.key.setting"; kinds come before settings.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type, or a key fills others, such as model.preset.
    """
    raise_all(
        f"edit: {name} fills other keys while a recipe is read; name it in load_recipe"
        for name in FILLING_KEYS
        if name in settings
    )
    for name, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        section, _, key = name.partition(".")
        key, dot, setting = key.partition(".")
        owner = f"{section}.{key}"
        if dot and owner in part_marks() and isinstance(part := getattr(getattr(cfg, section), key), Part):
            found: Any = replace(part, **checked_settings(owner, part.kind, type(part), {setting: value}))
        else:
            given = config_from_dict({section: {f"{key}{dot}{setting}": _plain(value)}})
            found = value if isinstance(value, Part) else getattr(getattr(given, section), key)
            before = getattr(getattr(cfg, section), key)
            if isinstance(value, str) and isinstance(before, Part) and isinstance(found, Part):
                kept, _ = settings_of_other_kind(owner, before.as_table(), value)
                found = replace(found, **{name: getattr(before, name) for name in kept})
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{key: found})})
    return cfg


def _plain(value: Any) -> Any:
    """Return a value as a recipe has it: lists instead of tuples, and the kind of a part."""
    if isinstance(value, Part):
        return value.kind
    return list(value) if isinstance(value, tuple) else value
