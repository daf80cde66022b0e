"""The library's index of a checkpoint, `.metadata`, is a pickle: here it is read so that it can run nothing."""

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moefold.checkpoint.manifest import check_name

METADATA_FILE = ".metadata"
_CLASSES: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (
            metadata,
            (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (filesystem, ("_StorageInfo",)),
        (torch, ("Size",)),
    )
    for name in names
}
_BROKEN = (
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What a pickle raises that is none, or not of this kind."""


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint of the library without running what a stranger may have put into its index.

    The tensors themselves are read by `torch.load(weights_only=True)`.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `read_metadata`."""
        found = read_metadata(Path(self.path))
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a checkpoint folder.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such index, asks for anything but the plain data of one, or leads out of the folder.
    """
    with (folder / METADATA_FILE).open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except _BROKEN as error:
            raise ValueError(f"{METADATA_FILE} is no index of a checkpoint: {error or type(error).__name__}") from None
    if not (
        isinstance(found, Metadata)
        and isinstance(found.state_dict_metadata, dict)
        and isinstance(found.storage_data, dict)
        and all(isinstance(stored, TensorStorageMetadata) for stored in found.state_dict_metadata.values())
        and all(_is_plain(info) for info in found.storage_data.values())
    ):
        raise ValueError(f"{METADATA_FILE} is no index of a checkpoint of tensors")
    for info in found.storage_data.values():
        check_name(folder, info.relative_path)
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module.startswith("pathlib"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which an index has no use for")


def _layout(name: str) -> torch.layout:
    if name != str(torch.strided):
        raise ValueError(f"layout {name!r}")
    return torch.strided


def _is_plain(info: Any) -> bool:
    return (
        isinstance(info, filesystem._StorageInfo)
        and isinstance(info.relative_path, str)
        and isinstance(info.offset, int)
        and isinstance(info.length, int)
        and min(info.offset, info.length) >= 0
        and not info.transform_descriptors
    )
