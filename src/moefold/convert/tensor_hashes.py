"""Hashes of the tensors of a folder that are read for another purpose, so that the files are read once."""

import hashlib
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from moefold.checkpoint.hashed_files import HashingThread
from moefold.convert.safetensors_file import TensorLocation, bytes_of


@dataclass
class _Progress:
    """Hash of the first bytes of a tensor."""

    total_bytes: int
    digest: Any = field(default_factory=hashlib.sha256)
    num_bytes: int = 0


class TensorHashes:
    """SHA-256 of tensors whose rows arrive in order, computed in a thread; use it with `with`.

    Rows that come again, as a matrix that fuses two of our parameters is read twice, are passed over. A tensor of which
    this process reads a part alone has no hash.
    """

    def __init__(self) -> None:
        self._thread = HashingThread()
        self._found: dict[str, _Progress] = {}

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.__exit__(kind, error, trace)

    def add(self, name: str, location: TensorLocation, offset: int, values: Tensor) -> None:
        """Add rows of a tensor, which nothing changes later.

        Args:
            name: of the tensor.
            location: of the whole tensor.
            offset: bytes before the first row.
            values: the rows.
        """
        found = self._found.setdefault(name, _Progress(location.num_bytes))
        end = offset + values.nbytes
        if offset <= found.num_bytes < end:
            self._thread.update(found.digest, bytes_of(values)[found.num_bytes - offset :])
            found.num_bytes = end

    def complete(self) -> dict[str, str]:
        """Return the hashes of the tensors that were added whole; call it after `with`."""
        return {name: one.digest.hexdigest() for name, one in self._found.items() if one.num_bytes == one.total_bytes}
