"""Server of `moefold meet`: signed JSON lines over TCP.

A connection begins with one line of each side that holds a random number. All later lines are signed, see
`signed_lines`. The other side asks, the server answers.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from moefold.host.listen import FIRST_WORDS_TIMEOUT_S, ConnectionGuard, GuardedListener
from moefold.launch.meeting import Meeting
from moefold.launch.signed_lines import (
    MAX_LINE_BYTES,
    BadLineError,
    BadRequestError,
    Message,
    SignedLines,
    is_nonce,
    new_nonce,
    parse_object,
)

TICK_S = 0.5
"""Interval between two checks of the timeouts."""


class MeetServer:
    """Async context manager: serves a meeting point on a port."""

    def __init__(
        self, listener: socket.socket, secret: bytes, log: Callable[[str], None], max_connections: int | None = None
    ) -> None:
        self._listener = listener
        self._guard = ConnectionGuard(log, max_connections)
        self._secret = secret
        self._log = log
        self._meeting = Meeting(log)
        self._changed = asyncio.Condition()
        self._num_opened = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def __aenter__(self) -> "MeetServer":
        listener = GuardedListener(self._listener, self._guard)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_LINE_BYTES, backlog=1024)
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._ticker.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._ticker, *self._tasks, return_exceptions=True)

    def end_site(self, number: int, reason: str) -> None:
        """Report to the sites that wait for a site that its process has ended."""
        self._meeting.sites.end_site(number, reason)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for connection in self._meeting.sites.drop_silent():
                # A site that continues after a pause finds its connection closed, and registers again.
                self._writers[connection].close()
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_opened += 1
        connection = self._num_opened
        self._writers[connection] = writer
        address = str(writer.get_extra_info("peername")[0])
        try:
            self._guard.add_silent(connection, writer.transport.abort)
            await self._serve(reader, writer, connection, address)
        except BadLineError as error:
            # A site with another secret tries again every second.
            reason = f"a connection from {address} is closed: {error}"
            self._guard.log_once(str(error), reason)
        except (OSError, ValueError, TimeoutError):
            # The other side has closed the connection, or sends no lines.
            pass
        except asyncio.CancelledError:
            # The server ends. Streams of Python 3.11 print a traceback for a task that is cancelled.
            pass
        finally:
            self._tasks.discard(task)
            self._guard.remove_silent(connection)
            del self._writers[connection]
            self._meeting.sites.close_connection(connection)
            writer.close()
            await self._notify()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int, address: str
    ) -> None:
        server_nonce = new_nonce()
        writer.write(b'{"nonce": "%s"}\n' % server_nonce.encode())
        async with asyncio.timeout(FIRST_WORDS_TIMEOUT_S):
            client_nonce = parse_object(await reader.readline()).get("nonce")
            if not is_nonce(client_nonce):
                raise BadLineError("it sends no random number")
            line = await reader.readline()
        lines = SignedLines(self._secret, server_nonce, str(client_nonce), is_server=True)
        while line:
            message = lines.open(line)
            self._guard.remove_silent(connection)
            following = asyncio.create_task(reader.readline())
            answering = asyncio.create_task(self._respond(message, connection, address))
            try:
                await asyncio.wait({following, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    # The connection is lost: every other line waits for the answer.
                    return
                writer.write(lines.seal(answering.result()))
                await writer.drain()
                line = await following
            finally:
                for task in (following, answering):
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task

    async def _respond(self, message: Message, connection: int, address: str) -> Message:
        """Enter a request and wait for its answer."""
        started_s = time.monotonic()
        try:
            self._meeting.enter(message, connection, address)
            if message["do"] not in ("beat", "get"):
                await self._notify()
            async with self._changed:
                while True:
                    answer = self._meeting.answer(message, connection, time.monotonic() - started_s)
                    if answer is not None:
                        break
                    await self._changed.wait()
        except BadRequestError as error:
            return {"refused": str(error)}
        # The answer to one site may allow the answer to another site.
        await self._notify()
        return answer
