"""Results of the stages on GPUs: one file of rows and one archive of logs, carried from machine to machine."""

import json
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINISHED = ("passed", "failed", "timed out")
"""Statuses of a stage that is not run again by the next call. It ran, or reached its own limit."""
CUT_SHORT = "cut short"
"""Status of a stage that ended with its call or its machine. Its rows stay until it is run again."""
LEFT_OUT = "left out"
"""Status of a stage whose program or package the machine lacks."""
YARDSTICKS = ("env", "rates")
"""Yardsticks: stages that every machine runs, to compare the results of different GPUs."""
ARCHIVE = "logs.tgz"


class UnusableError(Exception):
    """Error of a call that cannot run any stage. The message is one line."""


@dataclass
class Results:
    """Results of all calls on all machines.

    Attributes:
        path: results.json, replaced after each stage and while one runs.
        machine: versions, device and sizes of this call.
        stages: entries of this machine by stage: "status", "seconds", "limit_s", "rows", "tail".
        kernels: use of the carried kernels on this machine.
        earlier: the same of other machines: "machine", "stages", "kernels".
        repeated: stages to run again although they have results.
    """

    path: Path
    machine: Mapping[str, str]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)

    def load(self, carried: Path | None = None) -> None:
        """Read the results of earlier calls, from this folder or carried from another machine.

        Raises:
            UnusableError: they cannot be read, or a rehearsal and measurements would be mixed.
        """
        if carried is not None and self.path.exists():
            raise UnusableError(f"{self.path} has results, so the results of {carried} are not added; set --out")
        source = carried or self.path
        if not source.exists():
            if carried is not None:
                raise UnusableError(f"--carried {carried} does not exist")
            return
        try:
            machines = json.loads(source.read_text())["machines"]
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableError(f"{source} has no results of this program ({type(error).__name__}: {error})") from None
        for stored in machines:
            if _is_rehearsal(stored["machine"]) != _is_rehearsal(self.machine):
                raise UnusableError(f"{source} has results of {stored['machine']}; set --out to another folder")
            if stored["machine"] == dict(self.machine):
                self.stages, self.kernels = (stored["stages"], stored.get("kernels", {}))
            else:
                self.earlier.append(stored)
        if self.earlier:
            others = "; ".join(_machine_name(stored["machine"]) for stored in self.earlier)
            print(f"earlier results are of {others}; this is {_machine_name(self.machine)}: what they lack is run here")

    def is_done(self, name: str) -> bool:
        """Return whether a stage has a result: of this machine, or of an earlier one unless it is a yardstick."""
        if name in self.repeated:
            return False
        stages = [self.stages, *(stored["stages"] for stored in self.earlier if name not in YARDSTICKS)]
        return any(entries.get(name, {}).get("status") in FINISHED for entries in stages)

    def status(self, name: str) -> str:
        """Return the latest status of a stage, "" if it never ran."""
        for entries in (self.stages, *(stored["stages"] for stored in reversed(self.earlier))):
            if name in entries:
                return str(entries[name]["status"])
        return ""

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Replace the entry of a stage and write the file."""
        self.stages[name] = entry
        if entry["status"] in FINISHED:
            self.repeated.discard(name)
        machine = {"machine": dict(self.machine), "stages": self.stages, "kernels": self.kernels}
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps({"machines": [*self.earlier, machine]}, indent=1) + "\n")
        temporary.replace(self.path)

    def unpack_logs(self, work: Path, carried: Path | None) -> None:
        """Write the logs of earlier calls into the folder of this call. Results are valid without them."""
        archive = (carried or self.path).with_name(ARCHIVE)
        if not archive.exists():
            return
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(work, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            print(f"{archive} cannot be read, so that its logs are lost: {error}")

    def pack_logs(self, work: Path) -> None:
        """Replace the archive by the logs of the stages."""
        archive = self.path.with_name(ARCHIVE)
        temporary = archive.with_suffix(".new")
        with tarfile.open(temporary, "w:gz") as tar:
            for path in sorted(path for path in work.iterdir() if path.is_file()):
                with suppress(FileNotFoundError):
                    tar.add(path, path.name)
        temporary.replace(archive)


def _is_rehearsal(machine: Mapping[str, str]) -> tuple[bool, bool]:
    return (machine["device"] == "cpu", machine["sizes"] == "tiny")


def _machine_name(machine: Mapping[str, str]) -> str:
    return f"{machine['device']} with torch {machine['torch']}, Triton {machine['triton']}"
