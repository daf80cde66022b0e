"""Whether another process of this machine lives, as the kernel sees it: it need not answer for that. Torch-free."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

GONE, STOPPED, BLOCKED, ALIVE = "gone", "stopped", "blocked", "alive"
"""What `ProcessId.state` says. blocked: inside the kernel, where no signal reaches it (a disk, a network folder)."""

_STATES = {"T": STOPPED, "t": STOPPED, "D": BLOCKED, "Z": GONE, "X": GONE}


@dataclass(frozen=True)
class ProcessId:
    """One process, told apart from a later one that got its number."""

    machine: str
    """Processes with the same one can see each other."""
    host: str
    number: int
    started: str
    """When, in the kernel's own unit; empty where the kernel does not say."""

    @classmethod
    def current(cls) -> "ProcessId":
        """This process."""
        number = os.getpid()
        host = socket.gethostname()
        # Containers may share a host's name and not its processes.
        namespace = Path("/proc/self/ns/pid")
        seen = os.readlink(namespace) if namespace.exists() else ""
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(f"{host} {seen} {boot.read_text().strip() if boot.exists() else ''}", host, number, _stat(number)[1])

    def state(self) -> str:
        """One of GONE, STOPPED, BLOCKED, ALIVE; for a process of this machine."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return GONE
        except PermissionError:
            return GONE if self.started else ALIVE
        letter, started = _stat(self.number)
        if started != self.started:
            return GONE
        return _STATES.get(letter, ALIVE)


def _stat(number: int) -> tuple[str, str]:
    """State letter and start time of a process; both empty where there is no /proc, or no such process."""
    try:
        # The name in brackets may hold anything; the fields that count stand behind it.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
