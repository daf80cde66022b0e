"""Models of tests."""

from collections.abc import Mapping
from typing import Any

import moefold.config.edit
from moefold.config.base.layer_words import parse_layers, repeat_layers, spell_layers
from moefold.config.keys.paths import default_of, kind_settings
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.tables.tree import nested


def joined_layers(settings: Mapping[str, Any], layers: int | str = ModelConfig.layers) -> dict[str, Any]:
    """Return settings of a model with `layers` in place of columns such as "layers.ffn", whose words are repeated.

    Cases are combined from dicts: one may set the attention of the layers and another one their experts.

    Args:
        settings: settings by "key" and "key.setting"; `layers` is a number, or the words of each layer.
        layers: the layers that a number or a column changes.
    """
    columns = {key: str(words) for key, words in settings.items() if key.startswith("layers.")}
    given = settings.get("layers", layers)
    if not columns and not isinstance(settings.get("layers"), int):
        return dict(settings)
    rows = repeat_layers(parse_layers(layers), given) if isinstance(given, int) else parse_layers(given)
    for key, words in columns.items():
        column, found = key.removeprefix("layers."), parse_layers(words)
        assert len(found) <= len(rows), f"{key}={words!r} has more than {len(rows)} layers"
        rows = tuple(row._replace(**{column: getattr(found[i % len(found)], column)}) for i, row in enumerate(rows))
    return {key: value for key, value in settings.items() if key not in columns} | {"layers": spell_layers(rows)}


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model with settings by "key" and "key.setting", and the defaults of the others.

    Settings that the chosen kinds do not have are left out: one dict has the sizes of models of several kinds.
    """
    [tree] = nested({"model": _read_settings(joined_layers(settings))}).values()
    return config_from_dict({"model": _read("model", tree)}).model


def config_of(tree: Mapping[str, Any]) -> Config:
    """Return a config of a tree, whose section [model] is as of `model_of`."""
    model = nested({"model": _read_settings(joined_layers(tree.get("model", {})))})["model"]
    return config_from_dict({**tree, "model": _read("model", model)})


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the settings of a table that is "none"."""
    off = tuple(f"{name}." for name, value in settings.items() if value == "none")
    return {name: value for name, value in settings.items() if not name.startswith(off)} if off else dict(settings)


def edit_model(model: ModelConfig, settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model with other settings, see `moefold.config.edit`. Columns change its layers."""
    found = joined_layers(settings, model.layers)
    if isinstance(found.get("layers"), int):
        # There, a number keeps the kinds that the layers have.
        found["layers"] = f"{found['layers']} moe"
    return moefold.config.edit.edit_model(model, found)


def _read(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    section, _, key = path.partition(".")
    default = default_of(section, key) if key else None
    kind = table.get("kind", getattr(default, "kind", "lightning" if key.endswith("indexer") else ""))
    found = {}
    for name, value in table.items():
        kinds = kind_settings().get(f"{path}.{name}", ())
        if not kinds or kind in kinds:
            found[name] = _read(f"{path}.{name}", value) if isinstance(value, dict) else value
    return found
