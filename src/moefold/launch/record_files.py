"""Files in which the ranks of our own launcher keep their records, and the message that ends the job. Torch-free."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from moefold.launch.stale_folder import claim_folder, remove_stale_folders


@contextmanager
def record_files(world_size: int) -> Iterator[tuple[str, ...]]:
    """Yield the paths of one empty file for each rank, and last of one for the message.

    The files have no names on any disk where the system knows such files (Linux): they live as long as a process has
    them open, so that a launcher or rank that is killed leaves nothing behind. They are reached through the launcher's
    open descriptors. Elsewhere they lie in a temporary folder, which the next start removes if a kill left it.
    """
    count = world_size + 1
    with ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            descriptors = [os.memfd_create("moefold-record") for _ in range(count)]
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            yield tuple(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors)
            return
        remove_stale_folders()
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="moefold-")))
        claim_folder(folder)
        paths = [folder / str(number) for number in range(count)]
        for path in paths:
            path.touch()
        yield tuple(map(str, paths))
