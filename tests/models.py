"""Models of tests."""

from collections.abc import Mapping
from typing import Any

import moefold.config.edit
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.suggestions import default_of, kind_settings
from moefold.config.tree import nested
from moefold.config.upgrade import upgraded


def layers_in_words(settings: Mapping[str, Any], layers: int | str = ModelConfig.layers) -> dict[str, Any]:
    """Return settings of a model with `layers` in place of patterns of format 1, such as `layer_pattern`.

    Cases are combined from dicts: one may set the attention of the layers and another one their experts.

    Args:
        settings: settings by "key" and "key.setting".
        layers: the layers that the patterns change.
    """
    keys = {
        key: value for key, value in settings.items() if key.endswith("_pattern") or key in ("num_layers", "layers")
    }
    if keys.keys() <= {"layers"}:
        return dict(settings)
    others = {key: value for key, value in settings.items() if key not in keys}
    return others | upgraded({"model": {"layers": layers} | keys})[0]["model"]


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model with settings by "key" and "key.setting", and the defaults of the others.

    Settings that the chosen kinds do not have are left out: one dict has the sizes of models of several kinds.
    """
    [tree] = nested({"model": _read_settings(layers_in_words(settings))}).values()
    return config_from_dict({"model": _read("model", tree)}).model


def config_of(tree: Mapping[str, Any]) -> Config:
    """Return a config of a tree, whose section [model] is as of `model_of`."""
    model = nested({"model": _read_settings(layers_in_words(tree.get("model", {})))})["model"]
    return config_from_dict({**tree, "model": _read("model", model)})


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the settings of a table that is "none"."""
    off = tuple(f"{name}." for name, value in settings.items() if value == "none")
    return {name: value for name, value in settings.items() if not name.startswith(off)} if off else dict(settings)


def edit_model(model: ModelConfig, settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model with other settings, see `moefold.config.edit`; patterns change its layers."""
    found = layers_in_words(settings, model.layers)
    if isinstance(found.get("layers"), int) and "layers" not in settings:
        # Only a number keeps the kinds that the layers have.
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
