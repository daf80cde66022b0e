"""The server answers with JSON of runs, to those that may ask."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `board`: pip install -e '.[board]'")

from starlette.types import ASGIApp

from moefold.board.app import COOKIE, make_app
from moefold.board.page import STATIC_FILES
from moefold.board.run_list import RunList
from tests.board.run_files import HOSTILE, write_faults, write_rollouts, write_run


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def get(app: ASGIApp, address: str, *, method: str = "GET", host: str = "127.0.0.1:6007", **headers: str) -> Answer:
    """Ask the application as a client would, without a socket."""
    parts = urlsplit(address)
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "root_path": "",
        "query_string": parts.query.encode(),
        "headers": [(b"host", host.encode()), *((name.encode(), value.encode()) for name, value in headers.items())],
        "server": ("127.0.0.1", 6007),
        "client": ("127.0.0.1", 50000),
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> RunList:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", 12)
    write_rollouts(folder / "one")
    write_faults(folder / "one")
    write_run(folder / "two", 3)
    return RunList([folder])


@pytest.fixture(scope="module")
def app(runs) -> ASGIApp:
    app = make_app(runs)
    get(app, f"/api/runs?want={','.join(reader.run.key for reader in runs.readers)}")
    return app


def test_the_page_and_its_files_are_served_and_ask_no_other_host(app):
    page = get(app, "/")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    for name, media_type in STATIC_FILES.items():
        file = get(app, f"/static/{name}")
        assert (file.status, file.headers["content-type"]) == (200, media_type)
        assert file.body
        if name.endswith((".js", ".css")):
            assert text.count(f'"static/{name}"') == 1
            assert b"//cdn" not in file.body
    assert "http://" not in text
    assert "https://" not in text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy


def test_the_board_serves_runs_and_series(app, runs):
    one, two = get(app, "/api/runs").json["runs"]
    assert (one["name"], one["step"], two["name"], two["step"]) == ("one", 12, "two", 3)
    key = one["key"]
    series = get(app, f"/api/runs/{key}/series?first=4&last=6").json["series"]
    assert series["loss"]["steps"] == [3, 4, 5, 6, 7]
    assert len(get(app, f"/api/runs/{key}/series?points=3").json["series"]["loss"]["steps"]) <= 5
    assert series["loss"]["smoothed"] == {}
    smooth = get(app, f"/api/runs/{key}/series?smooth=0.9&first=4&last=6").json["series"]
    assert list(smooth["loss"]["smoothed"]) == ["0.9"]
    assert len(smooth["loss"]["smoothed"]["0.9"]) == len(smooth["loss"]["values"])
    assert smooth["lr"]["smoothed"] == smooth["eval_loss"]["smoothed"] == {}
    assert get(app, f"/api/runs/{key}/experts").json["experts"]["num_experts"] == 4
    assert get(app, f"/api/runs/{key}/memory").json["memory"]["step"] == 10
    assert get(app, f"/api/runs/{key}/ranks").json["steps"] == 12
    assert get(app, f"/api/runs/{key}/faults").json["total"] == 2
    assert get(app, f"/api/runs/{key}/recipe").json["settings"]["run.steps"] == 12
    found = get(app, f"/api/runs/{key}/rollouts?text=%3Cscript%3E&limit=5")
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.body.isascii()
    assert found.json["rollouts"][0]["completion"][0]["text"] == HOSTILE


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("/api/runs/0123456789ab/series", 404, "no such run"),
        ("/api/runs/..%2f..%2fetc/series", 404, ""),
        ("/static/../app.py", 404, ""),
        ("/static/index.html", 404, ""),
        ("/api/runs/KEY/series?points=many", 400, "points must be an integer in [0, 20000]"),
        ("/api/runs/KEY/series?smooth=0.5", 400, "smooth must have weights out of 0.6, 0.9, "),
        ("/api/runs/KEY/series?first=-1", 400, "first must be an integer"),
        ("/api/runs/KEY/rollouts?limit=201", 400, "limit must be an integer in [0, 200]"),
        ("/api/runs/KEY/rollouts?min_reward=x", 400, "min_reward must be a number"),
        ("/api/runs/KEY/nothing", 404, ""),
    ],
)
def test_wrong_addresses_are_refused(app, runs, address, status, words):
    answer = get(app, address.replace("KEY", runs.readers[0].run.key))
    assert answer.status == status
    assert words in answer.body.decode()


def test_the_board_refuses_post(app):
    assert get(app, "/api/runs", method="POST").status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:6007", 200), ("localhost:6007", 200), ("[::1]:6007", 200), ("evil.example", 400)],
)
def test_on_the_loopback_only_its_names_are_answered(app, host, status):
    assert get(app, "/api/runs", host=host).status == status


def test_a_token_is_asked_for_in_every_address(runs):
    app = make_app(runs, token="secret-token", is_loopback=False)
    for address in ("/", "/static/board.js", "/api/runs", "/?token=secret", "/?token=%ff"):
        answer = get(app, address, host="node-3:6007")
        assert answer.status == 401
        assert b"asks for a token" in answer.body
    first = get(app, "/?token=secret-token", host="node-3:6007")
    assert (first.status, first.headers["location"]) == (303, "./")
    cookie = first.headers["set-cookie"]
    name = COOKIE.format(port=6007)
    assert cookie.startswith(f"{name}=secret-token;")
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert get(app, "/api/runs", host="node-3:6007", cookie=f"{name}=secret-token").status == 200
    assert get(app, "/api/runs", host="node-3:6008", cookie=f"{name}=secret-token").status == 401
    assert get(app, "/api/runs", host="node-3:6007", authorization="Bearer secret-token").status == 200
    assert get(app, "/api/runs", host="node-3:6007", authorization="Bearer other").status == 401


def test_large_answers_are_compressed(app, runs):
    key = runs.readers[0].run.key
    plain = get(app, f"/api/runs/{key}/series")
    small = get(app, f"/api/runs/{key}/series", **{"accept-encoding": "gzip"})
    assert small.headers["content-encoding"] == "gzip"
    assert len(small.body) < len(plain.body) / 2
