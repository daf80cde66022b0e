"""The process that renders a chat template: started when it is first needed, and again where it was ended."""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefold.bounded_read import batch_by_size
from moefold.errors import ConfigError

BATCH_CHARACTERS = 1 << 20
"""Of conversations that are sent at once: so much is on its way, and the cost of a message is shared."""
_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What a template may use."""

    cpu_s: float = 30.0
    """Processor time for one conversation, and to compile it. Templates take milliseconds; a conversation of 1,000
    turns is written 2,001 times, which takes some seconds."""
    memory_bytes: int = 1 << 30
    """Address space of the process, of which the interpreter takes 30 MB."""
    most_characters: int = 1 << 26
    """Of what it makes of a conversation; the longest line that is read has as many bytes."""


@dataclass(frozen=True, slots=True)
class TemplateProgram:
    """What the process is told of a template."""

    source: str
    special_tokens: dict[str, str]
    marks: tuple[str, str]
    has_marks: bool
    date: str
    """What `strftime_now` writes, in ISO form."""


class TemplateProcess:
    """Asks a process of its own to render conversations. The process ends with this object."""

    def __init__(self, program: TemplateProgram, limits: TemplateLimits, location: str) -> None:
        """Start the process and compile the template in it.

        Args:
            program: the template.
            limits: what it may use.
            location: where it comes from, for messages.

        Raises:
            ConfigError: it is no Jinja template.
        """
        self._start_line = json.dumps(asdict(program) | asdict(limits)).encode() + b"\n"
        self._limits = limits
        self._location = location
        self._process = self._start_process()

    def process_requests(self, requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request in order; `refused` says why there is none."""
        lines = (json.dumps(request).encode() + b"\n" for request in requests)
        for batch in batch_by_size(lines, len, BATCH_CHARACTERS):
            yield from self._batch(batch)

    def _batch(self, lines: list[bytes]) -> list[dict[str, Any]]:
        """Answer one batch; a conversation that ends the process is refused, and those after it are asked again.

        All answers are read, whatever becomes of them: the next request must not find one of these.
        """
        answers: list[dict[str, Any]] = []
        while left := lines[len(answers) :]:
            self._send(b"%d\n" % len(left) + b"".join(left))
            for _ in left:
                found = self._read()
                answers.append({"refused": self._end_reason()} if found is None else found)
                if found is None:
                    self._process = self._start_process()
                    break
        return answers

    def _start_process(self) -> "subprocess.Popen[bytes]":
        # The folder of the program is not searched for modules: names there are those of this package.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _kill_process, process)
        self._process = process
        self._send(self._start_line)
        found = self._read()
        reason = self._end_reason() if found is None else found.get("refused")
        if reason is not None:
            raise ConfigError(f"the chat template of {self._location} is not a Jinja template ({reason}); mend it")
        return process

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            # It was ended while it read; the answer that is missing tells.
            return

    def _read(self) -> dict[str, Any] | None:
        """Return the next answer; None if the process was ended, or answers with too much."""
        assert self._process.stdout is not None
        # A character takes at most 6 bytes of JSON, as \\u001f does.
        limit = 6 * self._limits.most_characters + (1 << 20)
        line = self._process.stdout.readline(limit)
        if not line.endswith(b"\n"):
            return None
        found: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return found

    def _end_reason(self) -> str:
        self._process.kill()
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_s:g} s of processor time"
        return f"the process that renders it has ended ({status}); it may use {self._limits.memory_bytes:,} bytes"


def _kill_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
