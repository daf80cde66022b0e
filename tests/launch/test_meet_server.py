"""The server of the meeting point on a loopback port: sites, strangers, and lost connections."""

import socket
import threading

import pytest

from moefold.config.base.limits import MAX_STEPS
from moefold.errors import ConfigError
from moefold.launch.meet_client import MeetConnection, MeetError, MeetStore, parse_address
from moefold.launch.signed_lines import MAX_LINE_BYTES
from tests.train.site_jobs import Server

SECRET = b"a secret of the sites"
HELLO = {
    "do": "hello",
    "host": "here",
    "settings": {"sites.count": 2, "sites.quorum": 0},
    "weights": 1,
    "step": 0,
    "round": 0,
}


@pytest.fixture
def server():
    with Server(SECRET).running() as running:
        yield running


def connection(server: Server, secret: bytes = SECRET) -> MeetConnection:
    return MeetConnection("127.0.0.1", server.port, secret, 10.0)


def hello(server: Server, site: int) -> MeetConnection:
    client = connection(server)
    client.ask(HELLO | {"site": site, "version": 0})
    return client


def round_question(site: int) -> dict[str, object]:
    question = {"do": "round", "site": site, "round": 2, "version": 0, "tokens": 8}
    return question | {"finite": True, "digest": 3, "timeout_s": 60.0}


def test_two_sites_meet_and_a_lost_one_ends_the_wait(server):
    first, second = hello(server, 0), hello(server, 1)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(first.ask(round_question(0))))
    asking.start()
    assert second.ask(round_question(1))["members"] == [0, 1]
    asking.join(10)
    assert answers[0]["members"] == [0, 1]
    voting = threading.Thread(
        target=lambda: answers.append(first.ask({"do": "vote", "site": 0, "round": 2, "ok": True}))
    )
    voting.start()
    # The connection is lost while the vote of this site is awaited, as when its process is killed.
    second.close()
    voting.join(10)
    assert answers[1] == {"apply": False, "why": "site 1 left"}
    first.close()


def test_a_site_is_answered_beside_more_silent_connections_than_the_server_takes(capfd):
    with Server(SECRET, max_connections=10).running() as server:
        first = hello(server, 0)
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(40)]
        for i, stranger in enumerate(silent):
            stranger.sendall((b"", b'{"non', b'{"nonce": "%s"}\n' % (b"0" * 32))[i % 3])
        second = hello(server, 1)
        # The signed connection of the first site was not closed for the others.
        assert first.ask({"do": "set", "key": "a", "value": "b"}) is not None
        for client in (first, second, *silent):
            client.close()
    assert [line for line in server.log if "connections are open" in line] == [
        "10 connections are open, the most that this server takes"
    ]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_store_passes_bytes_between_ranks(server):
    writer, reader = (MeetStore(connection(server), 5.0) for _ in range(2))
    found = []
    reading = threading.Thread(target=lambda: found.append(reader.get("1/0/a")))
    reading.start()
    writer.set("1/0/a", bytes(range(256)))
    reading.join(10)
    assert found == [bytes(range(256))]


def test_other_secret_is_refused(server):
    with pytest.raises(MeetError, match="another shared secret has that effect too"):
        connection(server, b"not the secret of the sites").ask(HELLO | {"site": 0, "version": 0})
    assert any("signature" in line for line in server.log)


STRANGERS = {
    "nothing": b"",
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "a pickle": b"\x80\x04\x95\n",
    "a long line": b"x" * (MAX_LINE_BYTES + 10),
    "a deep list": b"[" * 60000 + b"\n",
    "a wrong random number": b'{"nonce": "zz"}\n',
    "an unsigned request": b'{"nonce": "%s"}\n{"do": "left", "site": 0}\n' % (b"0" * 32),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_bytes_of_strangers_close_only_their_connection(server, name):
    site = hello(server, 0)
    with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
        stranger.sendall(STRANGERS[name])
        stranger.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := stranger.recv(2**16):
                received += part
        except ConnectionResetError:
            pass
    # Nothing but the random number of the connection comes back.
    assert received.count(b"\n") <= 1
    assert site.ask(HELLO | {"site": 0, "version": 0}) == {"missing": [1]}
    site.close()


def test_closed_meeting_point_is_an_error_and_a_new_one_is_found():
    with Server(SECRET).running() as first:
        site = hello(first, 0)
    site.greet(lambda: HELLO | {"site": 0, "version": 3, "again": True})
    with pytest.raises(MeetError, match="did not answer"):
        site.ask(round_question(0))
    with Server(SECRET).running(first.port):
        answer = site.ask(round_question(0) | {"version": 3})
        assert answer == {"skip": "only site 0, and sites.quorum needs 2"}
        site.close()


def test_name_that_is_not_a_host_is_an_error_of_the_meeting_point():
    with pytest.raises(MeetError, match=r"the meeting point a\.\.b:80 did not answer"):
        MeetConnection("a..b", 80, SECRET, 1.0).ask({"do": "beat", "site": 0})


def test_full_store_is_an_error(server, monkeypatch):
    monkeypatch.setattr("moefold.launch.meeting.MAX_STORE_BYTES", 10)
    with pytest.raises(MeetError, match="refused a value"):
        MeetStore(connection(server), 5.0).set("key", b"0123456789")


def test_an_address_of_a_meeting_point_is_host_and_port():
    assert parse_address("10.0.0.1:29600") == ("10.0.0.1", 29600)
    assert parse_address("[fe80::1]:80") == ("fe80::1", 80)
    for text in ("", "host", "host:", ":80", "host:port", f"host:{MAX_STEPS}", "host:0"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            parse_address(text)
