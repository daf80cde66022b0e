"""The config.json of an exported folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moefold import __version__
from moefold.checkpoint.folder import CheckpointMeta, model_differences, model_sizes
from moefold.config.schema import ModelConfig
from moefold.convert.families import Family
from moefold.convert.further_layer import is_further
from moefold.convert.hf_config import model_of, read_hf_config
from moefold.convert.manifest import Manifest
from moefold.convert.safetensors_file import DTYPES
from moefold.errors import ConfigError

TRAVELLING_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache")
"""Keys of a config.json that stay true when the model it came with has been changed."""
FURTHER_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True)
class Origin:
    """What came with the weights from Hugging Face."""

    companions: Path | None
    """Where it is."""
    manifest: Manifest | None
    """Of the folder that they were imported from, if it was of the family."""

    def config(self) -> dict[str, Any]:
        """The keys of its config.json; none if there is none."""
        if self.companions is None or not (self.companions / "config.json").is_file():
            return {}
        return read_hf_config(self.companions)

    def had_types(self, dtypes: Mapping[str, str]) -> bool:
        """Whether its tensors had these types, whatever its config.json says."""
        came = {} if self.manifest is None else self.manifest.tensors
        return all(name in came and came[name].dtype == dtype for name, dtype in dtypes.items())

    def had_no_further_layers(self, model: ModelConfig) -> bool:
        """Whether it held no layers of multi-token prediction, whatever its config.json counts."""
        names = () if self.manifest is None else self.manifest.tensors
        return self.manifest is not None and not any(is_further(name, model.num_layers) for name in names)


def write_config(
    draft: Path,
    family: Family,
    model: ModelConfig,
    meta: CheckpointMeta,
    dtypes: Mapping[str, str],
    origin: Origin,
    token_ids: Mapping[str, int | None],
) -> None:
    """The config.json that came along where it still says what is computed, else a new one with its token ids.

    The given token ids win over those that came along.
    """
    came, dtype = origin.config(), _word(dtypes)
    before = _model_in(came, origin.companions) if came.get("model_type") == family.name else None
    # Whether layers of multi-token prediction are there changes that count alone.
    if before is not None and not model_differences(model_sizes(replace(before, mtp_layers=model.mtp_layers)), model):
        keys = dict(came)
        if before.mtp_layers != model.mtp_layers and (model.mtp_layers or not origin.had_no_further_layers(model)):
            keys = {key: value for key, value in came.items() if key not in FURTHER_KEYS}
            keys[FURTHER_KEYS[0]] = model.mtp_layers
        keys |= token_ids
        if keys == came and (origin.had_types(dtypes) or came.get("dtype", came.get("torch_dtype", dtype)) == dtype):
            return
    else:
        keys = family.write(model)
        keys |= {"max_position_embeddings": longest(model, meta), "moefold_version": __version__}
        keys |= {key: came[key] for key in TRAVELLING_KEYS if key in came} | {**token_ids}
    keys.pop("torch_dtype", None)
    keys["dtype"] = dtype
    (draft / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def longest(model: ModelConfig, meta: CheckpointMeta) -> int:
    """Positions that the model is said to take: those that the run trained on, or those of the stretched rotation."""
    is_stretched = model.rope_scaling in ("llama3", "yarn")
    stretched = round(model.rope_original_seq_len * model.rope_scaling_factor) if is_stretched else 0
    return max(int(meta.order.get("seq_len", 0)), stretched) or 2048


def _model_in(came: Mapping[str, Any], companions: Path | None) -> ModelConfig | None:
    try:
        return model_of(came, companions or Path())
    except ConfigError:
        return None


def _word(dtypes: Mapping[str, str]) -> str:
    """The type of a folder, as config.json spells it: that of most tensors."""
    kinds = list(dtypes.values())
    return str(DTYPES[max(sorted(set(kinds)), key=kinds.count)]).removeprefix("torch.")
