"""Programs that have the port at which ranks want to meet, but are not stores."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[socket.socket], None]


def is_silent(connection: socket.socket) -> None:
    """Accept, and never answer."""


def hangs_up(connection: socket.socket) -> None:
    """Close immediately."""
    connection.close()


def talks_nonsense(connection: socket.socket) -> None:
    """Answer in another protocol, before it is asked."""
    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 50)


@contextmanager
def listening(answer: Answer) -> Iterator[int]:
    """Yield the port of a server on the loopback address that answers every connection so."""
    kept = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        # Wakes the thread, which holds the socket open.
        server.shutdown(socket.SHUT_RDWR)
