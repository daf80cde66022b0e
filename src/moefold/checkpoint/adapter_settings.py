"""Description of adapters in the metadata of a checkpoint: their settings and base weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefold.checkpoint.manifest import MANIFEST_FILE
from moefold.config.sections.lora import LoraConfig
from moefold.errors import ConfigError

SAMPLE_BYTES = 1 << 16
"""Bytes at each end of a file of weights that the digest of a folder without a manifest reads."""


def adapter_settings(lora: LoraConfig, base: str, base_digest: str) -> dict[str, Any]:
    """Return the metadata of adapters: rank, alpha, targets, and the folder of the base weights with its digest."""
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": list(lora.targets),
        "base": base,
        "base_digest": base_digest,
    }


def check_adapter_settings(settings: Any) -> None:
    """Raise TypeError for values whose types `adapter_settings` does not return. {} means no adapters."""
    if not isinstance(settings, dict):
        raise TypeError("lora is not an object")
    if not settings:
        return
    rank = settings.get("rank")
    alpha = settings.get("alpha")
    targets = settings.get("targets")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise TypeError(f"lora.rank is {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise TypeError(f"lora.alpha is {alpha!r}")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise TypeError(f"lora.targets is {targets!r}")
    if not all(isinstance(settings.get(key), str) for key in ("base", "base_digest")):
        raise TypeError("lora.base is not a text")


def adapters_unsupported_reason(stored: Mapping[str, Any], lora: LoraConfig, path: str) -> str:
    """Return the reason why a checkpoint's adapters prevent a run from continuing, or empty if it can continue.

    Args:
        stored: `adapter_settings` of the checkpoint, or empty if it has all weights.
    """
    if not stored and not lora.rank:
        return ""
    if not stored:
        return (
            f"is of a run that trains all weights, and lora.rank={lora.rank} trains only adapters; begin a new run "
            f"with its weights, in another run.dir: checkpoint.init_from={path!r}"
        )
    if not lora.rank:
        return (
            f"only has adapters of rank {stored['rank']}, and lora.rank=0 trains all weights; set the section [lora] "
            f"as it was, or begin a new run with the merged weights, in another run.dir: checkpoint.init_from={path!r}"
        )
    settings = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}
    diffs = [
        f"lora.{key} {stored[key]!r} there, {value!r} here" for key, value in settings.items() if stored[key] != value
    ]
    return f"has other adapters: {'; '.join(diffs)}; set [lora] as it was, or another run.dir" if diffs else ""


def folder_digest(folder: Path) -> str:
    """Return a digest of a folder of weights: of its manifest if it is a checkpoint, else of its safetensors files.

    For safetensors files it reads names, sizes and both ends, which hold the header and the last values.
    """
    digest = hashlib.sha256()
    if (folder / MANIFEST_FILE).is_file():
        digest.update((folder / MANIFEST_FILE).read_bytes())
        return digest.hexdigest()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_base(settings: Mapping[str, Any], base: Path, checkpoint: str) -> None:
    """Check that a folder holds the weights that adapters were trained on.

    Raises:
        ConfigError: the folder does not exist, or its files have changed.
    """
    if not base.is_dir():
        raise ConfigError(
            f"checkpoint {checkpoint!r} has adapters of the weights in {str(base)!r}, which does not exist; put the "
            "folder back there, or export the adapters with moefold export --base DIR"
        )
    if settings["base_digest"] and folder_digest(base) != settings["base_digest"]:
        raise ConfigError(
            f"checkpoint {checkpoint!r} has adapters of other weights than {str(base)!r} has now; restore the folder, "
            "or name the one that the adapters were trained on"
        )
