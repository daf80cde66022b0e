"""Models of tests."""

from collections.abc import Mapping
from typing import Any

from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.suggestions import default_of, kind_settings
from moefold.config.tree import nested


def model_of(settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model with settings by "key" and "key.setting", and the defaults of the others.

    Settings that the chosen kinds do not have are left out: one dict has the sizes of models of several kinds.
    """
    [tree] = nested({"model": dict(settings)}).values()
    return config_from_dict({"model": _read("model", tree)}).model


def config_of(tree: Mapping[str, Any]) -> Config:
    """Return a config of a tree, whose section [model] is as of `model_of`."""
    return config_from_dict({**tree, "model": _read("model", nested({"model": tree.get("model", {})})["model"])})


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
