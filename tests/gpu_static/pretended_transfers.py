"""Transfers between the host and the pretended device: waits of the host, and copies that are not pinned, by place."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import moefold

PINNED = "pretends_pinned"
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
"""Operators whose result the host needs before it goes on."""
SOURCE = str(Path(moefold.__file__).parent)


@dataclass
class Transfers:
    """Waits and copies, each by the file and the function of moefold that asked for it.

    Attributes:
        waits: of the host for the device: a number or a tensor that it reads, or an event.
        pageable: copies to the device from memory that is not pinned, and such copies to the host that do not wait.
    """

    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)


class _Recorder:
    """The transfers that are recorded, none outside of `recorded_transfers`."""

    def __init__(self) -> None:
        self.found: Transfers | None = None

    def wait(self) -> None:
        """Note that the host waits for the device."""
        if self.found is not None:
            self.found.waits.append(_place())

    def to_device(self, source: Any) -> None:
        """Note a copy to the device of a tensor, or of a value that is not a tensor."""
        if self.found is not None and not (isinstance(source, Tensor) and is_pinned(source)):
            self.found.pageable.append(_place())

    def to_host(self, *, is_blocking: bool) -> None:
        """Note a copy to the host: a wait, or without one a copy that only pinned memory takes."""
        if self.found is not None:
            (self.found.waits if is_blocking else self.found.pageable).append(_place())


RECORDER = _Recorder()


@contextmanager
def recorded_transfers() -> Iterator[Transfers]:
    """Record the transfers inside this context."""
    RECORDER.found = Transfers()
    try:
        yield RECORDER.found
    finally:
        RECORDER.found = None


def pin(x: Tensor) -> Tensor:
    """Say that the memory of a tensor is pinned."""
    setattr(x.untyped_storage(), PINNED, True)
    return x


def is_pinned(x: Tensor) -> bool:
    """Return whether the memory of a tensor is said to be pinned."""
    return bool(getattr(x.untyped_storage(), PINNED, False))


def _place() -> str:
    """Return the innermost file and function of moefold that runs, or of this process outside of it."""
    frame: Any = sys._getframe(1)
    last = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        last, frame = frame, frame.f_back
    return f"{Path(last.f_code.co_filename).name}:{last.f_code.co_name}"
