"""Connection of a rank to the meeting point of the sites (`moefold meet`)."""

import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from moefold.errors import ConfigError
from moefold.launch.signed_lines import MAX_LINE_BYTES, BadLineError, Message, SignedLines, new_nonce, parse_object
from moefold.message_text import Problem

CONNECT_TIMEOUT_S = 10.0
BEAT_S = 5.0
"""Interval of the messages that tell the meeting point that a site is alive."""


class MeetError(Exception):
    """The meeting point cannot be reached, or did not answer in time."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Raises:
        ConfigError: the address has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(Problem("sites.meet", text, "must be HOST:PORT, such as 10.0.0.1:29600"))
    return host, int(port)


class MeetConnection:
    """One connection to the meeting point. The first request opens it, and the next request reopens a lost one."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        self._address = (host, port)
        self._secret = secret
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._lines: SignedLines | None = None
        self._buffer = b""
        self._greeting: Callable[[], Message] | None = None

    def greet(self, greeting: Callable[[], Message]) -> None:
        """Set the message that is sent first on every further connection."""
        self._greeting = greeting

    def ask(self, message: Mapping[str, Any]) -> Message:
        """Send a message and return the answer.

        Raises:
            MeetError: there is no connection, no answer in time, or the answer is not signed with the secret.
        """
        for is_stale in (self._socket is not None, False):
            try:
                if self._socket is None:
                    self._connect()
                    self._greet()
                return self._exchange(message)
            except (OSError, UnicodeError, BadLineError) as error:
                # UnicodeError: a host name that cannot be a name of the DNS.
                self.close()
                # The meeting point may have closed the connection long ago, or have been started again.
                if is_stale and self._greeting is not None and not isinstance(error, TimeoutError):
                    continue
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                host, port = self._address
                raise MeetError(f"the meeting point {host}:{port} did not answer ({reason})") from None
        raise AssertionError("the second try returns or raises")

    @property
    def local_host(self) -> str:
        """Address of this side of the connection, where the other sites and the meeting point can reach it."""
        assert self._socket is not None, "the connection is open after the first answer"
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket = None
        self._buffer = b""

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        self._socket.settimeout(self._timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = parse_object(self._read_line())
        nonce = new_nonce()
        self._lines = SignedLines(self._secret, str(greeting.get("nonce")), nonce, is_server=False)
        self._socket.sendall(b'{"nonce": "%s"}\n' % nonce.encode())

    def _greet(self) -> None:
        answer = {} if self._greeting is None else self._exchange(self._greeting())
        if "refused" in answer:
            raise BadLineError(str(answer["refused"]))

    def _exchange(self, message: Mapping[str, Any]) -> Message:
        assert self._socket is not None
        assert self._lines is not None
        self._socket.sendall(self._lines.seal(message))
        return self._lines.open(self._read_line())

    def _read_line(self) -> bytes:
        assert self._socket is not None
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise BadLineError("the answer is longer than 64 KiB")
            if time.monotonic() > deadline:
                raise BadLineError(f"no answer within {self._timeout_s:g} s")
            block = self._socket.recv(2**16)
            if not block:
                raise BadLineError("the connection was closed; another shared secret has that effect too")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class MeetStore:
    """Key-value store at the meeting point. The ranks of a round find each other through it."""

    def __init__(self, connection: MeetConnection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        """Write a value. Raise MeetError if the meeting point cannot be reached, or does not take the value."""
        answer = self._connection.ask({"do": "set", "key": key, "value": b64encode(value).decode()})
        if "refused" in answer:
            raise MeetError(f"the meeting point refused a value: {answer['refused']}")

    def get(self, key: str) -> bytes:
        """Wait for a value. Raise MeetError if it was not written in time."""
        answer = self._connection.ask({"do": "get", "key": key, "timeout_s": self._timeout_s})
        if "over" in answer:
            raise MeetError("another site has left")
        if "value" not in answer:
            raise MeetError(f"another site did not connect within {self._timeout_s:g} s")
        return b64decode(answer["value"])

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until all keys are written."""
        for key in keys:
            self.get(key)


class Heartbeat:
    """Thread that tells the meeting point that the site is alive, on its own connection."""

    def __init__(self, connection: MeetConnection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="site heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread that tells the meeting point that this site is alive."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its current message."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            # The next round notices and reports a meeting point that is gone.
            with suppress(MeetError):
                self._connection.ask({"do": "beat", "site": self._number})
        self._connection.close()
