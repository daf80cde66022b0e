"""config.json of an exported folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moefold import __version__
from moefold.checkpoint.checkpoint_dir import CheckpointMeta, model_differences, model_sizes
from moefold.config.schema import ModelConfig
from moefold.convert.families import Family
from moefold.convert.hf_config import parse_model_config, read_hf_config
from moefold.convert.hf_shards import Manifest
from moefold.convert.mtp import is_mtp_tensor
from moefold.convert.safetensors_file import DTYPES
from moefold.errors import ConfigError

COPIED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache")
"""Keys of a config.json that stay valid when its model has been changed."""
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True)
class WeightsOrigin:
    """Files and manifest of the Hugging Face folder that the weights came from."""

    sidecar_dir: Path | None
    """Folder of the sidecar files; None without any."""
    manifest: Manifest | None
    """Manifest of the imported folder, if it was of the same family."""

    def read_config(self) -> dict[str, Any]:
        """Return the keys of the original config.json; empty if there is none."""
        if self.sidecar_dir is None or not (self.sidecar_dir / "config.json").is_file():
            return {}
        return read_hf_config(self.sidecar_dir)

    def has_dtypes(self, dtypes: Mapping[str, str]) -> bool:
        """Return whether the original tensors had these dtypes, whatever config.json says."""
        original = {} if self.manifest is None else self.manifest.tensors
        return all(name in original and original[name].dtype == dtype for name, dtype in dtypes.items())

    def lacks_mtp_layers(self, model: ModelConfig) -> bool:
        """Return whether the original folder held no MTP layers, whatever its config.json says."""
        names = () if self.manifest is None else self.manifest.tensors
        return self.manifest is not None and not any(is_mtp_tensor(name, model.num_layers) for name in names)


def write_config(
    tmp_dir: Path,
    family: Family,
    model: ModelConfig,
    meta: CheckpointMeta,
    dtypes: Mapping[str, str],
    origin: WeightsOrigin,
    token_ids: Mapping[str, int | None],
) -> None:
    """Write config.json: the original one if it still describes the model, else a new one with its token ids.

    `token_ids` override those of the original.
    """
    original = origin.read_config()
    dtype = _folder_dtype(dtypes)
    before = _parse_model(original, origin.sidecar_dir) if original.get("model_type") == family.name else None
    # Adding or dropping MTP layers changes only their count.
    if before is not None and not model_differences(model_sizes(replace(before, mtp_layers=model.mtp_layers)), model):
        keys = dict(original)
        if before.mtp_layers != model.mtp_layers and (model.mtp_layers or not origin.lacks_mtp_layers(model)):
            keys = {key: value for key, value in original.items() if key not in MTP_KEYS}
            keys[MTP_KEYS[0]] = model.mtp_layers
        keys |= token_ids
        if keys == original and (
            origin.has_dtypes(dtypes) or original.get("dtype", original.get("torch_dtype", dtype)) == dtype
        ):
            return
    else:
        keys = family.write(model)
        keys |= {"max_position_embeddings": max_positions(model, meta), "moefold_version": __version__}
        keys |= {key: original[key] for key in COPIED_KEYS if key in original} | {**token_ids}
    keys.pop("torch_dtype", None)
    keys["dtype"] = dtype
    (tmp_dir / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def max_positions(model: ModelConfig, meta: CheckpointMeta) -> int:
    """Return max_position_embeddings: the trained sequence length, or the scaled RoPE context length if larger."""
    is_scaled = model.rope_scaling in ("llama3", "yarn")
    scaled_len = round(model.rope_original_seq_len * model.rope_scaling_factor) if is_scaled else 0
    return max(int(meta.order.get("seq_len", 0)), scaled_len) or 2048


def _parse_model(hf_config: Mapping[str, Any], sidecar_dir: Path | None) -> ModelConfig | None:
    try:
        return parse_model_config(hf_config, sidecar_dir or Path())
    except ConfigError:
        return None


def _folder_dtype(dtypes: Mapping[str, str]) -> str:
    """Return the dtype of most tensors, as config.json spells it."""
    kinds = list(dtypes.values())
    return str(DTYPES[max(sorted(set(kinds)), key=kinds.count)]).removeprefix("torch.")
