"""Another rank of this machine, as the watchdog observes it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.comm.flight_recorder import FILE_BYTES, decode_snapshot
from moefold.host.processes import ALIVE, ProcessId


class LocalPeer:
    """Another rank of this machine and its flight record, which stays open after the rank died."""

    def __init__(self, process: ProcessId, file: str) -> None:
        self.process = process
        self._record_file = None
        with suppress(OSError):
            self._record_file = Path(file).open("rb", buffering=0) if file else None  # noqa: SIM115 - open until exit

    def describe(self) -> tuple[str, dict[str, Any] | None]:
        """Return the process state and, unless the rank is alive, its last flight-recorder snapshot."""
        state = self.process.state()
        if state == ALIVE or self._record_file is None:
            return state, None
        self._record_file.seek(0)
        snapshot = decode_snapshot(self._record_file.read(FILE_BYTES))
        return state, None if snapshot is None else snapshot.to_json()
