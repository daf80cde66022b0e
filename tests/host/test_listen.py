"""Servers listen on names, IPv4 and IPv6 addresses."""

import socket

import pytest

from moefold.errors import ConfigError
from moefold.host.listen import check_port, listen, url_of


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "url", "clients"),
    [
        ("127.0.0.1", "http://127.0.0.1:", ["127.0.0.1"]),
        ("localhost", "http://127.0.0.1:", ["localhost"]),
        pytest.param("::1", "http://[::1]:", ["::1"], marks=needs_ipv6),
        pytest.param("::", "http://[::]:", ["::1", "127.0.0.1"], marks=needs_ipv6),
    ],
)
def test_clients_reach_the_address(host, url, clients):
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"{url}{port}"
        for client in clients:
            socket.create_connection((client, port), timeout=10).close()


def test_an_unknown_name_is_one_message():
    with pytest.raises(ConfigError, match=r"--host no-such-host.invalid --port 0: cannot listen there \(.+\); choose"):
        listen("no-such-host.invalid", 0)


def test_a_port_in_use_is_one_message():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen there \(.*in use.*\); choose another"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(ConfigError, match=rf"--port {port} must lie in \[0, 65535\]"):
        check_port(port)
