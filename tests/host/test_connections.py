"""Test servers against silent connections, too many of them, endless bodies, and answers that no client reads."""

import contextlib
import http.client
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moefold.host.listen import SPARE_DESCRIPTORS, ConnectionGuard, GuardedListener, listen, most_connections

pytest.importorskip("uvicorn", reason="uvicorn comes with the extras `serve` and `board`")
HALF = b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nX-"
MOST = 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer /stream without end, /read after the body, and all else immediately."""
    if scope["path"] == "/read":
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
    await send({"type": "http.response.start", "status": 413 if scope["method"] == "POST" else 200, "headers": []})
    while scope["path"] == "/stream":
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        if scope["state"]["stopped"].is_set():
            break
    await send({"type": "http.response.body", "body": b"answer"})


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[int]:
    """Run the application on a thread. Yields the port."""
    from moefold.host.http_protocol import make_server

    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    stopped = threading.Event()

    async def with_stop(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"stopped": stopped}}, receive, send)

    server, sockets = make_server(with_stop, listener, max_connections=MOST, **limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
    thread.start()
    try:
        yield port
    finally:
        stopped.set()
        server.should_exit = server.force_exit = True
        thread.join()


def get(port: int) -> int:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("GET", "/")
    status = client.getresponse().status
    client.close()
    return status


def connect(port: int, words: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(words)
    return client


def is_closed(client: socket.socket) -> bool:
    """Wait for the end of a connection."""
    try:
        while client.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_a_client_is_answered_beside_more_silent_ones_than_the_server_takes(capfd):
    with serving() as port:
        silent = [connect(port, words) for _ in range(2 * MOST) for words in (b"", HALF)]
        assert get(port) == 200
        # The oldest ones made room.
        assert is_closed(silent[0])
        for client in silent:
            client.close()
        assert get(port) == 200
    out, error = capfd.readouterr()
    assert (out + error).count("20 connections are open, the most that this server takes") == 1
    assert "Traceback" not in out + error


def test_connections_that_work_are_not_closed_for_others(capfd):
    with serving() as port:
        busy = [connect(port, b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(MOST)]
        for client in busy:
            client.recv(1)
        # Refused, and not left waiting.
        assert is_closed(connect(port))
        assert all(client.recv(1) for client in busy)
        for client in busy:
            client.close()
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "words",
    [
        b"",
        HALF,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HT",
        b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000000\r\n\r\n{",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000000000\r\n\r\n{",
    ],
    ids=["nothing", "half a header", "keep-alive", "half a second header", "half a body", "the rest of a refused body"],
)
def test_a_connection_that_stays_silent_is_closed(words):
    with serving(header_s=0.2, body_s=0.2, linger_s=0.2) as port:
        client = connect(port, words)
        if words == b"GET / HTTP/1.1\r\nHost: a\r\n\r\n":
            # A byte now and then does not keep it open.
            client.recv(1)
            client.sendall(b"G")
        assert is_closed(client)
        assert get(port) == 200


def test_an_endless_body_after_a_refusal_is_not_read():
    with serving() as port:
        client = connect(port, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1 << 30:
                client.sendall(chunk)
                sent += len(chunk)
        assert sent < 1 << 28
        client.close()


def test_a_body_that_ends_after_its_refusal_leaves_the_connection_open():
    with serving(linger_s=60.0) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for _ in range(3):
            client.request("POST", "/", b"x" * 300_000)
            response = client.getresponse()
            assert (response.status, response.read()) == (413, b"answer")
        client.close()


def test_an_answer_that_nobody_reads_is_ended():
    with serving(unread_s=0.2) as port:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(30)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.5)
        assert is_closed(client)


def test_the_same_warning_is_logged_once(capfd):
    with serving() as port:
        for _ in range(20):
            client = connect(port, b"no http\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
            client.close()
    assert "".join(capfd.readouterr()).count("Invalid HTTP request received.") == 1


def test_without_descriptors_connections_are_refused_and_logged_once():
    lines: list[str] = []
    listener = GuardedListener(listen("127.0.0.1", 0), ConnectionGuard(lines.append, 1 << 20))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    clients = [connect(port) for _ in range(5)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, limits[1]))
    # Free descriptors below the limit.
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        for _ in range(10):
            with pytest.raises(BlockingIOError):
                listener.accept()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert lines == ["a connection is refused: Too many open files"]
    assert all(is_closed(client) for client in clients)
    last = connect(port)
    listener.setblocking(True)
    accepted, _ = listener.accept()
    for open_socket in (accepted, last, listener):
        open_socket.close()


def test_the_limit_of_descriptors_is_raised_and_connections_stay_below_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        most = most_connections()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised > 256 or hard == 256
        assert 8 <= most <= raised - SPARE_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
