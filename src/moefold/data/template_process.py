"""Subprocess that renders chat templates: started on first use, and restarted if it was killed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefold.data.limited_process import LimitedProcess, ProcessEndedError
from moefold.errors import ConfigError

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
        """Start the process and compile the template in it; raise ConfigError if it is not a Jinja template."""
        self._start_request = {"do": "start", **asdict(program), "most_characters": limits.most_characters}
        self._limits = limits
        self._location = location
        self._process = self._start_process()

    def process_requests(self, requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request in order; a failed one has the reason as `refused`.

        Requests after a refused one are sent only if the caller asks for their answers: each may cost the full CPU
        limit.
        """
        for request in requests:
            if not self._process.is_usable:
                self._process = self._start_process()
            yield self._ask(self._process, {"do": "render"} | request)

    def _start_process(self) -> LimitedProcess:
        limit = self._limits.memory_bytes
        process = LimitedProcess(_WORKER, memory_bytes=limit, hard_bytes=limit)
        if (reason := self._ask(process, self._start_request).get("refused")) is not None:
            raise ConfigError(f"the chat template of {self._location} is not a Jinja template ({reason}); fix it")
        return process

    def _ask(self, process: LimitedProcess, request: dict[str, Any]) -> dict[str, Any]:
        limits = self._limits
        # A character takes at most 6 bytes of JSON, as \\u001f does.
        longest = 6 * limits.most_characters + (1 << 20)
        try:
            return process.ask(
                request, memory_bytes=limits.memory_bytes, cpu_s=limits.cpu_s, limit=longest, does="renders"
            )[0]
        except ProcessEndedError as error:
            return {"refused": str(error)}
