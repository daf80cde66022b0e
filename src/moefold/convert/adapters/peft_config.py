"""Reading of adapter_config.json, the settings of a folder of PEFT."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json
from moefold.convert.families.known_keys import (
    VOID,
    KeyReader,
    KeyReport,
    KnownKeys,
    classify_keys,
    declared_keys,
    join_reports,
    neutral_keys,
)
from moefold.convert.preflight import resolve_weights_folder
from moefold.data.input_paths import ADAPTER_CONFIG_FILE
from moefold.errors import ConfigError
from moefold.message_text import format_list

WEIGHTS_FILE = "adapter_model.safetensors"
CONSTANT_KEYS: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "use_dora": False,
    "lora_bias": False,
}
"""Keys of adapter_config.json with their only legal value. They may be missing or empty."""
PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights, other than true and false, that set initial adapters and keep the base weights."""
_READ_KEYS = ("r", "lora_alpha", "use_rslora", "base_model_name_or_path", "rank_pattern", "alpha_pattern")


def inspect_peft_folder(folder: Path, ignored_keys: Collection[str] = ()) -> tuple[dict[str, Any], KeyReport]:
    """Read adapter_config.json, and sort its keys. Refuse adapters of another kind, and those without safetensors."""
    path = folder / ADAPTER_CONFIG_FILE
    try:
        keys = read_json(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is not readable JSON ({error}); repair it or copy it again") from None
    if not isinstance(keys, dict) or keys.get("peft_type") != "LORA":
        kind = keys.get("peft_type") if isinstance(keys, dict) else None
        raise ConfigError(f"{str(path)!r} has peft_type={kind!r}; moefold reads low-rank adapters, LORA")
    _check_initial_weights(path, keys.get("init_lora_weights"))
    for key, value in CONSTANT_KEYS.items():
        is_stacked = key in ("rank_pattern", "alpha_pattern") and _has_pattern_of_stacked_experts(keys, key)
        if not is_stacked and keys.get(key, value) not in (value, None, {}, []):
            raise ConfigError(
                f"{str(path)!r} has {key}={keys[key]!r}, which moefold does not compute; it reads {value!r}"
            )
    _check_scale(path, keys)
    table = KnownKeys(neutral_keys("adapter"), {**declared_keys().adapter, **CONSTANT_KEYS}, "PEFT's LoRA", VOID)
    reader = KeyReader(keys)
    reader.read_keys |= {"peft_type", *_READ_KEYS}
    try:
        report = join_reports(ADAPTER_CONFIG_FILE, [classify_keys(ADAPTER_CONFIG_FILE, reader, table, ignored_keys)])
    except ConfigError as error:
        raise ConfigError(f"{str(folder)!r}: {error}") from None
    _check_weights_file(folder)
    return keys, report


def _check_initial_weights(path: Path, kind: Any) -> None:
    """Refuse adapters whose initialisation has changed the base weights: PEFT repeats it when it loads them."""
    if kind is None or isinstance(kind, bool) or (isinstance(kind, str) and kind.lower() in PLAIN_INITS):
        return
    raise ConfigError(
        f"{str(path)!r} has init_lora_weights={kind!r}, with which PEFT changes the base weights too (PiSSA, OLoRA, "
        "CorDA, LoftQ, LoRA-GA); save plain adapters with PEFT: "
        "model.save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL_ADAPTERS), or merge them"
    )


def _check_scale(path: Path, keys: Mapping[str, Any]) -> None:
    """Refuse invalid sizes of adapters, and different scales."""
    ranks = keys.get("rank_pattern") or {}
    if ranks.keys() != (keys.get("alpha_pattern") or {}).keys() or (ranks and keys.get("use_rslora")):
        raise ConfigError(
            f"{str(path)!r} gives some modules another scale than lora_alpha / r, by rank_pattern={ranks}, "
            f"alpha_pattern={keys.get('alpha_pattern')} and use_rslora={bool(keys.get('use_rslora'))}; moefold reads "
            "one scale for all modules"
        )
    rank = keys.get("r")
    alpha = keys.get("lora_alpha")
    is_legal = isinstance(rank, int) and not isinstance(rank, bool) and rank > 0
    if not is_legal or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ConfigError(f"{str(path)!r} has r={rank!r} and lora_alpha={alpha!r}, which are not sizes of adapters")


def _has_pattern_of_stacked_experts(keys: Mapping[str, Any], key: str) -> bool:
    """Return whether a pattern only doubles rank or alpha of gate and up projections that PEFT has stacked."""
    pattern = keys.get(key)
    single = keys.get("r" if key == "rank_pattern" else "lora_alpha")
    if not isinstance(pattern, dict) or not isinstance(single, int | float):
        return False
    return all(name.endswith("gate_up_proj") and value == 2 * single for name, value in pattern.items())


def _check_weights_file(folder: Path) -> None:
    if (folder / WEIGHTS_FILE).is_file():
        return
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{str(folder)!r} holds pickled weights ({format_list(pickled)}), which can run code when they are read; "
            "moefold reads safetensors files only: save the adapters again with PEFT (safe_serialization=True)"
        )
    raise ConfigError(
        f"{str(folder)!r} has {ADAPTER_CONFIG_FILE}, but no {WEIGHTS_FILE} with the adapters; copy it again"
    )


def resolve_base(folder: Path, keys: Mapping[str, Any], base: Path | None) -> Path:
    """Return the base weights of a folder of PEFT. A path may be relative to that folder."""
    base_name = keys.get("base_model_name_or_path") if base is None else str(base)
    paths = [] if not isinstance(base_name, str) or not base_name else [Path(base_name)]
    paths += [folder / path for path in paths if base is None and not path.is_absolute()]
    for path in paths:
        if path.is_dir():
            return resolve_weights_folder(path)
    key = "--base" if base is not None else "base_model_name_or_path"
    raise ConfigError(
        f"{str(folder)!r} has adapters of {key}={base_name!r}, which is not a folder here; name the model's folder "
        "with --base DIR"
    )


def check_adapters(folder: Path, base: Path | None, ignored_keys: Collection[str]) -> tuple[KeyReport, ...]:
    """Check the settings of a folder of PEFT and its base weights, without torch, and return the kinds of the keys."""
    keys, report = inspect_peft_folder(folder, ignored_keys)
    resolve_base(folder, keys, base)
    return (report,)
