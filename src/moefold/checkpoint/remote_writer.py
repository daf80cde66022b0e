"""DCP writer of remote checkpoints: files are hashed while they are sent, so that none is read back."""

from torch.distributed.checkpoint.metadata import StorageMeta

from moefold.checkpoint.hashed_files import HashingWriter
from moefold.remote_path import RemotePath


class RemoteWriter(HashingWriter):
    """Writer of the data files and the index of a checkpoint in a remote folder.

    Files appear when they are complete; the manifest, which the first rank writes last, commits the checkpoint.
    """

    def __init__(self, folder: RemotePath) -> None:
        # The files of an object store need no fsync: a write that has returned is durable.
        super().__init__(folder, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        """Return the identity of the save, with the folder as text: an index contains no class of moefold."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
