"""Stored tensors of checkpoints: their list, and the differences of two checkpoints, without a model."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moefold.bounded_read import batch_by_size
from moefold.checkpoint.io_errors import translate_read_errors
from moefold.checkpoint.safe_metadata import SafeReader, check_tensor_files, read_metadata

BATCH_BYTES = 1 << 28
"""Bytes of each checkpoint in memory at a time, unless one tensor is larger."""


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    num_chunks: int
    """Number of shards that the ranks wrote."""


@dataclass(frozen=True)
class StoredTensorDifference:
    """Difference of one tensor between two checkpoints."""

    name: str
    what: str
    max_abs: float | None = None
    """Largest absolute difference of two values, or None if the tensors cannot be compared."""


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a checkpoint, by name.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    return [
        StoredTensor(
            name=name,
            shape=tuple(stored.size),
            dtype=str(stored.properties.dtype).removeprefix("torch."),
            size_bytes=_size_bytes(stored),
            num_chunks=len(stored.chunks),
        )
        for name, stored in sorted(_read_index(path).items())
    ]


def differing_tensors(first: Path, second: Path, prefix: str = "") -> list[StoredTensorDifference]:
    """Compare all tensors whose names begin with a prefix, bit by bit: -0 and 0 differ, equal NaNs do not.

    Raises:
        ConfigError: one of the checkpoints cannot be read.
    """
    first_index = _read_index(first)
    second_index = _read_index(second)
    names = sorted(name for name in first_index.keys() | second_index.keys() if name.startswith(prefix))
    diffs = []
    same = []
    for name in names:
        if name not in second_index or name not in first_index:
            diffs.append(StoredTensorDifference(name, f"only in the {'first' if name in first_index else 'second'}"))
        elif first_index[name].size != second_index[name].size:
            diffs.append(
                StoredTensorDifference(name, f"shape {list(first_index[name].size)} | {list(second_index[name].size)}")
            )
        elif first_index[name].properties.dtype != second_index[name].properties.dtype:
            diffs.append(
                StoredTensorDifference(
                    name, f"type {first_index[name].properties.dtype} | {second_index[name].properties.dtype}"
                )
            )
        else:
            same.append(name)
    for batch in batch_by_size(same, lambda name: _size_bytes(first_index[name]), BATCH_BYTES):
        left = _read_tensors(first, batch, first_index)
        right = _read_tensors(second, batch, second_index)
        diffs += [
            _compare(name, left[name], right[name]) for name in batch if not _is_bit_equal(left[name], right[name])
        ]
    return diffs


def _read_index(path: Path) -> dict[str, TensorStorageMetadata]:
    with translate_read_errors(path):
        metadata = read_metadata(path)
        check_tensor_files(path, metadata)
    stored = metadata.state_dict_metadata
    return {name: tensor for name, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}


def _read_tensors(path: Path, names: list[str], index: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    with translate_read_errors(path), warnings.catch_warnings():
        state = {name: torch.empty(index[name].size, dtype=index[name].properties.dtype) for name in names}
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: no_dist=True
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
    return state


def _size_bytes(stored: TensorStorageMetadata) -> int:
    return math.prod(stored.size) * stored.properties.dtype.itemsize


def _is_bit_equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().flatten().view(torch.uint8), second.contiguous().flatten().view(torch.uint8))


def _compare(name: str, first: Tensor, second: Tensor) -> StoredTensorDifference:
    apart = (first.double() - second.double()).abs()
    max_abs = apart.max().item()
    scale = max(first.double().abs().max().item(), second.double().abs().max().item())
    count = int((first != second).sum())
    summary = f"{count} of {first.numel()} values, by at most {max_abs:.3g} (largest value {scale:.3g})"
    return StoredTensorDifference(name, summary, max_abs)
