"""Streaming checkpoint I/O: tensors are read by region and written by chunk, never as a whole checkpoint."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, read_meta
from moefold.checkpoint.hashed_files import HashingThread, HashingWriter, OrderedHashes
from moefold.checkpoint.io_errors import translate_io_errors, translate_read_errors
from moefold.checkpoint.manifest import (
    FileDigest,
    digest_file,
    read_manifest,
    regular_file,
    validate_hashes,
    write_manifest,
)
from moefold.checkpoint.safe_metadata import check_tensor_files, read_metadata
from moefold.checkpoint.shard_file import OnArchive, StoredShard, read_shard
from moefold.comm.groups import World
from moefold.comm.private_torch import StorageInfo
from moefold.errors import ConfigError
from moefold.message_text import format_list

CHUNK_BYTES = 1 << 25
"""Approximate size of a chunk of whole rows, the unit of reading."""

Region = tuple[slice, ...]
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunk:
    """Range of rows (first dimension) of a tensor."""

    name: str
    start: int
    stop: int


def split_into_chunks(name: str, shape: Sequence[int], dtype: torch.dtype) -> Iterator[TensorChunk]:
    """Split a tensor into chunks of at most CHUNK_BYTES, or of one row if a row is larger."""
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, shape[0], rows):
        yield TensorChunk(name, start, min(shape[0], start + rows))


class ReusedMemory:
    """Memory for tensors that are used one after another. The first touch of fresh memory costs more than a copy.

    Args:
        count: number of tensors that stay valid: a call overwrites older tensors than the last `count`.
    """

    def __init__(self, count: int = 1) -> None:
        self._blocks = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor on the CPU, whose storage has exactly its size."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        block = self._blocks.pop(0)
        if block.nbytes < num_bytes:
            block = torch.empty(num_bytes, dtype=torch.uint8)
        self._blocks.append(block)
        return torch.frombuffer(block.numpy(), dtype=dtype, count=math.prod(shape)).view(tuple(shape))


class CheckpointSource:
    """Weights in a checkpoint, read without a process group.

    The chunks that the last read of a tensor touched are cached until `clear_cache`.

    Attributes:
        on_archive: called with the bytes of each archive that `read` reads, if set.

    Raises:
        ConfigError: the folder is not a complete checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: CheckpointMeta = read_meta(path)
        with translate_read_errors(path):
            self._metadata: Metadata = read_metadata(path)
            check_tensor_files(path, self._metadata)
        self._stored = {
            name.removeprefix("model."): stored
            for name, stored in self._metadata.state_dict_metadata.items()
            if name.startswith("model.") and isinstance(stored, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(stored.size) for name, stored in self._stored.items()}
        self._cached_chunks: dict[str, dict[Offsets, Tensor]] = {}
        self.on_archive: OnArchive | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        return self._stored[name].properties.dtype

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region. It is a view of a chunk if the region is within one chunk."""
        chunks = {tuple(chunk.offsets): chunk for chunk in self._stored[name].chunks}
        boxes = {
            offsets: common
            for offsets, chunk in chunks.items()
            if (common := _intersect(region, offsets, tuple(chunk.sizes))) is not None
        }
        cached = self._cached_chunks.get(name, {})
        self._cached_chunks[name] = {offsets: cached[offsets] for offsets in boxes if offsets in cached}
        cached = {}
        for offsets in boxes:
            if offsets not in self._cached_chunks[name]:
                self._cached_chunks[name][offsets] = self._load(name, chunks[offsets])
        by_offset = {
            offsets: self._cached_chunks[name][offsets][_relative_to(box, offsets)] for offsets, box in boxes.items()
        }
        sizes = [span.stop - span.start for span in region]
        if len(by_offset) == 1 and list(next(iter(by_offset.values())).shape) == sizes:
            return next(iter(by_offset.values()))
        values = torch.empty(sizes, dtype=self.dtype(name))
        start = tuple(span.start for span in region)
        for offsets, stored in by_offset.items():
            values[_relative_to(boxes[offsets], start)] = stored
        return values

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows (first dimension) of a tensor. Nothing else is read from the files, and no cache is filled.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        stored = self._stored[name]
        shape = self.shapes[name]
        region = (rows, *(slice(0, size) for size in shape[1:]))
        values = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=self.dtype(name))
        for chunk in stored.chunks:
            offsets = tuple(chunk.offsets)
            common = _intersect(region, offsets, tuple(chunk.sizes))
            if common is not None:
                target = _relative_to(common, (rows.start, *(0 for _ in shape[1:])))
                values[target] = self._load(name, chunk, _relative_to(common, offsets)[0])
        return values

    def clear_cache(self) -> None:
        """Free the cached chunks."""
        self._cached_chunks.clear()

    def _load(self, name: str, chunk: ChunkStorageMetadata, rows: slice | None = None) -> Tensor:
        """Load a chunk, or some rows of it."""
        places = self._metadata.storage_data
        assert places is not None
        stored = StoredShard(name, places[MetadataIndex(f"model.{name}", chunk.offsets)], chunk.sizes, self.dtype(name))
        with translate_read_errors(self.path):
            regular_file(self.path, stored.storage_info.relative_path)
            return read_shard(self.path, stored, rows, self.on_archive)


TENSOR_FILES = "*.distcp"
"""Names of the files of tensors. The other files of a checkpoint are descriptions."""


def check_descriptions(path: Path) -> None:
    """Compare the files of a checkpoint without tensors with their hashes.

    Raises:
        ConfigError: a file is missing or differs.
    """
    _raise_if_damaged(path, [name for name in read_manifest(path) if not fnmatch(name, TENSOR_FILES)])


@contextmanager
def hash_checked_reads(source: CheckpointSource) -> Iterator[None]:
    """Compare the tensor files of a local checkpoint with their hashes, in the same pass if they are read in order.

    A file that is not read whole, or in another order, is read at the end.

    Raises:
        ConfigError: a file is missing or differs. It replaces errors that damage may have caused.
    """
    manifest = {name: entry for name, entry in read_manifest(source.path).items() if fnmatch(name, TENSOR_FILES)}
    hashes = OrderedHashes()

    def add(info: StorageInfo, content: memoryview) -> None:
        if info.relative_path in manifest:
            hashes.add(info.relative_path, manifest[info.relative_path].size_bytes, info.offset, content)

    source.on_archive = add
    try:
        with hashes:
            yield
    except ConfigError:
        _raise_if_damaged(source.path, list(manifest))
        raise
    finally:
        source.on_archive = None
    digests = hashes.complete()
    _raise_if_damaged(source.path, [name for name, entry in manifest.items() if digests.get(name) != entry.sha256])


def _raise_if_damaged(path: Path, names: Sequence[str]) -> None:
    """Read and hash some files."""
    if faults := validate_hashes(path, read_manifest(path), names):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}")


def _intersect(region: Region, start: Offsets, size: Offsets) -> Region | None:
    """Return the intersection of a region and a box, or None if it is empty."""
    common = tuple(
        slice(max(span.start, a), min(span.stop, a + n)) for span, a, n in zip(region, start, size, strict=True)
    )
    return None if any(span.start >= span.stop for span in common) else common


def _relative_to(region: Region, start: Offsets) -> Region:
    return tuple(slice(span.start - a, span.stop - a) for span, a in zip(region, start, strict=True))


def write_chunks(
    tmp: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    local_chunks: Sequence[TensorChunk],
    read: Callable[[TensorChunk], Tensor],
) -> dict[str, FileDigest]:
    """Write the weights of a checkpoint, with one chunk at a time in memory, and return the digests of the files.

    Collective if a process group is initialised: together the processes write every chunk of every tensor once.

    Args:
        local_chunks: the chunks that this process writes, in the order of its file.
        read: returns the values of a chunk, which are valid until its next call.
    """
    planner = _StreamingPlanner(shapes, dtypes, local_chunks, read)
    with translate_io_errors(f"the checkpoint cannot be written to {str(tmp)!r}"), warnings.catch_warnings():
        # DCP warns if there is no process group.
        warnings.simplefilter("ignore")
        with HashingThread() as thread:
            # On a machine with CUDA, DCP would read chunks ahead, and sort them by size.
            writer = HashingWriter(tmp, thread, per_thread_copy_ahead=0)
            dcp.save({}, storage_writer=writer, planner=planner)
    return writer.digests


def write_manifest_in_parallel(tmp: Path, world: World, written: Mapping[str, FileDigest] | None = None) -> None:
    """Write the manifest of an otherwise complete folder. It is collective over `world`, which shares the hashing.

    Args:
        written: digests of the files that this process hashed while it wrote them.
    """
    records = world.merge(written or {})
    names = sorted(path.name for path in tmp.iterdir() if path.is_file() and path.name not in records)
    records |= world.merge({name: digest_file(tmp / name) for name in names[world.rank :: world.size]})
    if world.is_rank0:
        write_manifest(tmp, records)


class _StreamingPlanner(DefaultSavePlanner):
    """DCP save planner that reads each chunk when it is written, and frees it when the next chunk is written."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        local_chunks: Sequence[TensorChunk],
        read: Callable[[TensorChunk], Tensor],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes = shapes
        self._dtypes = dtypes
        self._read = read
        self._chunks = {(f"model.{chunk.name}", chunk.start): chunk for chunk in local_chunks}
        self._last: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one item per local chunk."""
        self.plan = SavePlan([self._item(name, chunk) for (name, _), chunk in self._chunks.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of a chunk, and free the previous chunk."""
        if self._last is not None and self._last.untyped_storage().resizable():
            # The writer of torch 2.13 keeps a reference to a tensor of each name until its file is complete.
            self._last.untyped_storage().resize_(0)
        assert write_item.index.offset is not None
        start = write_item.index.offset[0] if write_item.index.offset else 0
        self._last = self._read(self._chunks[(write_item.index.fqn, start)])
        return self._last

    def _item(self, name: str, chunk: TensorChunk) -> WriteItem:
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
