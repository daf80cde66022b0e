"""The server listens on names, IPv4 and IPv6 addresses."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn comes with the extra `serve`")

from moefold.errors import ConfigError
from moefold.inference.serve.worker import _listen, _url


def job(host: str) -> Any:
    return SimpleNamespace(options=SimpleNamespace(host=host, port=0))


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
    with _listen(job(host)) as listener:
        port = listener.getsockname()[1]
        assert _url(listener) == f"{url}{port}"
        for client in clients:
            socket.create_connection((client, port), timeout=10).close()


def test_an_unknown_name_is_one_message():
    with pytest.raises(ConfigError, match=r"--host no-such-host.invalid --port 0: cannot listen there \(.+\); choose"):
        _listen(job("no-such-host.invalid"))
