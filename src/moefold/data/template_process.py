"""Subprocess that renders chat templates: started on first use, and restarted if it was killed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefold.bounded_read import batch_by_size
from moefold.data.limited_process import LimitedProcess
from moefold.errors import ConfigError

BATCH_CHARACTERS = 1 << 20
"""Size of conversations sent at once: bounds the data in flight and amortises the cost of a message."""
_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Resource limits of a template."""

    cpu_s: float = 30.0
    """CPU time to compile the template, and for one conversation.

    Templates take milliseconds; a conversation of 1,000 turns is rendered some 2,000 times, which takes seconds.
    """
    memory_bytes: int = 1 << 30
    """Address space of the process, of which the interpreter takes 30 MB."""
    most_characters: int = 1 << 26
    """Length of a rendered conversation; equals the maximum bytes of an input line."""


@dataclass(frozen=True, slots=True)
class TemplateProgram:
    """A template and its settings, as sent to the process."""

    sources: tuple[tuple[str, bool], ...]
    """The programs, each with whether it has `{% generation %}` marks: the only one, or those for conversations without
    and with tools."""
    special_tokens: dict[str, str]
    marks: tuple[str, str]
    date: str
    """Output of `strftime_now`, in ISO form."""


class TemplateProcess:
    """Client of a template subprocess. The process ends with this object."""

    def __init__(self, program: TemplateProgram, limits: TemplateLimits, location: str) -> None:
        """Start the process and compile the template in it.

        Args:
            program: the template.
            limits: resource limits.
            location: origin of the template, for messages.

        Raises:
            ConfigError: it is not a Jinja template.
        """
        self._start_line = json.dumps(asdict(program) | asdict(limits)).encode() + b"\n"
        self._limits = limits
        self._location = location
        self._process = self._start_process()

    def process_requests(self, requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request in order; a failed one has the reason as `refused`.

        Requests after a refused one are sent only if the caller asks for their answers: each may cost the full CPU
        limit.
        """
        lines = (json.dumps(request).encode() + b"\n" for request in requests)
        for batch in batch_by_size(lines, len, BATCH_CHARACTERS):
            left = batch
            while left:
                answers = self._answers_until_refused(left)
                yield from answers
                left = left[len(answers) :]

    def _answers_until_refused(self, lines: list[bytes]) -> list[dict[str, Any]]:
        """Send requests and return their answers up to the first refused one.

        A refusal restarts the process, so that no answer to a later request is left in the pipe.
        """
        if not self._process.is_usable:
            self._process = self._start_process()
        self._process.send(b"%d\n" % len(lines) + b"".join(lines))
        answers: list[dict[str, Any]] = []
        for _ in lines:
            found = self._read()
            answers.append({"refused": self._end_reason()} if found is None else found)
            if "refused" in answers[-1]:
                if found is None or len(answers) < len(lines):
                    self._process.end()
                    self._process = self._start_process()
                break
        self._process.finish()
        return answers

    def _start_process(self) -> LimitedProcess:
        limit = self._limits.memory_bytes
        process = LimitedProcess(_WORKER, memory_bytes=limit, hard_bytes=limit)
        self._process = process
        process.send(self._start_line)
        found = self._read()
        process.finish()
        reason = self._end_reason() if found is None else found.get("refused")
        if reason is not None:
            raise ConfigError(f"the chat template of {self._location} is not a Jinja template ({reason}); fix it")
        return process

    def _read(self) -> dict[str, Any] | None:
        """Return the next answer; None if the process was killed, or the answer is too long."""
        # A character takes at most 6 bytes of JSON, as \\u001f does.
        line = self._process.read_line(6 * self._limits.most_characters + (1 << 20))
        if line is None:
            return None
        found: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return found

    def _end_reason(self) -> str:
        if self._process.end() == "time":
            return f"it takes more than {self._limits.cpu_s:g} s of CPU time"
        return f"the process that renders it has ended; it may use {self._limits.memory_bytes:,} bytes of memory"
