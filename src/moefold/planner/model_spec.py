"""Model spec: the distinct layers of a model and their order, as the planner prices them.

The parts of a layer know its weights and its work. This module also finds a model by its name: a preset, a config.json,
or a model without a preset (`models.toml`).
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from moefold.bounded_read import check_regular_file
from moefold.config.layers import Layer
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.presets import preset_names
from moefold.cost.flops import TRAIN_TO_FORWARD, layer_flops, train_flops_per_token
from moefold.errors import ConfigError
from moefold.hub import CONFIG_PATTERNS, download_advice, is_hub_url, snapshot
from moefold.message_text import closest_match
from moefold.package_table import package_table
from moefold.recipe import load_config

TABLE = "planner/models.toml"


@dataclass(frozen=True)
class ModelSpec:
    """Model with a name, and its layers grouped by their cost."""

    name: str
    config: ModelConfig
    is_trainable: bool = True
    """False for a model of a published measurement with layers that the runtime does not have."""

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The distinct layers, with MTP (multi-token prediction) layers. RoPE makes no difference."""
        return tuple(dict.fromkeys(map(_without_rope, self.config.all_layers)))

    @property
    def layers(self) -> tuple[int, ...]:
        """The kind of each layer in order, an index into `kinds`."""
        return self.all_layers[: self.config.num_layers]

    @cached_property
    def all_layers(self) -> tuple[int, ...]:
        """`layers`, then the kinds of the MTP layers."""
        numbers = {kind: i for i, kind in enumerate(self.kinds)}
        return tuple(numbers[_without_rope(layer)] for layer in self.config.all_layers)


@lru_cache(maxsize=64)
def model_spec_from_config(model: ModelConfig) -> ModelSpec:
    """Build the spec of the model of a recipe."""
    return ModelSpec(model.preset or "model", model)


def _without_rope(layer: Layer) -> Layer:
    return layer if layer.attention.has_rope else replace(layer, attention=replace(layer.attention, has_rope=True))


def train_flops(model_spec: ModelSpec, seq_len: int, *, causal: bool, router: bool = True, mtp: bool = True) -> float:
    """Return the training FLOPs for one token, with or without the router and MTP, which some sources leave out."""
    model = model_spec.config if mtp else replace(model_spec.config, mtp_layers=0)
    total = train_flops_per_token(model, seq_len, causal=causal).total
    routers = 0 if router else sum(layer_flops(model, layer, seq_len).router for layer in model.all_layers)
    return float(total - TRAIN_TO_FORWARD * routers)


@lru_cache(maxsize=1024)
def layer_parameters(layer: Layer) -> tuple[int, int]:
    """Return the parameters of one layer outside its routed experts, and in them, as matrices and norms."""
    matrices = [weight for weight in layer.params if weight.is_matrix]
    experts = sum(weight.numel for weight in matrices if weight.is_expert)
    return sum(weight.numel for weight in matrices) - experts + 2 * layer.hidden_size, experts


_PARENTHESES = re.compile(r"\(.*?\)")


@lru_cache(maxsize=64)
def load_model_spec(name: str) -> ModelSpec:
    """Load the spec of a preset, a recipe, a Hugging Face config.json (or its folder), or another known model.

    Raises:
        ConfigError: it is none of these.
    """
    # Lazy imports: the families of Hugging Face take longer to import than a preset needs.
    if is_hub_url(name) or Path(name).name == "config.json" or Path(name).is_dir():
        from moefold.convert.families.hf_config import read_model_config
        from moefold.convert.families.known_keys import ALL_KEYS
    if is_hub_url(name):
        return model_spec_from_config(read_model_config(snapshot(name, "model", patterns=CONFIG_PATTERNS), ALL_KEYS))
    path = Path(name)
    if path.suffix == ".toml":
        return model_spec_from_config(load_config(path).model)
    if path.name == "config.json" or path.is_dir():
        return model_spec_from_config(read_model_config(path.parent if path.name == "config.json" else path, ALL_KEYS))
    known = find_model_name(name)
    if known is None and path.exists():
        try:
            check_regular_file(path)
        except OSError as error:
            raise ConfigError(f"model {name!r} cannot be read: {error.strerror}") from None
        raise ConfigError(
            f"model {name!r} is a file and neither a recipe ending in .toml nor a config.json; give it one of these "
            "names if it is one, or name a preset"
        )
    if known is None:
        names = (*preset_names(), *_other_models())
        guess = closest_match(name.lower(), names, cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        if advice := download_advice(name):
            namesake = find_model_name(name.rpartition("/")[2])
            hint = f"{f'{namesake!r} is known by its name; or, as ' if namesake else ''}{advice}; the"
        raise ConfigError(
            f"model {name!r} is unknown; {hint} models are {', '.join(sorted(names))}; "
            "or name a recipe.toml, or a folder with a config.json"
        )
    if known in preset_names():
        return ModelSpec(known, load_config(None, [f"model.preset={known}"]).model)
    return ModelSpec(known, config_from_dict({"model": _other_models()[known]}).model)


def _other_models() -> dict[str, Any]:
    """Return the keys of [model] of the models without a preset."""
    return {name: keys for name, keys in package_table(TABLE).items() if name != "synonyms"}


@lru_cache(maxsize=512)
def find_model_name(name: str) -> str | None:
    """Return the model that a spelling means ("Qwen3_30B_a3B (tokendrop)" is qwen3-30b-a3b), or None."""
    if name in preset_names():
        return name
    names = {other: known for known, others in package_table(TABLE)["synonyms"].items() for other in others}
    names |= {normalise_name(known): known for known in (*preset_names(), *_other_models())}
    return names.get(normalise_name(name))


def normalise_name(name: str) -> str:
    """Return the lower-case letters and digits of a name outside of parentheses."""
    return "".join(char for char in _PARENTHESES.sub("", name).lower() if char.isalnum())
