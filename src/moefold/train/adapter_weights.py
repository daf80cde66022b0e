"""Weights of a run that trains only adapters: the frozen base, and the initial adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.checkpoint.adapter_settings import adapter_settings, check_base, folder_digest
from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.integrity import check_integrity
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.lora import LoraConfig
from moefold.cost.adapter_spec import is_adapter
from moefold.errors import ConfigError
from moefold.parallel.parallel_model import ParallelModel
from moefold.remote_path import to_path


@dataclass(frozen=True)
class AdapterWeights:
    """The base weights of a run, with the metadata that its checkpoints store."""

    base: Path | None
    """Folder of the base weights. None means random weights of the seed, which are not in a file."""
    settings: dict[str, Any]
    """Settings of the adapters for checkpoints, see `adapter_settings`."""

    @staticmethod
    def open(
        lora: LoraConfig, checkpoint: CheckpointConfig, groups: ParallelGroups, resumed: Path | None
    ) -> "AdapterWeights":
        """Find the base weights, in the checkpoint to resume from or in checkpoint.init_from. It is collective.

        Args:
            resumed: the checkpoint to resume from, or None for a new run.

        Raises:
            ConfigError: the base weights are gone or have changed. Raised on every rank.
        """
        source: tuple[Path | None, str, str] = (None, "", "")
        if groups.rank == 0:
            source = _find_base(checkpoint, resumed)
        base, digest, reason = current_world().all_gather_object(source)[0]
        if reason:
            raise ConfigError(reason)
        return AdapterWeights(base, adapter_settings(lora, "" if base is None else str(base), digest))

    @staticmethod
    def of_settings(settings: dict[str, Any]) -> "AdapterWeights":
        """Return the base weights of a run that continues in this process, from the settings of its checkpoints."""
        return AdapterWeights(to_path(settings["base"]) if settings["base"] else None, settings)


def load_initial_adapters(
    lora: LoraConfig, checkpoint: CheckpointConfig, model: ParallelModel, folder: str = ""
) -> Path | None:
    """Load the adapters that lora.init_from names, and return their checkpoint, or None without any. It is collective.

    Args:
        folder: the checkpoint that has them. "": the newest one of lora.init_from.

    Raises:
        ConfigError: they belong to other matrices, or the checkpoint is damaged.
    """
    if not lora.init_from:
        return None
    from moefold.convert.preflight import resolve_weights_folder, weights_path
    from moefold.convert.weight_sources import load_shards

    world = current_world()
    path: Path = world.all_gather_object(resolve_weights_folder(weights_path(folder or lora.init_from)))[0]
    check_integrity(path, world, checks_hashes=checkpoint.verify)
    adapters = {name: p for name, p in model.named_parameters.items() if is_adapter(name)}
    load_shards(CheckpointSource(path), adapters, str(path))
    return path


def _find_base(checkpoint: CheckpointConfig, resumed: Path | None) -> tuple[Path | None, str, str]:
    """Return the folder of the base weights, its digest, and the reason why they cannot be used."""
    try:
        if resumed is not None:
            stored = read_meta(resumed).lora
            base = to_path(stored["base"]) if stored["base"] else None
            if base is not None:
                check_base(stored, base, str(resumed))
            return base, stored["base_digest"], ""
        if not checkpoint.init_from:
            return None, "", ""
        from moefold.convert.preflight import resolve_weights_folder, weights_path

        base = resolve_weights_folder(weights_path(checkpoint.init_from)).resolve()
        return base, folder_digest(base), ""
    except ConfigError as error:
        return None, "", str(error)
