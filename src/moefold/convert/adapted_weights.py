"""Weights with their adapters merged: W + (alpha / r) B A of each matrix, computed for the regions that are read."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.adapter_settings import check_base
from moefold.checkpoint.checkpoint_dir import check_integrity
from moefold.checkpoint.save_load import OPTIONAL_BUFFER_SUFFIX
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.comm.groups import current_world
from moefold.convert.hf_config import is_hf_folder
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.known_keys import ALL_KEYS
from moefold.convert.preflight import resolve_weights_folder
from moefold.convert.tensor_mapping import Region, Shape
from moefold.convert.weights import HfSource, WeightSource, load_shards
from moefold.cost.adapter_spec import adapter_names
from moefold.errors import ConfigError, format_list
from moefold.model.lora import product_region
from moefold.remote_path import to_path


def open_weights(path: Path, base: Path | None = None) -> WeightSource:
    """Open the weights of a checkpoint or of a Hugging Face folder, with adapters merged into their base weights.

    Args:
        path: the folder, as returned by `resolve_weights_folder`.
        base: the base weights of a checkpoint with adapters; None: those that its metadata names.

    Raises:
        ConfigError: the folder is neither of them, or damaged; the base weights do not exist or are others.
    """
    if is_hf_folder(path):
        return HfSource(open_hf_folder(path, ALL_KEYS))
    return open_checkpoint(path, base)


def open_checkpoint(path: Path, base: Path | None = None) -> "CheckpointWeights":
    """Open the weights of a checkpoint, as `open_weights`."""
    source = CheckpointSource(path)
    if not source.meta.lora:
        return source
    base = to_path(source.meta.lora["base"]) if base is None else resolve_weights_folder(base)
    check_base(source.meta.lora, base, str(path))
    return AdaptedSource(open_weights(base), source)


def load_merged_weights(path: Path, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards with the base weights of a checkpoint with adapters, and the adapters merged into them.

    Collective over all ranks, which share the check of the checkpoint's files. Each rank then reads its own shards.

    Raises:
        ConfigError: the checkpoint is damaged, or its base weights are gone or are others.
    """
    check_integrity(path, current_world())
    source = open_weights(path)
    stored = {n: b for n, b in buffers.items() if n in source.shapes or not n.endswith(OPTIONAL_BUFFER_SUFFIX)}
    load_shards(source, {**parameters, **stored}, str(path))


class AdaptedSource:
    """Weight source of a model with merged adapters; sums are computed in float32 at least.

    Args:
        adapters: the checkpoint with the adapters, kept as an attribute.

    Raises:
        ConfigError: the adapters are of another model.
    """

    def __init__(self, base: WeightSource, adapters: CheckpointSource) -> None:
        self._base = base
        self.adapters = adapters
        self.path = adapters.path
        self.meta = adapters.meta
        self._scale = self.meta.lora["alpha"] / self.meta.lora["rank"]
        self.shapes: Mapping[str, Shape] = base.shapes
        pairs = {weight: adapter_names(weight) for weight in base.shapes}
        self.adapted = frozenset(weight for weight, (a, _) in pairs.items() if a in adapters.shapes)
        used = {adapter for weight in self.adapted for adapter in pairs[weight]}
        wrong = sorted(adapters.shapes.keys() ^ used)
        wrong += [weight for weight in self.adapted if not _fits(base.shapes[weight], adapters, pairs[weight])]
        if wrong:
            raise ConfigError(
                f"checkpoint {str(self.path)!r} has adapters of another model than its base weights, which differ in "
                f"{format_list(wrong)}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor: float32 at least if it is merged."""
        dtype = self._base.dtype(name)
        if name not in self.adapted:
            return dtype
        return torch.promote_types(torch.promote_types(dtype, self.adapters.dtype(adapter_names(name)[0])), FLOAT)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the base weights."""
        return self._base.dtype(name)

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region; reads the rows of A and the columns of B that it needs."""
        values = self._base.read(name, region)
        if name not in self.adapted:
            return values
        dtype = self.dtype(name)
        product = product_region(name, region, self._read_adapter).to(dtype)
        self.adapters.clear_cache()
        merged: Tensor = values.to(dtype) + self._scale * product
        return merged

    def clear_cache(self) -> None:
        """Free the caches of both sources."""
        self._base.clear_cache()
        self.adapters.clear_cache()

    def _read_adapter(self, name: str, region: Region) -> Tensor:
        return self.adapters.read(name, _closed(region, self.adapters.shapes[name])).to(self._sum_dtype(name))

    def _sum_dtype(self, name: str) -> torch.dtype:
        return torch.promote_types(self.adapters.dtype(name), FLOAT)


CheckpointWeights = CheckpointSource | AdaptedSource
"""The weights of a checkpoint: as they are stored, or with its adapters merged."""
FLOAT = torch.float32


def _closed(region: Region, shape: Shape) -> Region:
    """Return a region whose slices all have a start and an end."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(region, shape, strict=True))


def _fits(shape: Shape, adapters: WeightSource, names: tuple[str, str]) -> bool:
    """Return whether the product of an adapter has the shape of its matrix."""
    a, b = (adapters.shapes.get(name, ()) for name in names)
    if len(shape) == 3 and len(a) == len(b) == 3:
        return (a[0], a[1], b[2]) == shape and b[0] == shape[0] and a[2] == b[1]
    return len(a) == len(b) == 2 and (b[0], a[1]) == shape and a[0] == b[1]
