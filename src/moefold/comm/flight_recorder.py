"""What this rank is doing right now, kept so cheaply that it can always be kept: for the one who asks why a job stands.

A rank that is dead, stopped or deep inside the kernel cannot tell. Its record can: other threads of the process read
it, and with a file behind it other processes can, even when this one is gone. Torch-free.
"""

import json
import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

FILE_BYTES = 1024
_EVENT = struct.Struct("<q24s64s4qd")
"""Number of events, collective, group, first sizes of the shape (-1: none) and time of the last event."""
_PHASE_BYTES = FILE_BYTES - _EVENT.size


@dataclass(frozen=True)
class FlightSnapshot:
    """One look at a record."""

    step: int
    """Optimizer step, 1-based; 0 before the first."""
    phase: str
    """What the step was at: "forward of micro-batch 3", "optimizer", "loading data", ..."""
    phase_number: int
    """Phases entered since the step began."""
    collective: str
    """The last one that was begun, done or not; empty before the first."""
    group: str
    """The axes whose ranks communicate in it, and the ranks."""
    shape: tuple[int, ...]
    """Of what this rank brought."""
    moved_s: float
    """When it began the last phase or collective, as time.time()."""
    counts: dict[str, int]
    """Collectives begun so far on each group; members of a group go through the same ones in the same order."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "FlightSnapshot":
        """Out of `to_json`."""
        return cls(**{**data, "shape": tuple(data["shape"])})


class FlightRecorder:
    """Written by the thread that trains, read by any other.

    Args:
        hang_timeout_s: so long a record may stand still before the job counts as stuck; 0: for ever.
        file: where to keep it as well, for other processes of this machine.
    """

    def __init__(self, hang_timeout_s: float = 0.0, file: Path | None = None) -> None:
        self.hang_timeout_s = hang_timeout_s
        self.step = 0
        self._phase = "starting"
        self._phase_number = 0
        self._event: tuple[str, int, Sequence[int]] = ("", -1, ())
        self._last_event_s = time.monotonic()
        self._groups: list[str] = []
        self._counts: list[int] = []
        self._mmap = None if file is None else _open_mmap(file)
        self._write_phase()

    def add_group(self, axes: str, ranks: Sequence[int]) -> int:
        """Make a group known; returns its number for `record_collective`."""
        self._groups.append(f"{axes} ({format_ranks(ranks)})")
        self._counts.append(0)
        return len(self._groups) - 1

    def begin_step(self, step: int, phase: str) -> None:
        """All that follows belongs to this optimizer step."""
        self.step = step
        self._phase_number = 0
        self.set_phase(phase)

    def set_phase(self, phase: str) -> None:
        """A phase begins, and the one before is over."""
        self._phase = phase
        self._phase_number += 1
        self._last_event_s = time.monotonic()
        self._write_phase()

    def record_collective(self, collective: str, group: int, shape: Sequence[int]) -> None:
        """A collective begins on a group."""
        self._counts[group] += 1
        self._event = collective, group, shape
        self._last_event_s = now_s = time.monotonic()
        if self._mmap is not None:
            sizes = (*shape, -1, -1, -1, -1)[:4]
            name = collective.encode()
            axes = self._groups[group].encode()
            _EVENT.pack_into(self._mmap, 0, self._counts[group], name, axes, *sizes, now_s)

    def idle_s(self) -> float:
        """How long ago the record last changed."""
        return time.monotonic() - self._last_event_s

    def snapshot(self) -> FlightSnapshot:
        """What it says now."""
        collective, group, shape = self._event
        return FlightSnapshot(
            step=self.step,
            phase=self._phase,
            phase_number=self._phase_number,
            collective=collective,
            group=self._groups[group] if collective else "",
            shape=tuple(shape),
            moved_s=time.time() - self.idle_s(),
            counts=dict(zip(self._groups, self._counts, strict=False)),
        )

    def _write_phase(self) -> None:
        if self._mmap is None:
            return
        text = json.dumps(
            [self.step, self._phase, self._phase_number, self._last_event_s, time.time() - time.monotonic()]
        )
        self._mmap[_EVENT.size :] = text.encode().ljust(_PHASE_BYTES, b"\0")


def read_snapshot(file: Path) -> FlightSnapshot | None:
    """What a rank of this machine, maybe gone, wrote last into the file of its record; None if it wrote nothing."""
    try:
        return decode_snapshot(file.read_bytes())
    except OSError:
        return None


def decode_snapshot(content: bytes) -> FlightSnapshot | None:
    """What the file of a record says; None if its rank wrote nothing. Counts are not in it."""
    try:
        _, name, axes, *sizes, event_s = _EVENT.unpack_from(content)
        step, phase, phase_number, phase_s, offset_s = json.loads(content[_EVENT.size :].rstrip(b"\0"))
    except (ValueError, struct.error):
        return None
    collective, group = (part.rstrip(b"\0").decode(errors="replace") for part in (name, axes))
    return FlightSnapshot(
        step=step,
        phase=phase,
        phase_number=phase_number,
        collective=collective,
        group=group,
        shape=tuple(size for size in sizes if size >= 0),
        moved_s=max(event_s, phase_s) + offset_s,
        counts={},
    )


def group_timeout(hang_timeout_s: float) -> timedelta:
    """When torch itself gives a collective up: long after this, as its traceback names nobody."""
    return timedelta(seconds=2 * hang_timeout_s + 60)


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in few words: "ranks 0-3", "ranks 0, 2, 4", "ranks 0, 8 ... 1016"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 8:
        return "ranks " + ", ".join(map(str, ranks))
    return f"ranks {ranks[0]}, {ranks[1]} ... {ranks[-1]}"


def _open_mmap(file: Path) -> mmap.mmap:
    with file.open("w+b") as opened:
        opened.truncate(FILE_BYTES)
        return mmap.mmap(opened.fileno(), FILE_BYTES)
