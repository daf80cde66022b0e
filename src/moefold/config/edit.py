"""Change settings of a config by their names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.config.base.layer_words import counted_layers
from moefold.config.base.part import Part, Table, as_plain, settings_of
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.tables.build import build_table, checked_settings
from moefold.config.tables.tree import merged
from moefold.errors import raise_all

FILLING_KEYS = ("model.preset", "sites.method")
"""Keys that fill others while a recipe is read."""


def edit(cfg: Config, settings: Mapping[str, Any]) -> Config:
    """Return a config with other values, checked as the values of a recipe are.

    A part of another kind keeps the settings that both kinds have. `check_config` checks the result.

    Args:
        settings: values by "section.key", and of a part also by "section.key.setting". Kinds precede settings. A table
            without another kind keeps the settings that it leaves out.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type, or a key fills others, such as model.preset.
    """
    raise_all(
        f"edit: {name} fills other keys while a recipe is read; name it in load_recipe"
        for name in FILLING_KEYS
        if name in settings
    )
    plain = {name: value for name, value in settings.items() if not isinstance(value, Part | Table)}
    trees: dict[str, dict[str, Any]] = {}
    for name, value in plain.items():
        if name.count(".") == 1:
            section, _, key = name.partition(".")
            before = getattr(getattr(cfg, section, None), key, None)
            value = counted_layers(before, value) if key == "layers" and type(value) is int else value
            value = _completed(name, value, before)
            trees.setdefault(section, {})[key] = list(value) if isinstance(value, tuple) else value
    edited = config_from_dict(trees)
    for name, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        section, *names = name.split(".")
        if len(names) == 1 and name in plain:
            value = getattr(getattr(edited, section), names[0])
        cfg = replace(cfg, **{section: _edited(getattr(cfg, section), section, names, value)})
    return cfg


def edit_model(model: ModelConfig, settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model with other values by "key" and "key.setting", as `edit` does."""
    return edit(Config(model=model), {f"model.{name}": value for name, value in settings.items()}).model


def _edited(owner: Any, path: str, names: list[str], value: Any) -> Any:
    """Return a section, a table or a part with another value."""
    name, *inner = names
    before = getattr(owner, name, None)
    if inner and isinstance(before, Part | Table):
        return replace(owner, **{name: _edited(before, f"{path}.{name}", inner, value)})
    for last in reversed(inner):
        value = {last: value}
    value = _completed(f"{path}.{name}", value, before)
    if not isinstance(owner, Part | Table):
        value = build_table(f"{path}.{name}", value, before) if inner else value
        return replace(owner, **{name: value})
    kind = owner.kind if isinstance(owner, Part) else ""
    part: Any = type(owner)
    table = {key: getattr(owner, key) for key in settings_of(part)}
    return replace(owner, **checked_settings(path, kind, part, {**table, name: value}))


def _completed(path: str, value: Any, before: Any) -> Any:
    """Return a value. A table of the same kind is completed from the value that it changes."""
    kind = before.kind if isinstance(before, Part) else None
    is_change = value.get("kind", kind) == kind if isinstance(value, dict) else kind and isinstance(value, str)
    table = merged(path, as_plain(before), value) if is_change else value
    return value if table == {"kind": value} else table
