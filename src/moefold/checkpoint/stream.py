"""Checkpoints that are never in memory as a whole: read region by region, written chunk by chunk."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moefold.checkpoint.folder import CheckpointMeta, read_meta
from moefold.checkpoint.manifest import FileRecord, record_file, write_manifest
from moefold.checkpoint.metadata_file import SafeReader
from moefold.checkpoint.store import explained, refuse_broken_files
from moefold.errors import ConfigError
from moefold.launch.crew import Crew

CHUNK_BYTES = 1 << 25
"""Tensors are written in chunks of whole rows of about this size: what a reader has to read for a part of them."""

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Chunk:
    """Some rows (first indices) of a tensor."""

    name: str
    start: int
    stop: int


def chunks_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Chunk]:
    """Cut a tensor into chunks of at most CHUNK_BYTES, or of one row where rows are larger."""
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, shape[0], rows):
        yield Chunk(name, start, min(shape[0], start + rows))


class CheckpointSource:
    """The weights in a checkpoint; no process group is needed.

    Rows of the last tensors that were read are kept, as far as their chunks go, until `forget`.

    Raises:
        ConfigError: the folder is no complete checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: CheckpointMeta = read_meta(path)
        self._reader = SafeReader(path)
        with self._explained():
            self._metadata: Metadata = self._reader.read_metadata()
            refuse_broken_files(path, self._metadata)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._stored = {
            name.removeprefix("model."): stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if name.startswith("model.") and isinstance(stored, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(stored.size) for name, stored in self._stored.items()}
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def dtype(self, name: str) -> torch.dtype:
        """How a tensor is stored."""
        return self._stored[name].properties.dtype

    def read(self, name: str, region: Region) -> Tensor:
        """The values of a region, read with all rows of the chunks that it touches."""
        if not region:
            return self._read(name, ())
        rows = region[0]
        start, kept = self._kept.get(name, (0, None))
        if kept is None or rows.start < start or rows.stop > start + len(kept):
            self._kept.pop(name, None)
            start, stop = self._whole_chunks(name, rows)
            full = tuple(slice(0, size) for size in self.shapes[name][1:])
            kept = self._read(name, (slice(start, stop), *full))
            self._kept[name] = (start, kept)
        return kept[(slice(rows.start - start, rows.stop - start), *region[1:])]

    def forget(self) -> None:
        """Free what was kept."""
        self._kept.clear()

    def _whole_chunks(self, name: str, rows: slice) -> tuple[int, int]:
        spans = [(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in self._stored[name].chunks]
        touched = [span for span in spans if span[0] < rows.stop and span[1] > rows.start]
        return min(first for first, _ in touched), max(last for _, last in touched)

    def _read(self, name: str, region: Region) -> Tensor:
        sizes = [part.stop - part.start for part in region]
        values = torch.empty(sizes, dtype=self.dtype(name))
        box = ChunkStorageMetadata(torch.Size([part.start for part in region]), torch.Size(sizes))
        items = create_read_items_for_chunk_list(f"model.{name}", self._stored[name], [box])
        try:
            with self._explained():
                self._reader.read_data(LoadPlan(items), _IntoOne(values)).wait()
        except RuntimeError as error:
            # What torch says of a broken archive.
            raise ConfigError(f"checkpoint {str(self.path)!r} is damaged: {name} cannot be read: {error}") from error
        return values

    def _explained(self) -> AbstractContextManager[None]:
        return explained(f"checkpoint {str(self.path)!r} cannot be read")


class _IntoOne(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self._values = values

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The place of one box."""
        place = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._values[tuple(slice(start, start + size) for start, size in place)]


def write_chunks(
    draft: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    mine: Sequence[Chunk],
    read: Callable[[Chunk], Tensor],
) -> None:
    """Write the weights of a checkpoint, of which this process holds one chunk at a time.

    Collective where a process group is joined: together the processes give every chunk of every tensor once.

    Args:
        draft: an existing folder.
        shapes: of the tensors, by name.
        dtypes: of the tensors.
        mine: the chunks that this process writes, in the order of its file.
        read: gives the values of a chunk, in memory that nothing else uses.
    """
    planner = _Streaming(shapes, dtypes, mine, read)
    with explained(f"the checkpoint cannot be written to {str(draft)!r}"), warnings.catch_warnings():
        # Without a process group DCP says that there is none.
        warnings.simplefilter("ignore")
        dcp.save({}, storage_writer=FileSystemWriter(draft), planner=planner)


def seal(draft: Path, crew: Crew) -> None:
    """Write the manifest of a draft that has all its other files; collective over the crew, which share the reading."""
    names = sorted(path.name for path in draft.iterdir() if path.is_file())
    mine = {name: record_file(draft / name) for name in names[crew.rank :: crew.size]}
    records: dict[str, FileRecord] = {}
    for part in crew.gather(mine):
        records |= part
    if crew.is_first:
        write_manifest(draft, records)


class _Streaming(DefaultSavePlanner):
    """Reads each chunk when it is due to be written, and frees it when the next one is."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        mine: Sequence[Chunk],
        read: Callable[[Chunk], Tensor],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes, self._dtypes, self._read = shapes, dtypes, read
        self._chunks = {(f"model.{chunk.name}", chunk.start): chunk for chunk in mine}
        self._last: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """One item for each of my chunks."""
        self.plan = SavePlan([self._item(name, chunk) for (name, _), chunk in self._chunks.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a chunk."""
        if self._last is not None:
            # The writer of torch 2.13 holds on to a tensor of each name until its file is complete.
            self._last.untyped_storage().resize_(0)
        assert write_item.index.offset is not None
        start = write_item.index.offset[0] if write_item.index.offset else 0
        self._last = self._read(self._chunks[(write_item.index.fqn, start)])
        return self._last

    def _item(self, name: str, chunk: Chunk) -> WriteItem:
        shape = self._shapes[chunk.name]
        offsets = torch.Size([chunk.start, *(0 for _ in shape[1:])])
        sizes = torch.Size([chunk.stop - chunk.start, *shape[1:]])
        return WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties(dtype=self._dtypes[chunk.name]),
                size=torch.Size(shape),
            ),
        )
