"""SHA-256 of bytes while they are written or read, in a parallel thread, so that no file is read again."""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

from moefold.checkpoint.manifest import FileDigest
from moefold.remote_path import RemotePath

MAX_WAITING_BYTES = 1 << 24
"""Maximum bytes that wait for the thread, except a single larger block."""
MIN_BLOCK_BYTES = 1 << 15
"""Minimum bytes of a block for the thread: fewer bytes are hashed faster directly."""


class HashingThread:
    """Thread that adds blocks to SHA-256 hashes in the order of the calls. `with` waits for the last block."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hashing")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown()
        if error is None:
            self.drain()

    def update(self, digest: "hashlib._Hash", block: memoryview | bytes) -> None:
        """Add a block, which must not change before `drain`, to a hash. Wait while too many bytes are queued.

        Args:
            digest: not to be read before `drain`.
        """
        while self._waiting and (self._waiting_bytes + len(block) > MAX_WAITING_BYTES or self._waiting[0][0].done()):
            self._wait_for_first()
        if not self._waiting and len(block) < MIN_BLOCK_BYTES:
            digest.update(block)
            return
        self._waiting.append((self._thread.submit(digest.update, block), len(block)))
        self._waiting_bytes += len(block)

    def drain(self) -> None:
        """Wait for all blocks."""
        while self._waiting:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        future, num_bytes = self._waiting.popleft()
        future.result()
        self._waiting_bytes -= num_bytes


@dataclass
class _Progress:
    """Hash of the first bytes of a file or tensor."""

    total_bytes: int
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    num_bytes: int = 0


class OrderedHashes:
    """Context manager for the SHA-256 of files or tensors whose bytes arrive in order, computed in a thread.

    Repeated bytes are ignored. Bytes that arrive too early are also ignored, and their file gets no hash.
    """

    def __init__(self) -> None:
        self._thread = HashingThread()
        self._progress: dict[str, _Progress] = {}

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.__exit__(kind, error, trace)

    def add(self, name: str, total_bytes: int, offset: int, data: memoryview) -> None:
        """Add bytes, which must not change later.

        Args:
            offset: position of the first of these bytes in it.
        """
        progress = self._progress.setdefault(name, _Progress(total_bytes))
        end = offset + len(data)
        if offset <= progress.num_bytes < end:
            self._thread.update(progress.digest, data[progress.num_bytes - offset :])
            progress.num_bytes = end

    def complete(self) -> dict[str, str]:
        """Return the hashes of the complete files or tensors. Call it after `with`."""
        return {name: h.digest.hexdigest() for name, h in self._progress.items() if h.num_bytes == h.total_bytes}


class HashingWriter(dcp.FileSystemWriter):
    """DCP writer of a folder whose data files are hashed while they are written.

    Args:
        thread: the thread that hashes. None means the writing thread.
        sync_files: whether a file is on the disk when it is complete.
        per_thread_copy_ahead: bytes that are copied from a GPU before they are written. See base class.

    Attributes:
        digests: size and hash of each data file that this process has written.
    """

    def __init__(
        self,
        folder: Path,
        thread: HashingThread | None = None,
        *,
        sync_files: bool = True,
        per_thread_copy_ahead: int = 10_000_000,
    ) -> None:
        super().__init__(folder, sync_files=sync_files, per_thread_copy_ahead=per_thread_copy_ahead)
        self.digests: dict[str, FileDigest] = {}
        self.fs = _HashingFileSystem(self.digests, thread)


class _HashingFileSystem(FileSystem):
    """File system of DCP that records the digests of data files. A `RemotePath` has the methods that it calls."""

    def __init__(self, digests: dict[str, FileDigest], thread: HashingThread | None) -> None:
        super().__init__()
        self._digests = digests
        self._thread = thread

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for writing, and record its digest once it is complete."""
        with super().create_stream(path, mode) as stream:
            hashed = _HashedStream(stream, self._thread)
            yield hashed
        if Path(path).name.endswith(".distcp"):
            self._digests[path.name] = FileDigest(hashed.size, hashed.sha256.hexdigest())


class _HashedStream:
    """File that is written once, with the hash and the number of the written bytes."""

    def __init__(self, stream: Any, thread: HashingThread | None) -> None:
        self._stream = stream
        self._thread = thread
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Write bytes to the stream and add them to the hash and the size."""
        content = memoryview(data).cast("B")
        if self._thread is None:
            self.sha256.update(content)
        else:
            self._thread.update(self.sha256, content)
        self._stream.write(content)
        if self._thread is not None:
            # The caller may reuse the memory from here on.
            self._thread.drain()
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        return self.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RemoteWriter(HashingWriter):
    """Writer of the data files and the index of a checkpoint in a remote folder.

    Files appear when they are complete. The manifest, which the first rank writes last, commits the checkpoint.
    """

    def __init__(self, folder: RemotePath) -> None:
        # Files of an object store need no fsync: a completed write is durable.
        super().__init__(folder, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        """Return the identity of the save, with the folder as text, so that the index contains no class of moefold."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
