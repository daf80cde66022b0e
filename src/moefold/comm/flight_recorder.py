"""Flight recorder: the current phase and collective of this rank, cheap enough to be always on.

A rank that is dead, stopped or stuck in a kernel cannot report. Other threads of the process can read its recorder, and
with a file, other processes can too, even after the rank has died.
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

from moefold.host.running_clock import RunningClock

FILE_BYTES = 1024
_EVENT = struct.Struct("<q24s64s4qd")
"""Number of events, collective, group, first sizes of the shape (-1: none) and time of the last event."""
_PHASE_BYTES = FILE_BYTES - _EVENT.size


@dataclass(frozen=True)
class FlightSnapshot:
    """Snapshot of a flight recorder."""

    step: int
    """Optimizer step, 1-based, or 0 before the first."""
    phase: str
    """Phase of the step: "forward of micro-batch 3", "optimizer", "loading data", ..."""
    phase_number: int
    """Phases entered since the step began."""
    collective: str
    """The last collective launched, finished or not, or empty before the first."""
    group: str
    """The group of that collective: its axes and ranks."""
    shape: tuple[int, ...]
    """Shape of this rank's input to it."""
    moved_s: float
    """Start of the last phase or collective, as time.time()."""
    counts: dict[str, int]
    """Collectives launched so far per group. All members of a group launch the same collectives in the same order."""

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "FlightSnapshot":
        """Build a snapshot from the result of `to_json`."""
        return cls(**{**data, "shape": tuple(data["shape"])})


class FlightRecorder:
    """Records the state of the training thread. Any other thread may read it.

    Args:
        hang_timeout_s: longest time without an event before the job counts as stuck. 0: no limit.
        file: memory-mapped copy for other processes of this host.
    """

    def __init__(self, hang_timeout_s: float = 0.0, file: Path | None = None) -> None:
        self.hang_timeout_s = hang_timeout_s
        self.clock = RunningClock()
        """Clock of all times except snapshot times: a process that is stopped makes no progress, and does not hang."""
        self.first_rank = 0
        """Rank in the job of rank 0 of the default process group. It is above 0 on ranks that only sample."""
        self.members: Sequence[int] | None = None
        """Rank in the job of each rank of the default process group, or None before the ranks regroup."""
        self.awaited_rank: int | None = None
        """Rank of the job for whose message this rank waits, maybe longer than the timeout, or None if it does not."""
        self.step = 0
        self._phase = "starting"
        self._phase_number = 0
        self._event: tuple[str, int, Sequence[int]] = ("", -1, ())
        self._last_event_s = self.clock()
        self._credited_s = self._last_event_s
        self._groups: list[str] = []
        self._counts: list[int] = []
        self._mmap = None if file is None else _open_mmap(file)
        self._write_phase()

    def add_group(self, axes: str, ranks: Sequence[int]) -> int:
        """Register a group, and return its number for `record_collective`.

        Args:
            axes: name of the group.
            ranks: its members, in the default process group.
        """
        members = self.members
        in_job = [self.first_rank + rank if members is None else members[rank] for rank in ranks]
        self._groups.append(f"{axes} ({format_ranks(in_job)})")
        self._counts.append(0)
        return len(self._groups) - 1

    def start_generation(self, members: Sequence[int]) -> None:
        """Forget all groups, which are gone after a regroup.

        Args:
            members: rank in the job of each rank of the new default process group.
        """
        self._event = "", -1, ()
        self.members = members
        self._groups, self._counts = [], []

    def begin_step(self, step: int, phase: str) -> None:
        """Start an optimizer step with its first phase."""
        self.step = step
        self._phase_number = 0
        self.set_phase(phase)

    def set_phase(self, phase: str) -> None:
        """Start a phase. The previous phase ends."""
        self._phase = phase
        self._phase_number += 1
        self._last_event_s = self.clock()
        self._write_phase()

    def record_collective(self, collective: str, group: int, shape: Sequence[int]) -> None:
        """Record that a collective starts on a group."""
        self._counts[group] += 1
        self._event = collective, group, shape
        self._last_event_s = now_s = self.clock()
        if self._mmap is not None:
            sizes = (*shape, -1, -1, -1, -1)[:4]
            name = collective.encode()
            axes = self._groups[group].encode()
            _EVENT.pack_into(self._mmap, 0, self._counts[group], name, axes, *sizes, now_s)

    def note_progress(self) -> None:
        """Record that this rank makes progress inside a phase, without a collective."""
        self._last_event_s = self.clock()

    def note_awaited_progress(self) -> None:
        """Record that the rank that this rank waits for makes progress, so that the wait is not a hang."""
        self._credited_s = self.clock()

    def stalled_s(self) -> float:
        """Return the time since the last event of this rank, or of the rank that it waits for."""
        return self.clock() - max(self._last_event_s, self._credited_s)

    def idle_s(self) -> float:
        """Return the time since the last event."""
        return self.clock() - self._last_event_s

    def snapshot(self) -> FlightSnapshot:
        """Return the phase and the collective that this rank is in now."""
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
        text = json.dumps([self.step, self._phase, self._phase_number, self._last_event_s, time.time() - self.clock()])
        self._mmap[_EVENT.size :] = text.encode().ljust(_PHASE_BYTES, b"\0")


def read_snapshot(file: Path) -> FlightSnapshot | None:
    """Read the last state of a rank of this host, dead or alive, from its recorder file, or None if it is empty."""
    try:
        return decode_snapshot(file.read_bytes())
    except OSError:
        return None


def decode_snapshot(content: bytes) -> FlightSnapshot | None:
    """Decode the content of a recorder file, which has no counts. Return None if nothing was written."""
    try:
        _, name, axes, *sizes, event_s = _EVENT.unpack_from(content)
        step, phase, phase_number, phase_s, offset_s = json.loads(content[_EVENT.size :].rstrip(b"\0"))
    except (ValueError, struct.error):
        return None
    collective, group = (field.rstrip(b"\0").decode(errors="replace") for field in (name, axes))
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


WATCHED_TIMEOUT = timedelta(days=30)
"""torch's own timeout for collectives where the watchdog runs, which names the ranks that are late.

torch's clocks continue while a job is stopped: with a shorter limit, its collectives would fail once it is continued.
"""


def group_timeout(hang_timeout_s: float) -> timedelta:
    """Return the limit of connecting, and of collectives where no watchdog runs: much longer than a hang's."""
    return timedelta(seconds=2 * hang_timeout_s + 60)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks: "ranks 0-3", "ranks 0, 2, 4", "ranks 0, 8 ... 1016"."""
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
