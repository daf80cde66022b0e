"""Family Llama 4 (text): attention within chunks, layers without RoPE, and routing weights on inputs. Torch-free."""

from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.config.patterns import ATTENTION_KINDS, ROPE_KINDS
from moefold.convert.config_fields import (
    Constants,
    Renamed,
    attention_bias,
    interval_of,
    is_int,
    num_experts,
    num_layers_of,
    renamed,
    setting_of,
)
from moefold.convert.family import (
    Family,
    MultimodalFolder,
    attention_fields,
    ffn_rules,
    layer_rules,
    layouts,
    untransposed_experts,
)
from moefold.convert.key_reader import Json, mark_read
from moefold.convert.layer_fields import attention_types, letters_of, shorten_pattern
from moefold.errors import ConfigError

_CHUNKS = {"chunked_attention": "C", "full_attention": "F"}


@dataclass(frozen=True)
class ChunkedLayers:
    """`no_rope_layers`, `layer_types` and `attention_chunk_size`; `use_qk_norm` and the attention temperature.

    By default every `no_rope_layer_interval`-th layer has no RoPE, and the layers with RoPE attend within chunks. The
    layers with RoPE have norms of queries and keys, the other layers the attention temperature.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the patterns of the layers, and what depends on the kinds of layers that there are."""
        mark_read(hf_config, "attention_chunk_size", "no_rope_layer_interval", "attn_scale", "floor_scale")
        mark_read(hf_config, "attn_temperature_tuning", "use_qk_norm")
        has_rope = _layers_with_rope(hf_config)
        letters = _attention_letters(hf_config, has_rope)
        rope_letters = "".join("NR"[value] for value in has_rope)
        found: dict[str, Any] = {
            "attention_pattern": shorten_pattern(letters, ATTENTION_KINDS),
            "rope_pattern": shorten_pattern(rope_letters, ROPE_KINDS),
        }
        if "C" in letters:
            found |= Renamed("attention_chunk_size", "attention_chunk_size").read(hf_config)
        if _switch(hf_config, "use_qk_norm") and "R" in rope_letters:
            found |= {"attention.qk_norm.weight": False, "attention.qk_norm.after_rope": True}
            found |= {"attention.qk_norm.in_nope": False} if "N" in rope_letters else {}
        if _switch(hf_config, "attn_temperature_tuning") and "N" in rope_letters:
            scale = Renamed("attn_scale", "attention.temperature.scale", 0.1).read(hf_config)
            tokens = Renamed("floor_scale", "attention.temperature.tokens", 8192, least=1).read(hf_config)
            found |= scale | tokens if "attention.temperature.scale" in scale else {}
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the kind of every layer; other options of norms and windows read back as another model."""
        scale = setting_of(model, "attention.temperature.scale")
        keys: dict[str, Any] = {
            "no_rope_layers": [int(layer.attention.has_rope) for layer in model.layers],
            "layer_types": attention_types(model, _CHUNKS),
            "attention_chunk_size": model.attention_chunk_size or None,
            "use_qk_norm": setting_of(model, "attention.qk_norm") is not None,
            "attn_temperature_tuning": scale > 0,
        }
        if scale:
            keys |= {"attn_scale": scale, "floor_scale": setting_of(model, "attention.temperature.tokens")}
        return keys


def _switch(hf_config: Json, key: str) -> bool:
    """Return a switch of config.json, true if absent; released folders also have numbers."""
    value = hf_config.get(key, True)
    if not isinstance(value, bool | int):
        raise ConfigError(f"config.json has {key}={value!r}, which should be true or false")
    return bool(value)


def _layers_with_rope(hf_config: Json) -> list[bool]:
    """Return whether each layer has RoPE."""
    count = num_layers_of(hf_config)
    values = hf_config.get("no_rope_layers") or []
    if not values:
        every = interval_of(hf_config, "no_rope_layer_interval", 4)
        return [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(values, list) or len(values) < count or any(value not in (0, 1) for value in values):
        raise ConfigError(
            f"config.json has no_rope_layers={values!r}, which should be 0 or 1 for each of {count} layers"
        )
    return [bool(value) for value in values[:count]]


def _attention_letters(hf_config: Json, has_rope: list[bool]) -> str:
    """Return C for each layer that attends within chunks, F for each other one."""
    if hf_config.get("layer_types") is not None:
        return letters_of(hf_config, "layer_types", _CHUNKS)
    has_chunks = hf_config.get("attention_chunk_size") is not None
    return "".join("C" if rope and has_chunks else "F" for rope in has_rope)


@dataclass(frozen=True)
class InterleavedExperts:
    """`moe_layers`; without it, every `interleave_moe_layer_step`-th layer has experts."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the layer pattern."""
        count = num_layers_of(hf_config)
        numbers = hf_config.get("moe_layers")
        mark_read(hf_config, "interleave_moe_layer_step")
        if numbers is None:
            step = interval_of(hf_config, "interleave_moe_layer_step", 1)
            numbers = list(range(step - 1, count, step))
        if not isinstance(numbers, list) or not all(is_int(number) for number in numbers):
            raise ConfigError(f"config.json has moe_layers={numbers!r}, which should be a list of whole numbers")
        return {"layer_pattern": shorten_pattern("".join("M" if i in numbers else "D" for i in range(count)))}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the numbers of the layers with experts."""
        return {"moe_layers": [i for i, layer in enumerate(model.layers) if layer.ffn.is_routed]}


_TENSORS = {
    **ffn_rules("ffn", "feed_forward"),
    **ffn_rules("ffn.shared", "feed_forward.shared_expert"),
    **layer_rules({"ffn.router.weight": "feed_forward.router.weight"}),
    **untransposed_experts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
}

LLAMA4_FAMILIES = (
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        (
            *attention_fields(1e-5, 5e5),
            attention_bias(has_output=True),
            ChunkedLayers(),
            InterleavedExperts(),
            num_experts("num_local_experts"),
            *renamed(
                intermediate_size_mlp=("ffn.dense.intermediate_size", 16384), num_experts_per_tok=("ffn.moe.top_k", 1)
            ),
            Renamed(
                "intermediate_size", "ffn.moe.intermediate_size", 8192, copies=("ffn.moe.shared.intermediate_size",)
            ),
            Constants(
                {
                    "rope.interleaved": True,
                    "ffn.moe.router": "sigmoid",
                    "ffn.moe.router.normalize": False,
                    "ffn.moe.probs_on_input": True,
                }
            ),
        ),
        layouts(_TENSORS, experts=({},)),
        multimodal=MultimodalFolder("llama4", r"(vision_model|multi_modal_projector)\..*", {"language_model.": ""}),
        default_keys={"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "num_local_experts": 16},
    ),
)
"""Families in the order in which an export without --family tries them."""
