"""Converters of the kinds of layers in config.json: dense or expert layers, attention windows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from moefold.config.base.layer_words import LayerWords, spell_layers
from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import Renamed, interval_of, is_int, num_layers_of
from moefold.convert.families.known_keys import Json, mark_read, overlay
from moefold.errors import ConfigError


@dataclass(frozen=True)
class SparseLayers:
    """Layers with experts: `mlp_only_layers`, and every `decoder_sparse_step`-th of the other layers."""

    default_dense: tuple[int, ...] = ()
    """Dense layers if config.json lacks the list."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read which layers have experts."""
        count = num_layers_of(hf_config)
        has_step = hf_config.get("decoder_sparse_step") is not None
        step = interval_of(hf_config, "decoder_sparse_step", 1) if has_step else 1
        dense = hf_config.get("mlp_only_layers")
        dense = list(self.default_dense) if dense is None else dense
        if not isinstance(dense, list) or not all(map(is_int, dense)):
            raise ConfigError(f"config.json has mlp_only_layers={dense!r}, which should be a list of whole numbers")
        kinds = ["dense" if i in dense or (i + 1) % step else "moe" for i in range(count)]
        return {"layers.ffn": kinds}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the list of dense layers."""
        dense = [i for i, layer in enumerate(model.decoder_layers) if not layer.ffn.is_routed]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class FirstKDense:
    """`first_k_dense_replace`: number of leading dense layers. All other layers have experts."""

    hf_key: str = "first_k_dense_replace"
    default: int = 0

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read which layers have experts."""
        dense = hf_config.get(self.hf_key, self.default) or 0
        count = num_layers_of(hf_config)
        if not is_int(dense) or not 0 <= dense < count:
            raise ConfigError(f"config.json has {self.hf_key}={dense!r} of num_hidden_layers={count!r}")
        return {"layers.ffn": ["dense"] * dense + ["moe"] * (count - dense)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of leading dense layers."""
        leading = takewhile(lambda layer: not layer.ffn.is_routed, model.decoder_layers)
        return {self.hf_key: len(list(leading))}


@dataclass(frozen=True)
class MlpLayerTypes:
    """`mlp_layer_types`, "dense" or "sparse", or without it `first_k_dense_replace`."""

    default: int

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read which layers have experts."""
        kinds = hf_config.get("mlp_layer_types")
        if kinds is None:
            return FirstKDense(default=self.default).read(hf_config)
        mark_read(hf_config, "first_k_dense_replace")
        return {"layers.ffn": mapped_layer_types(hf_config, "mlp_layer_types", {"dense": "dense", "sparse": "moe"})}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the kind of every layer, and the number of leading dense layers."""
        kinds = ["sparse" if layer.ffn.is_routed else "dense" for layer in model.decoder_layers]
        return FirstKDense().write(model) | {"mlp_layer_types": kinds}


@dataclass(frozen=True)
class ExpertLayerRange:
    """`moe_layer_start_index`, `_end_index` and `_interval` of ERNIE: every n-th layer of a range has experts."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read which layers have experts."""
        count = num_layers_of(hf_config)
        bounds = {}
        for name, default in (("start_index", 1), ("end_index", -1), ("interval", 1)):
            value = hf_config.get(f"moe_layer_{name}", default)
            if not is_int(value) or value < (1 if name == "interval" else -1):
                raise ConfigError(f"config.json has moe_layer_{name}={value!r}, which should be a whole number")
            bounds[name] = value
        last = count - 1 if bounds["end_index"] == -1 else bounds["end_index"]
        layers = [i for i in range(bounds["start_index"], last + 1) if (i + 1) % bounds["interval"] == 0]
        return {"layers.ffn": ["moe" if i in layers else "dense" for i in range(count)]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the range. Other patterns do not read back as the same model."""
        numbers = [i for i, layer in enumerate(model.decoder_layers) if layer.ffn.is_routed]
        start = numbers[0] if numbers else 0
        interval = numbers[1] - start if len(numbers) > 1 else 1
        end = numbers[-1] if numbers else -1
        return {"moe_layer_start_index": start, "moe_layer_end_index": end, "moe_layer_interval": interval}


def mapped_layer_types(hf_config: Json, key: str, words: Mapping[str, str]) -> list[str]:
    """Return the word of each layer in `model.layers` from a list of its kinds."""
    kinds = hf_config.get(key)
    count = num_layers_of(hf_config)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in list(words) for kind in kinds):
        raise ConfigError(f"config.json has {key}={kinds!r}, which moefold does not compute")
    return [words[kind] for kind in kinds]


def attention_types(model: ModelConfig, words: Mapping[str, str]) -> list[str]:
    """Return the kind of every layer by its word. Kinds without a word read back as full attention."""
    names = {word: kind for kind, word in words.items()}
    return [names.get(row.attention, names["full"]) for row in model.layer_words]


DefaultTypes = Callable[[Json, int], list[str]]
"""Returns `layer_types` of a config.json without that key, given the number of layers."""


def alternating_types(hf_config: Json, count: int) -> list[str]:
    """Return alternating window and full attention (gpt-oss)."""
    return [("sliding_attention", "full_attention")[i % 2] for i in range(count)]


def last_layers_slide(hf_config: Json, count: int) -> list[str]:
    """Return window attention from layer `max_window_layers` on (Qwen2, dots.llm1)."""
    first = hf_config.get("max_window_layers", 62)
    if hf_config.get("sliding_window", 0) is None or not is_int(first):
        first = count
    return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]


@dataclass(frozen=True)
class EveryNthFull:
    """Full attention in every n-th layer, another kind in other layers."""

    hf_key: str
    default: int
    others: str = "sliding_attention"

    def __call__(self, hf_config: Json, count: int) -> list[str]:
        """Return the types of all layers."""
        return types_by_interval(count, interval_of(hf_config, self.hf_key, self.default), self.others)


def types_by_interval(count: int, interval: int, others: str) -> list[str]:
    """Return full attention for every n-th layer, another type for other layers."""
    return [others if (i + 1) % interval else "full_attention" for i in range(count)]


@dataclass(frozen=True)
class LayerTypes:
    """`layer_types` of families whose layers differ only in their attention.

    Attributes:
        words: word of each type in `model.layers`.
        default_types: types if config.json lacks the key, or None if the key is required.
    """

    words: Mapping[str, str]
    default_types: DefaultTypes | None = None

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention of the layers."""
        if isinstance(self.default_types, EveryNthFull):
            mark_read(hf_config, self.default_types.hf_key)
        if self.default_types is not None and hf_config.get("layer_types") is None:
            hf_config = overlay(hf_config, {"layer_types": self.default_types(hf_config, num_layers_of(hf_config))})
        return {"layers.attention": mapped_layer_types(hf_config, "layer_types", self.words)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer."""
        return {"layer_types": attention_types(model, self.words)}


LINEAR_LAYERS = LayerTypes(
    {"linear_attention": "linear", "full_attention": "full"},
    EveryNthFull("full_attention_interval", 4, "linear_attention"),
)
"""`layer_types` of hybrid models, or without it full attention in every n-th layer."""
_WINDOWS = {"sliding_attention": "window", "full_attention": "full"}


@dataclass(frozen=True)
class SlidingWindowLayers:
    """`layer_types` and `sliding_window`."""

    default_window: int = 128
    default_types: DefaultTypes = alternating_types
    full_layers: Literal["rope", "nope", "nope with a window"] = "rope"
    """Position embedding of layers with full attention: RoPE, none, or none if sliding_window is not null."""
    words: Mapping[str, str] = field(default_factory=lambda: _WINDOWS)
    """Word of each type in `model.layers`."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention of the layers, the window and which layers have RoPE."""
        mark_read(hf_config, "sliding_window_pattern", "global_attn_every_n_layers", "max_window_layers")
        window = hf_config.get("sliding_window", self.default_window)
        types = hf_config.get("layer_types") or self.default_types(hf_config, num_layers_of(hf_config))
        words = mapped_layer_types(overlay(hf_config, {"layer_types": types}), "layer_types", self.words)
        settings: dict[str, Any] = {"layers.attention": words, "sliding_window": 0}
        if "window" in words:
            settings |= Renamed("sliding_window", "sliding_window").read({"sliding_window": window})
        if self.full_layers == "nope" or (self.full_layers == "nope with a window" and window is not None):
            settings["layers.position"] = ["nope" if word == "full" else "rope" for word in words]
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer."""
        return {"layer_types": attention_types(model, self.words), "sliding_window": model.sliding_window or None}


@dataclass(frozen=True)
class UniformWindow:
    """`sliding_window` of all layers. Null, or a window as long as `max_position_embeddings`, is no limit."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the window."""
        window = hf_config.get("sliding_window")
        longest = hf_config.get("max_position_embeddings")
        if window is None or (is_int(window) and is_int(longest) and window >= longest):
            return {"sliding_window": 0}
        return {"layers.attention": "window", **Renamed("sliding_window", "sliding_window", minimum=1).read(hf_config)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the window. Layers of several kinds do not read back as the same model."""
        return {"sliding_window": model.sliding_window or None}


@dataclass(frozen=True)
class OneLayerType:
    """Optional `layer_types` of families whose layers all have one type."""

    name: str = "full_attention"
    void: tuple[str, ...] = ()
    """Keys of layers of other types."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Refuse layers of another type."""
        mark_read(hf_config, *self.void)
        kinds = hf_config.get("layer_types") or [self.name]
        if not isinstance(kinds, list) or any(kind != self.name for kind in kinds):
            raise ConfigError(
                f"config.json has layer_types={kinds!r}, which moefold does not compute; only {self.name!r}"
            )
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys: the default of the family needs none."""
        return {}


@dataclass(frozen=True)
class IndexerTypes:
    """`indexer_types` of GLM-MoE-DSA, or the older keys that describe the same list.

    A "full" layer has an indexer. A "shared" layer attends to the keys that the last full layer selected
    (arXiv:2603.12201).
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Return the layers with an indexer."""
        num_layers = num_layers_of(hf_config)
        mark_read(hf_config, "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
        types = hf_config.get("indexer_types") or self._types(hf_config, num_layers)
        if not isinstance(types, list) or any(kind not in ("full", "shared") for kind in types):
            raise ConfigError(f"config.json has indexer_types={types!r}; each should be 'full' or 'shared'")
        if len(types) != num_layers:
            raise ConfigError(
                f"config.json has indexer_types={types!r}, {len(types)} layers, and num_hidden_layers={num_layers}"
            )
        if types and types[0] == "shared":
            raise ConfigError(
                f"config.json has indexer_types={types!r}; the first layer should be 'full', as none before it selects "
                "keys"
            )
        return {"layers.selection": ["own" if kind == "full" else "shared" for kind in types]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer."""
        return {
            "indexer_types": [
                "shared" if layer.attention.shares_selection else "full" for layer in model.decoder_layers
            ]
        }

    @staticmethod
    def _types(hf_config: Json, count: int) -> list[str]:
        """Return the types from `index_topk_pattern`, or from `index_topk_freq` and `index_skip_topk_offset`."""
        pattern = hf_config.get("index_topk_pattern")
        if isinstance(pattern, str):
            return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        if pattern is not None:
            return list(pattern) if isinstance(pattern, list) else [pattern]
        interval = hf_config.get("index_topk_freq", 1)
        offset = hf_config.get("index_skip_topk_offset", 2)
        if not is_int(interval) or not is_int(offset):
            raise ConfigError(
                f"config.json has index_topk_freq={interval!r} and index_skip_topk_offset={offset!r}, which should be "
                "whole numbers"
            )
        return ["full" if max(i - offset + 1, 0) % max(interval, 1) == 0 else "shared" for i in range(count)]


def joined_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `layers` in words, given the number of layers and columns `layers.COLUMN`.

    A column is a word of all layers, or a list with a word for each.
    """
    merged = {key: value for key, value in settings.items() if not key.startswith("layers")}
    columns = [settings.get(f"layers.{column}", word) for column, word in LayerWords()._asdict().items()]
    columns = [[words] * settings["layers"] if isinstance(words, str) else words for words in columns]
    return merged | {"layers": spell_layers([LayerWords(*words) for words in zip(*columns, strict=True)])}
