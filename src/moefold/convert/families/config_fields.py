"""Field converters between config.json and the section [model], in both directions.

Each converter reads some keys of a config.json into keys of [model], and writes them back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from moefold.config.base.limits import MAX_LAYERS
from moefold.config.base.part import NONE, Part
from moefold.config.keys.paths import default_of, tables
from moefold.config.model import ModelConfig
from moefold.convert.families.known_keys import Json, mark_read, plain
from moefold.errors import ConfigError

REQUIRED = object()
_MAX_NUMBER = 2**53
"""Numbers of a config.json stay below 2**53, so that int and float represent them exactly."""


def setting_of(model: ModelConfig, key: str) -> Any:
    """Return the value of a key of a model by its path, for `layers` their number.

    The value is 0 for a setting of another kind, or of an absent table.
    """
    value: Any = model
    if key == "layers":
        return model.num_layers
    for name in key.split("."):
        value = getattr(value, name, None)
    if value is None and f"model.{key}" not in tables():
        default = default_of("model", key)
        return default.kind if isinstance(default, Part) else type(default)()
    return value


class ConfigField(Protocol):
    """Converter of one field of a family's config.json."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Return keys of [model]. Raise ConfigError if config.json lacks a key or has an unsupported value."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that describe these settings of [model]."""
        ...


@dataclass(frozen=True)
class Renamed:
    """Number or switch that config.json stores under another name.

    Attributes:
        hf_key: key of config.json.
        key: key of [model].
        default: replaces an absent key, and null unless the minimum is above 0.
        also: other spellings of the key, which are read but not written.
        copies: other keys of [model] with the same value. Different values do not read back as the same model.
        default_key: key of config.json whose value replaces an absent or null key.
        minimum: smallest value.
        maximum: largest value.
        writes_null: write null for 0.
    """

    hf_key: str
    key: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    default_key: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf
    writes_null: bool = False

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Convert exactly to the type of the [model] key."""
        name, value = self._first_value(hf_config)
        if value is None and self.default_key:
            value = hf_config.get(self.default_key)
        if value is None and not (self.minimum > 0 and name in hf_config):
            if self.default is REQUIRED:
                raise ConfigError(f"config.json lacks {self.hf_key}")
            value = self.default
        kind: Any = bool if self._is_table else type(default_of("model", self.key))
        is_number = isinstance(value, int | float) and isinstance(value, bool) == (kind is bool)
        # nan and inf fail the comparison with the limit.
        if not is_number or not abs(value) < _MAX_NUMBER or value != kind(value):
            described = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
            raise ConfigError(f"config.json has {name}={value!r}, which should be {described}")
        if not self.minimum <= value <= self.maximum:
            bounds = f"{self.minimum} or more" if self.maximum == math.inf else f"{self.minimum} to {self.maximum}"
            raise ConfigError(f"config.json has {name}={kind(value)}, which should be {bounds}")
        if self._is_table:
            return {self.key: {} if value else NONE}
        owner = self.key.rpartition(".")[0]
        if not value and kind is not bool and owner and default_of("model", owner) is None:
            # The table may be absent.
            return {owner: NONE}
        return dict.fromkeys((self.key, *self.copies), kind(value))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Copy the value."""
        value = setting_of(model, self.key)
        if self._is_table:
            return {self.hf_key: value is not None}
        return {self.hf_key: (value or None) if self.writes_null else value}

    @property
    def _is_table(self) -> bool:
        """Return whether the switch represents the presence of a table."""
        return f"model.{self.key}" in tables()

    def _first_value(self, hf_config: Json) -> tuple[str, Any]:
        """Return the present spelling and its value."""
        pairs = [(name, hf_config.get(name)) for name in (self.hf_key, *self.also)]
        pairs = [pair for pair in pairs if pair[1] is not None] or pairs
        for other, value in pairs[1:]:
            if value is not None and plain(value) != plain(pairs[0][1]):
                raise ConfigError(
                    f"config.json has {pairs[0][0]}={pairs[0][1]!r} and {other}={value!r}, two spellings of one key"
                )
        return pairs[0]


def renamed(**keys: str | tuple[str, Any]) -> tuple[Renamed, ...]:
    """Return fields by keys of config.json, each given as the key of [model], or that key and the default."""
    return tuple(Renamed(hf_key, *((to,) if isinstance(to, str) else to)) for hf_key, to in keys.items())


def same(*names: str, under: str = "", **defaults: Any) -> tuple[Renamed, ...]:
    """Return fields for keys with the same name in [model] or in a table of it, with some defaults."""
    keys = dict.fromkeys(names, REQUIRED) | defaults
    return tuple(Renamed(name, f"{under}.{name}".removeprefix("."), value) for name, value in keys.items())


@dataclass(frozen=True)
class AllowedValues:
    """Key of config.json that is restricted to the supported values. The first value is written.

    An absent key means the first value.
    """

    hf_key: str
    values: tuple[Any, ...]

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Raise ConfigError if the key has another value than the listed ones."""
        value = hf_config.get(self.hf_key, self.values[0])
        if value not in self.values:
            legal = " or ".join(map(repr, self.values))
            raise ConfigError(f"config.json has {self.hf_key}={value!r}, which moefold does not compute; only {legal}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the key with its first value."""
        return {self.hf_key: self.values[0]}


def allowed(**values: tuple[Any, ...]) -> tuple[AllowedValues, ...]:
    """Return restricted keys by name."""
    return tuple(AllowedValues(name, legal) for name, legal in values.items())


@dataclass(frozen=True)
class Constants:
    """Keys of [model] that are constant for the family. No key of config.json has their values."""

    values: Mapping[str, Any]

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Return the keys of [model] that have the same value in every folder."""
        return dict(self.values)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys."""
        return {}


@dataclass(frozen=True)
class HeadSize:
    """head_dim. If absent, `default`, whose value 0 means hidden_size / num_attention_heads."""

    default: int = 0
    is_derived: bool = False
    """True if transformers ignores the key and divides hidden_size. Then other values are refused."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read head_dim, and refuse a value that transformers would ignore."""
        hidden = hf_config.get("hidden_size")
        heads = hf_config.get("num_attention_heads")
        if self.is_derived and is_int(hidden) and is_int(heads) and heads > 0:
            AllowedValues("head_dim", (hidden // heads, None)).read(hf_config)
        return Renamed("head_dim", "attention.head_dim", self.default).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the resolved size."""
        return {"head_dim": model.softmax_attention.head_dim}


@dataclass(frozen=True)
class SharedExperts:
    """`n_shared_experts` with the width of a routed expert, merged into one wide shared expert."""

    hf_key: str = "n_shared_experts"
    allows_none: bool = False
    """True if 0 means no shared expert. If not, transformers creates tensors of width 0, which are not read."""
    default: int | None = None
    width_key: str = "moe_intermediate_size"

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the total width."""
        count = hf_config.get(self.hf_key, self.default)
        width = hf_config.get(self.width_key)
        if not is_int(count) or not is_int(width) or count < (0 if self.allows_none else 1):
            raise ConfigError(f"config.json has {self.hf_key}={count!r} of {self.width_key}={width!r}")
        return {"ffn.moe.shared.intermediate_size": count * width} if count else {"ffn.moe.shared": NONE}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of experts. A width that is not a multiple does not read back."""
        return {self.hf_key: model.ffn.moe.shared_width // model.ffn.moe.intermediate_size}


@dataclass(frozen=True)
class AttentionMultiplier:
    """`attention_multiplier` of Granite: the factor of the attention scores."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the factor. 1/sqrt(head_dim) is the default of moefold."""
        settings = Renamed("attention_multiplier", "attention.scale", 1.0).read(hf_config)
        if settings["attention.scale"] <= 0:
            raise ConfigError(
                f"config.json has attention_multiplier={settings['attention.scale']}, which should be above 0"
            )
        hidden = hf_config.get("hidden_size")
        heads = hf_config.get("num_attention_heads")
        if is_int(hidden) and is_int(heads) and heads > 0:
            head_size = hf_config.get("head_dim") or hidden // heads
            return {} if settings["attention.scale"] == head_size**-0.5 else settings
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the factor."""
        return {"attention_multiplier": setting_of(model, "attention.scale") or model.softmax_attention.head_dim**-0.5}


@dataclass(frozen=True)
class InputScaling:
    """`mup_enabled`: token embeddings are multiplied by the square root of the hidden size."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the multiplier."""
        is_enabled = hf_config.get("mup_enabled") or False
        hidden = hf_config.get("hidden_size")
        if not isinstance(is_enabled, bool) or not is_int(hidden) or hidden < 1:
            raise ConfigError(f"config.json has mup_enabled={is_enabled!r} of hidden_size={hidden!r}")
        return {"embedding_multiplier": hidden**0.5} if is_enabled else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the switch. Another multiplier does not read back as the same model."""
        return {"mup_enabled": model.embedding_multiplier != 1.0}


@dataclass(frozen=True)
class SameForAllLayers:
    """A number, or a list with the same number for every layer (Hunyuan)."""

    hf_key: str
    key: str
    default: Any = REQUIRED

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number. Refuse a list of different numbers."""
        value = hf_config.get(self.hf_key)
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise ConfigError(f"config.json has {self.hf_key}={value!r}; moefold computes equal layers only")
            value = value[0]
        return Renamed(self.hf_key, self.key, self.default).read({self.hf_key: value})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number."""
        return Renamed(self.hf_key, self.key).write(model)


@dataclass(frozen=True)
class HunyuanSharedExpert:
    """The shared expert of Hunyuan, with width `intermediate_size` like the routed experts."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the width. Refuse folders with experts of other widths or with several shared experts."""
        settings = Renamed("intermediate_size", "ffn.moe.shared.intermediate_size").read(hf_config)
        width = settings.get("ffn.moe.shared.intermediate_size", 0)
        for key, legal in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
            value = hf_config.get(key, legal)
            values = value if isinstance(value, list) else [value]
            if any(other != legal for other in values):
                raise ConfigError(f"config.json has {key}={value!r}, which moefold does not compute; only {legal}")
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys. The width reads back as the width of a routed expert."""
        return {}


@dataclass(frozen=True)
class GatedSharedExpert:
    """`shared_expert_intermediate_size` of Qwen2-MoE, whose shared expert has a gate."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the width. For width 0, transformers creates empty tensors, which moefold does not read."""
        settings = Renamed("shared_expert_intermediate_size", "ffn.moe.shared.intermediate_size").read(hf_config)
        width = settings.get("ffn.moe.shared.intermediate_size", 0)
        if width < 1:
            raise ConfigError(
                f"config.json has shared_expert_intermediate_size={width}, whose empty tensors moefold does not read; "
                "it reads folders with a shared expert of width 1 or more"
            )
        return settings | {"ffn.moe.shared.gate": True}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the width. A model without a gate reads back with a gate."""
        return {"shared_expert_intermediate_size": model.ffn.moe.shared_width}


@dataclass(frozen=True)
class RouterGroups:
    """`n_group` and `topk_group`. With `has_method`, they apply only if `topk_method` is "group_limited_greedy"."""

    has_method: bool = False
    hf_key: str = "n_group"
    """Key of the number of groups."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of expert groups, and the number of groups that a token may choose from."""
        method = hf_config.get("topk_method") or "greedy"
        if self.has_method and method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(f"config.json has topk_method={method!r}, which moefold does not compute")
        mark_read(hf_config, self.hf_key, "topk_group")
        if (self.has_method and method == "greedy") or (hf_config.get(self.hf_key) or 1) == 1:
            return {}
        groups = {
            **Renamed(self.hf_key, "ffn.moe.router.num_groups").read(hf_config),
            **Renamed("topk_group", "ffn.moe.router.top_groups").read(hf_config),
        }
        # Choosing from all groups is not a restriction.
        return {} if groups["ffn.moe.router.num_groups"] == groups["ffn.moe.router.top_groups"] else groups

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the groups, and the method if the family has such a key."""
        keys: dict[str, Any] = {
            self.hf_key: model.ffn.moe.router.num_groups,
            "topk_group": model.ffn.moe.router.top_groups,
        }
        if self.has_method:
            keys["topk_method"] = "group_limited_greedy" if model.ffn.moe.router.num_groups > 1 else "greedy"
        return keys


@dataclass(frozen=True)
class MultiHeadKeyValue:
    """num_key_value_heads of multi-head attention, equal to the number of query heads."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Refuse another number."""
        return AllowedValues("num_key_value_heads", (hf_config.get("num_attention_heads"), None)).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of query heads."""
        return {"num_key_value_heads": model.attention.num_heads}


@dataclass(frozen=True)
class LatentHeadSizes:
    """Derived sizes of latent attention: `qk_head_dim`, and `head_dim`, which has three meanings."""

    has_head_dim: bool = True
    """If True, check head_dim, which has another meaning in hybrid models."""
    writes_head_dim: bool = False
    """If True, write head_dim, the rotated size in the family's class of transformers (LongCat)."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Refuse sizes that differ from the sizes of the parts of a head."""
        rotated = hf_config.get("qk_rope_head_dim")
        plain_size = hf_config.get("qk_nope_head_dim")
        if is_int(rotated) and is_int(plain_size):
            for key in ("qk_head_dim", "q_head_dim"):
                AllowedValues(key, (rotated + plain_size, None)).read(hf_config)
            latent = hf_config.get("kv_lora_rank")
            cached = rotated + latent if is_int(latent) else rotated
            if self.has_head_dim:
                AllowedValues("head_dim", (rotated, rotated + plain_size, cached, None)).read(hf_config)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write head_dim if the family needs it."""
        return {"head_dim": setting_of(model, "attention.qk_rope_head_dim")} if self.writes_head_dim else {}


@dataclass(frozen=True)
class NormTopKProb:
    """norm_topk_prob of a softmax router: normalise the chosen probabilities to sum to 1. If absent, `default`."""

    default: bool

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the softmax: over all experts, or over the chosen experts, which is equal to normalising."""
        is_normalised = hf_config.get("norm_topk_prob", self.default)
        if not isinstance(is_normalised, bool | None):
            raise ConfigError(f"config.json has norm_topk_prob={is_normalised!r}, which should be true or false")
        return {"ffn.moe.router.softmax": "post" if is_normalised else "pre"}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the switch."""
        return {"norm_topk_prob": getattr(setting_of(model, "ffn.moe.router.softmax"), "kind", "post") == "post"}


def num_experts(hf_key: str) -> Renamed:
    """Return the field of the number of experts, which transformers 5 spells in two ways. `hf_key` is written."""
    return Renamed(hf_key, "ffn.moe.num_experts", also=tuple({"num_experts", "num_local_experts"} - {hf_key}))


def attention_bias(*, has_output: bool) -> Renamed:
    """Return the field of biases on the query, key and value projections, with `has_output` also on the output's."""
    return Renamed("attention_bias", "attention.qkv_bias", False, copies=("attention.output_bias",) * has_output)


NUM_LAYERS = Renamed("num_hidden_layers", "layers", minimum=1, maximum=MAX_LAYERS)
"""Number of layers, without MTP layers."""
MTP_LAYERS = Renamed(
    "num_nextn_predict_layers", "mtp_layers", 1, also=("num_mtp_layers",), minimum=0, maximum=MAX_LAYERS
)
"""Number of multi-token prediction (MTP) layers, in the spelling of released folders. transformers 5 differs."""


def num_layers_of(hf_config: Json) -> int:
    """Return num_hidden_layers. Raise ConfigError for a value that is not a count."""
    return int(NUM_LAYERS.read(hf_config)["layers"])


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value of a JSON file is a whole number, not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def interval_of(hf_config: Json, key: str, default: int) -> int:
    """Return the n of a key for every n-th layer. Raise ConfigError if it is not a whole number of at least 1."""
    interval = hf_config.get(key, default)
    if not is_int(interval) or interval < 1:
        raise ConfigError(f"config.json has {key}={interval!r}, which should be a whole number from 1 on")
    return interval
