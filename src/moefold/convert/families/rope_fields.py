"""Converter of the RoPE parameters of config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moefold.config.base.part import default_of_field, describe_part, settings_of
from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import REQUIRED, Renamed, is_int, setting_of
from moefold.convert.families.known_keys import Json, mark_read
from moefold.errors import ConfigError


@dataclass(frozen=True)
class RopeParameters:
    """RoPE parameters: `rope_parameters`, or, in older folders, `rope_theta` and `rope_scaling`."""

    theta: float
    is_required: bool = False
    """If True, refuse an absent key, for families whose default is not "no scaling"."""
    fraction: float = 0.0
    """Default of partial_rotary_factor. 0: the family rotates all dims."""
    rotary_dim_key: str = ""
    """Key of older folders with the number of rotated dims, read if there is no partial_rotary_factor."""
    has_mscale: bool = False
    """True if only the scaling "longrope" is allowed, with its attention factors in short_mscale and long_mscale
    (Phi-3.5-MoE)."""
    scales_scores: bool = False
    """True if yarn's mscale_all_dim also scales the scores (DeepSeek-V2 and other families with latent attention)."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read theta and the RoPE scaling."""
        # As in transformers, the older key takes precedence.
        mark_read(hf_config, *_OUTER_KEYS)
        scaling = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
        if hf_config.get("rope_scaling"):
            mark_read(hf_config, "rope_parameters")
        if not scaling and self.is_required:
            raise ConfigError("config.json lacks rope_parameters")
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"config.json has rope_parameters={scaling!r}, which should be an object")
        rope: dict[str, Any] = {"rope_theta": self.theta, "rope_type": "default"}
        rope |= {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
        rope |= {"rope_type": scaling["type"]} if "type" in scaling else {}
        rope |= {key: scaling[key] for key in _ROPE_KEYS if key in scaling}
        if rope["rope_type"] == "deepseek_yarn":
            rope["rope_type"] = "yarn"
        if "mrope_section" in scaling:
            mark_read(scaling, "interleaved")
        kind = rope["rope_type"]
        keys = Renamed("rope_theta", "rope.theta").read(rope) | self._read_fraction(rope, hf_config)
        if kind == "default":
            return keys
        if kind == "dynamic" and scaling.get("alpha"):
            # Hunyuan's folders: a fixed factor of theta, not a dynamic one.
            rope["alpha"] = scaling["alpha"]
            return {**keys, **_read(kind, rope)}
        kinds = ("default", LONGROPE) if self.has_mscale else tuple(k for k in sorted(_kinds()) if k != "dynamic")
        if not isinstance(kind, str) or kind not in kinds:
            legal = ", ".join(map(repr, kinds))
            raise ConfigError(f"config.json has rope_type={kind!r}, which moefold does not compute; only {legal}")
        # As in transformers: the original length outside of rope_parameters has precedence, and the context length of
        # the model replaces an absent one.
        if hf_config.get("original_max_position_embeddings") is not None:
            rope["original_max_position_embeddings"] = hf_config["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", hf_config.get("max_position_embeddings"))
        if kind == LONGROPE:
            return {**keys, "rope.scaling": _kinds()[kind], **self._read_longrope(rope, hf_config)}
        if self.scales_scores and kind != "yarn" and rope.get("mscale_all_dim"):
            raise ConfigError(
                f"config.json has mscale_all_dim={rope['mscale_all_dim']!r} of rope_type={kind!r}, with which moefold "
                "does not scale scores; only of 'yarn'"
            )
        if kind == "yarn":
            self._resolve_yarn(rope, hf_config)
        return {**keys, **_read(kind, rope)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write `rope_parameters` like transformers 5."""
        part = model.rope.scaling
        if _kinds().get(part.hf_type) != part.kind:
            raise ConfigError(f"transformers has no rope_type for {describe_part(part)}")
        fraction = {"partial_rotary_factor": setting_of(model, "attention.rope_fraction")} if self.fraction else {}
        if part.hf_type == "default":
            return {"rope_parameters": {"rope_theta": model.rope.theta, "rope_type": "default"} | fraction}
        values: dict[str, Any] = {"rope_type": part.hf_type, "rope_theta": model.rope.theta} | fraction
        if part.hf_type == LONGROPE:
            return {"rope_parameters": values | self._write_longrope(part)}
        if part.hf_type == "dynamic":
            values["factor"] = 1.0
        for entry in _entries(part.kind):
            if entry.default is REQUIRED or setting_of(model, entry.key) != entry.default:
                values |= entry.write(model)
        return {"rope_parameters": values}

    def _read_longrope(self, rope_keys: Json, hf_config: Json) -> dict[str, Any]:
        """Read the factors of each pair and the attention factors of LongRoPE."""
        keys = _ORIGINAL_SEQ_LEN.read(rope_keys)
        keys |= Renamed("factor", "rope.scaling.factor", 1.0).read({"factor": _factor_of(rope_keys, hf_config)})
        for name in ("short", "long"):
            factors = rope_keys.get(f"{name}_factor")
            if not isinstance(factors, list):
                raise ConfigError(f"config.json has {name}_factor={factors!r}, which should be a list of numbers")
            pair = f"{name}_factor"
            keys[f"rope.scaling.{name}_factors"] = tuple(
                Renamed(pair, "rope.scaling.factor").read({pair: value})["rope.scaling.factor"] for value in factors
            )
            mscale = f"{name}_mscale" if self.has_mscale else "attention_factor"
            default = REQUIRED if self.has_mscale else 0.0
            keys |= Renamed(mscale, f"rope.scaling.{name}_mscale", default).read(rope_keys)
            if rope_keys.get(mscale) is not None and keys[f"rope.scaling.{name}_mscale"] <= 0:
                raise ConfigError(f"config.json has {mscale}={rope_keys[mscale]!r}, which should be above 0")
        return keys

    def _resolve_yarn(self, keys: dict[str, Any], hf_config: Json) -> None:
        """Remove the keys that transformers ignores: mscale next to attention_factor, or without mscale_all_dim."""
        keys["factor"] = _factor_of(keys, hf_config)
        if keys.get("attention_factor") is not None or not (keys.get("mscale") and keys.get("mscale_all_dim")):
            keys["mscale"] = None
        if not keys["mscale"] and not self.scales_scores:
            keys["mscale_all_dim"] = None
        for key in ("beta_fast", "beta_slow"):
            keys[key] = keys.get(key) or None

    def _write_longrope(self, part: Any) -> dict[str, Any]:
        """Write the parameters of LongRoPE. Settings without a key of the family do not read back."""
        values: dict[str, Any] = {
            "original_max_position_embeddings": part.original_seq_len,
            "factor": part.factor,
            "short_factor": list(part.short_factors),
            "long_factor": list(part.long_factors),
        }
        if self.has_mscale:
            return values | {"short_mscale": part.short_mscale, "long_mscale": part.long_mscale}
        return values | ({"attention_factor": part.short_mscale} if part.short_mscale else {})

    def _read_fraction(self, keys: Json, hf_config: Json) -> dict[str, Any]:
        """Read the share of the head dims that RoPE rotates."""
        fraction = keys.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
        if not self.fraction:
            if fraction not in (None, 1, 1.0):
                raise ConfigError(
                    "config.json has a partial_rotary_factor, which moefold does not read for this family"
                )
            return {}
        rotary_dim = hf_config.get(self.rotary_dim_key)
        head_dim = hf_config.get("head_dim")
        if fraction is None and rotary_dim is not None:
            if not is_int(rotary_dim) or not is_int(head_dim) or not 0 < rotary_dim <= head_dim:
                raise ConfigError(f"config.json has {self.rotary_dim_key}={rotary_dim!r} of head_dim={head_dim!r}")
            return {"attention.rope_fraction": rotary_dim / head_dim}
        return Renamed("partial_rotary_factor", "attention.rope_fraction", self.fraction).read(
            {"partial_rotary_factor": fraction}
        )


@cache
def _kinds() -> dict[str, str]:
    """Return the kind of each RoPE scaling by its `rope_type`."""
    return {find_part("rope_scaling", kind).hf_type: kind for kind in built_in_kinds("rope_scaling")}


@cache
def _entries(kind: str) -> tuple[Renamed, ...]:
    """Return the parameters of a kind of RoPE scaling in `rope_parameters`, except theta."""
    part: Any = find_part("rope_scaling", kind)
    return tuple(
        Renamed(
            part.hf_names.get(setting, setting),
            f"rope.scaling.{setting}",
            default_of_field(part, setting) if setting in part.hf_optional else REQUIRED,
        )
        for setting in settings_of(part)
    )


def _read(rope_type: str, keys: Json) -> dict[str, Any]:
    """Read the kind of a RoPE scaling and its parameters."""
    kind = _kinds()[rope_type]
    return {"rope.scaling": kind} | {key: value for entry in _entries(kind) for key, value in entry.read(keys).items()}


def _factor_of(keys: Json, hf_config: Json) -> Any:
    """Return the scaling factor. If absent, it is the ratio of both context lengths, as in transformers."""
    factor = keys.get("factor")
    longest = hf_config.get("max_position_embeddings")
    original = keys.get("original_max_position_embeddings")
    if factor is None and is_int(longest) and is_int(original) and longest > original > 0:
        return longest / original
    return factor


LONGROPE = "longrope"
_OUTER_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "mrope_section",
    "mrope_interleaved",
)
"""Keys of all scalings. Each scaling uses some of them. For text, the axes of multimodal RoPE (M-RoPE) have equal
positions, so that its keys have no effect."""
_ORIGINAL_SEQ_LEN = Renamed("original_max_position_embeddings", "rope.scaling.original_seq_len")
