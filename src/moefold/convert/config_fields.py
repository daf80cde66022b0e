"""Field converters between config.json and the section [model], in both directions. Torch-free.

Each converter reads some keys of a config.json into keys of [model], and writes them back.
"""

from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeGuard

from moefold.config.model import ModelConfig
from moefold.config.patterns import MAX_LAYERS
from moefold.convert.key_reader import Json, mark_read, overlay
from moefold.errors import ConfigError

REQUIRED = object()
_MAX_NUMBER = 2**53
"""Numbers of a config.json stay below 2**53, so that int and float represent them exactly."""
_TYPES: dict[str, Any] = {field.name: type(field.default) for field in fields(ModelConfig)}


class ConfigField(Protocol):
    """Converter of one field of a family's config.json."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Return keys of [model]; raise ConfigError if config.json lacks a key or has an unsupported value."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return keys of config.json."""
        ...


@dataclass(frozen=True)
class Renamed:
    """A number or switch under another name; `default` replaces an absent or null key."""

    hf_key: str
    key: str
    default: Any = REQUIRED

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Convert exactly to the type of the [model] key."""
        value = hf_config.get(self.hf_key)
        if value is None:
            if self.default is REQUIRED:
                raise ConfigError(f"config.json lacks {self.hf_key}")
            value = self.default
        kind = _TYPES[self.key]
        is_number = isinstance(value, int | float) and isinstance(value, bool) == (kind is bool)
        # nan and inf both fail the comparison with the limit.
        if not is_number or not abs(value) < _MAX_NUMBER or value != kind(value):
            raise ConfigError(f"config.json has {self.hf_key}={value!r}, which should be {_type_description(kind)}")
        return {self.key: kind(value)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Copy the value."""
        return {self.hf_key: getattr(model, self.key)}


@dataclass(frozen=True)
class Positive:
    """A size that is 1 or more, where 0 in [model] means a model without that part."""

    hf_key: str
    key: str
    default: Any = REQUIRED

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the size; reject 0."""
        found = Renamed(self.hf_key, self.key, self.default).read(hf_config)
        if found[self.key] < 1:
            raise ConfigError(f"config.json has {self.hf_key}={found[self.key]}, which should be 1 or more")
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Copy the value; a model without that part does not read back."""
        return {self.hf_key: getattr(model, self.key)}


@dataclass(frozen=True)
class WithAlias:
    """A field whose key some folders spell in another way.

    Attributes:
        entry: the field.
        key: the spelling that is written.
        alias: the other spelling, which is read where it is present.
    """

    entry: ConfigField
    key: str
    alias: str

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the field by either spelling."""
        value = hf_config.get(self.alias)
        own = hf_config.get(self.key)
        if value is not None and own is not None and value != own:
            raise ConfigError(
                f"config.json has {self.key}={own!r} and {self.alias}={value!r}, two spellings of one key"
            )
        return self.entry.read(hf_config if value is None else overlay(hf_config, {self.key: value}))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the field."""
        return self.entry.write(model)


@dataclass(frozen=True)
class AllowedValues:
    """A key of config.json that is restricted to the supported values; the first one is written.

    An absent key means the first value.
    """

    hf_key: str
    values: tuple[Any, ...]

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Reject other values."""
        value = hf_config.get(self.hf_key, self.values[0])
        if value not in self.values:
            legal = " or ".join(map(repr, self.values))
            raise ConfigError(f"config.json has {self.hf_key}={value!r}, which moefold does not compute; only {legal}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the first value."""
        return {self.hf_key: self.values[0]}


@dataclass(frozen=True)
class Constant:
    """A key of [model] that is constant for the family."""

    key: str
    value: Any

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Return the constant."""
        return {self.key: self.value}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys: config.json does not spell the constant out."""
        return {}


@dataclass(frozen=True)
class KeyValueHeads:
    """num_key_value_heads; absent, the number of query heads."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read num_query_groups."""
        heads = hf_config.get("num_attention_heads")
        return Renamed("num_key_value_heads", "num_query_groups", heads).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Copy the value."""
        return {"num_key_value_heads": model.num_query_groups}


@dataclass(frozen=True)
class HeadSize:
    """head_dim; absent, `default`, where 0 means hidden_size / num_attention_heads."""

    default: int = 0

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read head_dim."""
        return Renamed("head_dim", "head_dim", self.default).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the resolved size."""
        return {"head_dim": model.softmax_attention.head_dim}


@dataclass(frozen=True)
class SharedExperts:
    """`n_shared_experts` of the width of a routed expert, merged into one wide shared expert."""

    hf_key: str = "n_shared_experts"
    allows_none: bool = False
    """0 means no shared expert; else transformers creates tensors of width 0, which moefold does not read."""
    default: int | None = None

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the total width."""
        count = hf_config.get(self.hf_key, self.default)
        width = hf_config.get("moe_intermediate_size")
        if not is_int(count) or not is_int(width) or count < (0 if self.allows_none else 1):
            raise ConfigError(f"config.json has {self.hf_key}={count!r} of moe_intermediate_size={width!r}")
        return {"shared_expert_ffn_hidden_size": count * width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of experts; a width that does not divide reads back as another width."""
        return {self.hf_key: model.shared_expert_ffn_hidden_size // model.moe_ffn_hidden_size}


@dataclass(frozen=True)
class AttentionBias:
    """`attention_bias`: biases on the query, key and value projections, and on the output's if `has_output`."""

    has_output: bool
    hf_key: str = "attention_bias"

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the switch."""
        found = Renamed(self.hf_key, "qkv_bias", False).read(hf_config)
        return found | ({"attention_output_bias": found["qkv_bias"]} if self.has_output else {})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the switch; a bias on some of the projections reads back as another model."""
        return {self.hf_key: model.qkv_bias}


@dataclass(frozen=True)
class AttentionMultiplier:
    """`attention_multiplier` of Granite: the factor of the attention scores."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the factor; 1/sqrt(head_dim) is the default of moefold."""
        found = Renamed("attention_multiplier", "attention_scale", 1.0).read(hf_config)
        if found["attention_scale"] <= 0:
            raise ConfigError(
                f"config.json has attention_multiplier={found['attention_scale']}, which should be above 0"
            )
        hidden = hf_config.get("hidden_size")
        heads = hf_config.get("num_attention_heads")
        if is_int(hidden) and is_int(heads) and heads > 0:
            head_size = hf_config.get("head_dim") or hidden // heads
            return {} if found["attention_scale"] == head_size**-0.5 else found
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the factor."""
        return {"attention_multiplier": model.attention_scale or model.softmax_attention.head_dim**-0.5}


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
        """Write the switch; another multiplier reads back as another model."""
        return {"mup_enabled": model.embedding_multiplier != 1.0}


@dataclass(frozen=True)
class SameForAllLayers:
    """A number, or a list with the same number for every layer (Hunyuan)."""

    hf_key: str
    key: str
    default: Any = REQUIRED

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number; reject a list of different ones."""
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
    """The shared expert of Hunyuan: `intermediate_size` wide, like the routed ones."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the width; reject folders whose experts have other widths or whose shared experts are several."""
        found = Renamed("intermediate_size", "shared_expert_ffn_hidden_size").read(hf_config)
        width = found["shared_expert_ffn_hidden_size"]
        for key, legal in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
            value = hf_config.get(key, legal)
            values = value if isinstance(value, list) else [value]
            if any(other != legal for other in values):
                raise ConfigError(f"config.json has {key}={value!r}, which moefold does not compute; only {legal}")
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys; another width reads back as the width of a routed expert."""
        return {}


@dataclass(frozen=True)
class GatedSharedExpert:
    """`shared_expert_intermediate_size` of Qwen2-MoE, whose shared expert has a gate."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the width. For width 0, transformers creates empty tensors, which moefold does not read."""
        found = Renamed("shared_expert_intermediate_size", "shared_expert_ffn_hidden_size").read(hf_config)
        width = found["shared_expert_ffn_hidden_size"]
        if width < 1:
            raise ConfigError(
                f"config.json has shared_expert_intermediate_size={width}, whose empty tensors moefold does not read; "
                "it reads folders with a shared expert of width 1 or more"
            )
        return found | {"shared_expert_gate": True}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the width; a model without a gate reads back with one."""
        return {"shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size}


@dataclass(frozen=True)
class MTPLayers:
    """`num_nextn_predict_layers`, which transformers 5 also spells num_mtp_layers."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of MTP layers; 1 if absent."""
        keys = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if hf_config.get(key) is not None]
        found = Renamed(keys[0] if keys else "num_nextn_predict_layers", "mtp_layers", 1).read(hf_config)
        if not 0 <= found["mtp_layers"] <= MAX_LAYERS:
            raise ConfigError(f"config.json has {keys[0]}={found['mtp_layers']}, which should be 0 to {MAX_LAYERS}")
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the spelling of the released folder."""
        return {"num_nextn_predict_layers": model.mtp_layers}


@dataclass(frozen=True)
class QueryLoraRank:
    """`q_lora_rank`, null if queries are projected directly from the hidden state."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the rank, 0 for none."""
        return Renamed("q_lora_rank", "q_lora_rank", 0).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the rank, null for none."""
        return {"q_lora_rank": model.q_lora_rank or None}


@dataclass(frozen=True)
class RouterGroups:
    """`n_group` and `topk_group`; with `has_method`, only if `topk_method` is "group_limited_greedy"."""

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
            **Renamed(self.hf_key, "num_groups").read(hf_config),
            **Renamed("topk_group", "top_groups").read(hf_config),
        }
        # Choosing from all groups is no restriction.
        return {} if groups["num_groups"] == groups["top_groups"] else groups

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the groups, and the method if the family has one."""
        keys: dict[str, Any] = {self.hf_key: model.num_groups, "topk_group": model.top_groups}
        if self.has_method:
            keys["topk_method"] = "group_limited_greedy" if model.num_groups > 1 else "greedy"
        return keys


@dataclass(frozen=True)
class MultiHeadKeyValue:
    """num_key_value_heads of multi-head attention, equal to the number of query heads."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Reject another number."""
        return AllowedValues("num_key_value_heads", (hf_config.get("num_attention_heads"), None)).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of query heads."""
        return {"num_key_value_heads": model.num_attention_heads}


@dataclass(frozen=True)
class LatentHeadSizes:
    """Sizes of latent attention that follow from others: `qk_head_dim`, and `head_dim`, which has two meanings."""

    has_head_dim: bool = True
    """Check head_dim; it means something else in hybrid models."""
    writes_head_dim: bool = False
    """Write head_dim, by which the family's class in transformers rotates (LongCat)."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Reject other sizes than the sizes of the parts of a head."""
        rotated = hf_config.get("qk_rope_head_dim")
        plain_size = hf_config.get("qk_nope_head_dim")
        if is_int(rotated) and is_int(plain_size):
            AllowedValues("qk_head_dim", (rotated + plain_size, None)).read(hf_config)
            if self.has_head_dim:
                AllowedValues("head_dim", (rotated, rotated + plain_size, None)).read(hf_config)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write head_dim if the family needs it."""
        return {"head_dim": model.qk_rope_head_dim} if self.writes_head_dim else {}


@dataclass(frozen=True)
class NormTopKProb:
    """norm_topk_prob of a softmax router: normalise the chosen probabilities to sum to 1; absent, `default`."""

    default: bool

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the softmax: over all experts, or over the chosen ones, which equals normalising."""
        is_normalised = hf_config.get("norm_topk_prob", self.default)
        if not isinstance(is_normalised, bool | None):
            raise ConfigError(f"config.json has norm_topk_prob={is_normalised!r}, which should be true or false")
        return {"router_softmax": "post" if is_normalised else "pre"}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the switch."""
        return {"norm_topk_prob": model.router_softmax == "post"}


def num_layers_of(hf_config: Json) -> int:
    """Return num_hidden_layers.

    Raises:
        ConfigError: it is no count.
    """
    count = hf_config.get("num_hidden_layers")
    if not isinstance(count, int) or not is_int(count) or not 1 <= count <= MAX_LAYERS:
        raise ConfigError(f"config.json has num_hidden_layers={count!r}, which should be 1 to {MAX_LAYERS}")
    return count


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value of a JSON file is a whole number, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _type_description(kind: Any) -> str:
    return {bool: "true or false", int: "a whole number"}.get(kind, "a number")
