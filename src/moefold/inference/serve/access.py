"""Middleware of the server: API key, times of requests, and access log."""

import bisect
import hmac
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moefold.errors import ConfigError
from moefold.inference.serve.request_fields import ApiError
from moefold.message_text import Setting
from moefold.terminal import print_escaped, printable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histograms."""


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Counts of requests and tokens, and times."""

    def __init__(self) -> None:
        self.num_open = 0
        """Number of running and waiting samples."""
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._new_tokens = 0
        self._request_seconds = _Histogram()
        self._first_token_seconds = _Histogram()

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request by its path, or as "other"."""
        self._requests[path, status] += 1
        self._request_seconds.add(seconds)

    def add_tokens(self, num_prompt: int, num_new: int) -> None:
        """Count the tokens of a completion."""
        self._prompt_tokens += num_prompt
        self._new_tokens += num_new

    def add_first_token(self, seconds: float) -> None:
        """Count the time from a request to its first token."""
        self._first_token_seconds.add(seconds)

    def text(self) -> str:
        """Return all numbers in the text format of Prometheus."""
        answered = [
            f'moefold_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        blocks: list[tuple[str, str, int | Sequence[str] | _Histogram]] = [
            ("moefold_samples_open gauge", "Samples that run or wait.", self.num_open),
            ("moefold_requests_total counter", "Answered requests.", answered),
            ("moefold_prompt_tokens_total counter", "Tokens of prompts.", self._prompt_tokens),
            ("moefold_generation_tokens_total counter", "Generated tokens.", self._new_tokens),
            ("moefold_request_seconds histogram", "Time of a request.", self._request_seconds),
            (
                "moefold_first_token_seconds histogram",
                "Time to the first token of a request.",
                self._first_token_seconds,
            ),
        ]
        text = ""
        for kind, words, value in blocks:
            name = kind.partition(" ")[0]
            if isinstance(value, int):
                value = [f"{name} {value}"]
            lines = value.lines(name) if isinstance(value, _Histogram) else value
            text += f"# HELP {name} {words}\n# TYPE {kind}\n" + "".join(f"{line}\n" for line in lines)
        return text


OPEN_PATHS = ("/health",)
"""Paths without a key, for health checks."""


class KeyCheck:
    """ASGI middleware that refuses requests without `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                error = ApiError("the key is missing or wrong; send the header Authorization: Bearer KEY", 401)
                await JSONResponse(error.as_dict(), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Observer:
    """ASGI middleware that counts and logs requests, after the last byte of their answers."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, log: Callable[[str], None] | None, paths: frozenset[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, and count its answer and write its line of the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        statuses: list[int] = []

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - start
            status = statuses[0] if statuses else 500
            path = scope["path"]
            self._metrics.add_request(path if path in self._paths else "other", status, seconds)
            if self._log is not None:
                client = (scope.get("client") or ("-",))[0]
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                tokens = scope.get("moefold.tokens", "")
                self._log(f"{now} {client} {scope['method']} {path} {status} {seconds:.3f} s{tokens}")


class AccessLog:
    """Log with a line for each request, in a file that lines are appended to, or on standard error for "-".

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_failed = False
        if name != "-":
            try:
                self._append("")
            except OSError as error:
                raise ConfigError(f"{Setting('--access-log', name)} cannot be written: {error.strerror}") from error

    def write(self, line: str) -> None:
        """Write a line. If the file is no longer writable, warn once and continue."""
        if self._name == "-":
            print_escaped(line, file=sys.stderr, flush=True)
            return
        try:
            self._append(printable(line) + "\n")
        except OSError as error:
            if not self._has_failed:
                words = f"moefold: warning: {Setting('--access-log', self._name)} cannot be written ({error.strerror})"
                print_escaped(words, file=sys.stderr, flush=True)
            self._has_failed = True

    def _append(self, text: str) -> None:
        # Opened for each line, so that the file may be moved (log rotation).
        with Path(self._name).open("a", encoding="utf-8") as file:
            file.write(text)
