"""Field converters between config.json and the section [model], in both directions. Torch-free.

Each converter reads some keys of a config.json into keys of [model], and writes them back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeGuard

from moefold.config.model import ATTENTION_KINDS, LAYER_KINDS, MAX_LAYERS, ModelConfig, expand_layer_pattern
from moefold.errors import ConfigError

Json = Mapping[str, Any]
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
        return {"head_dim": model.head_size}


@dataclass(frozen=True)
class RopeParameters:
    """RoPE parameters: `rope_parameters`, or, in older folders, `rope_theta` and `rope_scaling`."""

    theta: float
    is_required: bool = False
    """Reject an absent key, for families whose default is not "no scaling"."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read theta and the RoPE scaling."""
        # As in transformers, the older key wins if both are given.
        given = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
        if not given and self.is_required:
            raise ConfigError("config.json lacks rope_parameters")
        if not isinstance(given, Mapping):
            raise ConfigError(f"config.json has rope_parameters={given!r}, which should be an object")
        found: dict[str, Any] = {"rope_theta": self.theta, "rope_type": "default"}
        found |= {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
        found |= {"rope_type": given["type"]} if "type" in given else {}
        found |= given
        kind = found["rope_type"]
        if found.get("partial_rotary_factor", hf_config.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise ConfigError("config.json has a partial_rotary_factor, which moefold does not read for this family")
        keys = Renamed("rope_theta", "rope_theta").read(found)
        if kind == "default":
            return keys
        if not isinstance(kind, str) or kind not in _ROPE_SCALINGS:
            legal = ", ".join(map(repr, ("default", *_ROPE_SCALINGS)))
            raise ConfigError(f"config.json has rope_type={kind!r}, which moefold does not compute; only {legal}")
        # As in transformers, the context length of the model stands in for an absent original one.
        found.setdefault("original_max_position_embeddings", hf_config.get("max_position_embeddings"))
        read = [entry.read(found) for entry in _ROPE_SCALINGS[kind]]
        return {**keys, "rope_scaling": kind, **{key: value for part in read for key, value in part.items()}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write `rope_parameters` as transformers 5 does."""
        if model.rope_scaling == "none":
            return {"rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"}}
        values: dict[str, Any] = {"rope_type": model.rope_scaling, "rope_theta": model.rope_theta}
        for entry in _ROPE_SCALINGS[model.rope_scaling]:
            if entry.default is REQUIRED or getattr(model, entry.key) != entry.default:
                values |= entry.write(model)
        return {"rope_parameters": values}


_FACTOR = Renamed("factor", "rope_scaling_factor")
_ORIGINAL_SEQ_LEN = Renamed("original_max_position_embeddings", "rope_original_seq_len")
_ROPE_SCALINGS: dict[str, tuple[Renamed, ...]] = {
    "linear": (_FACTOR,),
    "llama3": (
        _FACTOR,
        _ORIGINAL_SEQ_LEN,
        Renamed("low_freq_factor", "rope_low_freq_factor"),
        Renamed("high_freq_factor", "rope_high_freq_factor"),
    ),
    "yarn": (
        _FACTOR,
        _ORIGINAL_SEQ_LEN,
        Renamed("beta_fast", "rope_beta_fast", 32.0),
        Renamed("beta_slow", "rope_beta_slow", 1.0),
        Renamed("truncate", "rope_truncate", True),
        Renamed("attention_factor", "rope_attention_factor", 0.0),
        Renamed("mscale", "rope_mscale", 0.0),
        Renamed("mscale_all_dim", "rope_mscale_all_dim", 0.0),
    ),
}
"""Parameters of each RoPE scaling in `rope_parameters`, besides theta."""


@dataclass(frozen=True)
class SparseLayers:
    """Layers with experts: `mlp_only_layers`, and every `decoder_sparse_step`-th of the other layers."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the layer pattern."""
        count = _num_layers(hf_config)
        step = hf_config.get("decoder_sparse_step")
        dense = hf_config.get("mlp_only_layers")
        step = 1 if step is None else step
        dense = [] if dense is None else dense
        if not _is_int(step) or step < 1:
            raise ConfigError(f"config.json has decoder_sparse_step={step!r}, which should be a whole number from 1 on")
        if not isinstance(dense, list) or not all(map(_is_int, dense)):
            raise ConfigError(f"config.json has mlp_only_layers={dense!r}, which should be a list of whole numbers")
        kinds = ["D" if i in dense or (i + 1) % step else "M" for i in range(count)]
        return {"layer_pattern": shorten_pattern("".join(kinds))}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the list of dense layers."""
        dense = [i for i, kind in enumerate(model.layer_kinds) if kind == "D"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class FirstKDense:
    """`first_k_dense_replace`: number of leading dense layers; all other layers have experts."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the layer pattern."""
        dense = hf_config.get("first_k_dense_replace") or 0
        count = _num_layers(hf_config)
        if not _is_int(dense) or not 0 <= dense < count:
            raise ConfigError(f"config.json has first_k_dense_replace={dense!r} of num_hidden_layers={count!r}")
        return {"layer_pattern": shorten_pattern("D" * dense + "M" * (count - dense))}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of leading dense layers."""
        kinds = "".join(model.layer_kinds)
        return {"first_k_dense_replace": len(kinds) - len(kinds.lstrip("D")), "moe_layer_freq": 1}


@dataclass(frozen=True)
class SharedExperts:
    """`n_shared_experts` of the width of a routed expert, merged into one wide shared expert."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the total width."""
        count = hf_config.get("n_shared_experts")
        width = hf_config.get("moe_intermediate_size")
        if not _is_int(count) or not _is_int(width) or count < 1:
            raise ConfigError(f"config.json has n_shared_experts={count!r} of moe_intermediate_size={width!r}")
        return {"shared_expert_ffn_hidden_size": count * width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of experts; a width that does not divide reads back as another width."""
        return {"n_shared_experts": model.shared_expert_ffn_hidden_size // model.moe_ffn_hidden_size}


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

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of expert groups, and the number of groups that a token may choose from."""
        method = hf_config.get("topk_method") or "greedy"
        if self.has_method and method not in ("greedy", "group_limited_greedy"):
            raise ConfigError(f"config.json has topk_method={method!r}, which moefold does not compute")
        if (self.has_method and method == "greedy") or (hf_config.get("n_group") or 1) == 1:
            return {}
        groups = {
            **Renamed("n_group", "num_groups").read(hf_config),
            **Renamed("topk_group", "top_groups").read(hf_config),
        }
        # Choosing from all groups is no restriction.
        return {} if groups["num_groups"] == groups["top_groups"] else groups

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the groups, and the method if the family has one."""
        keys: dict[str, Any] = {"n_group": model.num_groups, "topk_group": model.top_groups}
        if self.has_method:
            keys["topk_method"] = "group_limited_greedy" if model.num_groups > 1 else "greedy"
        return keys


@dataclass(frozen=True)
class SlidingWindowLayers:
    """`layer_types` and `sliding_window`; without types, alternating window and full attention, as in gpt-oss."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern and the window."""
        count = _num_layers(hf_config)
        window = hf_config.get("sliding_window", 128)
        letters = {"sliding_attention": "W", "full_attention": "F"}
        kinds = hf_config.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in list(letters) for kind in kinds):
            raise ConfigError(f"config.json has layer_types={kinds!r}, which moefold does not compute")
        pattern = shorten_pattern("".join(letters[kind] for kind in kinds), ATTENTION_KINDS)
        if "W" not in pattern:
            return {"attention_pattern": pattern, "sliding_window": 0}
        size = Renamed("sliding_window", "sliding_window").read({"sliding_window": window})
        return {"attention_pattern": pattern, **size}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer."""
        kinds = ["sliding_attention" if window else "full_attention" for window in model.layer_windows]
        return {"layer_types": kinds, "sliding_window": model.sliding_window or None}


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
class UniformLayers:
    """Constant layer kind of all layers."""

    kind: str

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Return the layer pattern."""
        return {"layer_pattern": self.kind}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys."""
        return {}


@dataclass(frozen=True)
class NoSlidingWindow:
    """`layer_types` without sliding windows, if the key is present."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Reject sliding windows."""
        kinds = hf_config.get("layer_types") or ["full_attention"]
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise ConfigError(
                f"config.json has layer_types={kinds!r}, which moefold does not compute; only 'full_attention'"
            )
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys."""
        return {}


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


def shorten_pattern(kinds: str, alphabet: str = LAYER_KINDS) -> str:
    """Return the shortest layer pattern for the kinds of all layers: "DMMMMM" -> "DM5", "DMDM" -> "DM"."""
    for size in range(1, len(kinds)):
        if all(kind == kinds[i % size] for i, kind in enumerate(kinds)):
            kinds = kinds[:size]
            break
    spelled = ""
    i = 0
    while i < len(kinds):
        count = len(kinds[i:]) - len(kinds[i:].lstrip(kinds[i]))
        spelled += kinds[i] + (str(count) if count > 1 else "")
        i += count
    assert expand_layer_pattern(spelled, alphabet) == kinds
    return spelled


def _num_layers(hf_config: Json) -> int:
    count = hf_config.get("num_hidden_layers")
    if not isinstance(count, int) or not _is_int(count) or not 1 <= count <= MAX_LAYERS:
        raise ConfigError(f"config.json has num_hidden_layers={count!r}, which should be 1 to {MAX_LAYERS}")
    return count


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _type_description(kind: Any) -> str:
    return {bool: "true or false", int: "a whole number"}.get(kind, "a number")
