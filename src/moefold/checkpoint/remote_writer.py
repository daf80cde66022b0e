"""DCP writer of remote checkpoints: files are hashed while they are sent, so that none is read back."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

from moefold.checkpoint.manifest import FileDigest
from moefold.remote_path import RemotePath


class RemoteWriter(dcp.FileSystemWriter):
    """Writer of the data files and the index of a checkpoint in a remote folder.

    `digests` has size and hash of each data file that this rank has written. Files appear when they are complete; the
    manifest, which the first rank writes last, commits the checkpoint.
    """

    def __init__(self, folder: RemotePath) -> None:
        # The files of an object store need no fsync: a write that has returned is durable.
        super().__init__(folder, sync_files=False)
        self.digests: dict[str, FileDigest] = {}
        self.fs = _HashingFileSystem(self.digests)

    def storage_meta(self) -> StorageMeta:
        """Return the identity of the save, with the folder as text: an index contains no class of moefold."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)


class _HashingFileSystem(FileSystem):
    """Files of DCP on a `RemotePath`, which has the methods that it calls; records the digests of data files."""

    def __init__(self, digests: dict[str, FileDigest]) -> None:
        super().__init__()
        self._digests = digests

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file to be written, and record its digest once it is complete."""
        with super().create_stream(path, mode) as stream:
            hashed = _HashedStream(stream)
            yield hashed
        if Path(path).name.endswith(".distcp"):
            self._digests[path.name] = FileDigest(hashed.size, hashed.sha256.hexdigest())


class _HashedStream:
    """File that is written once, with the hash and the number of the bytes that passed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Hash and write bytes."""
        content = memoryview(data).cast("B")
        self.sha256.update(content)
        self._stream.write(content)
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Flush the file."""
        self._stream.flush()

    def close(self) -> None:
        """Complete the file."""
        self._stream.close()
