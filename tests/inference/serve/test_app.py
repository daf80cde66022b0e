"""The HTTP application counts samples from the check on, and ends them with the response; without a running engine."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `serve`")

from moefold.data.tokenizer import ByteTokenizer
from moefold.inference.engine.requests import NewToken, Request
from moefold.inference.serve.app import CompletionServer
from moefold.inference.serve.engine_loop import EngineLoop, _Add
from moefold.inference.serve.grammar import JsonGrammars

MAX_SAMPLES = 6


def idle_loop(dp: int = 1) -> EngineLoop:
    """A loop that takes samples and runs no pass."""
    groups: Any = SimpleNamespace(rank=0, attn=SimpleNamespace(dp=SimpleNamespace(size=dp, rank=0)))
    generation: Any = None
    return EngineLoop(generation, groups)


@pytest.fixture
def server() -> CompletionServer:
    options = SimpleNamespace(host="127.0.0.1", max_concurrent=MAX_SAMPLES, max_body_kib=1024, api_key="")
    source = SimpleNamespace(model=SimpleNamespace(vocab_size=256), eos_ids=frozenset(), uses_hf_text_start=False)
    job: Any = SimpleNamespace(options=options, source=source, name="run", max_length=80)
    return CompletionServer(job, ByteTokenizer(), idle_loop(), JsonGrammars(ByteTokenizer(), 256))


class Call:
    """A request to the application, whose client sends its body and then waits, or leaves."""

    def __init__(
        self, server: CompletionServer, body: dict[str, Any], *, sends_half: bool = False, path: str = "/v1/completions"
    ) -> None:
        content = json.dumps(body).encode()
        self._messages = [{"type": "http.request", "body": content, "more_body": sends_half}]
        self._has_left = asyncio.Event()
        self.statuses: list[int] = []
        self.body = b""
        self.started = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET" if path == "/health" else "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(server.app()(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.body += message.get("body", b"")
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
            self.started.set()

    async def leave(self) -> None:
        self._has_left.set()
        await asyncio.wait_for(self.task, 60)


def test_streams_that_begin_at_once_stay_below_the_limit(server):
    async def check() -> list[list[int]]:
        calls = [Call(server, {"prompt": "a", "n": 4, "stream": True}) for _ in range(5)]
        await asyncio.gather(*(call.started.wait() for call in calls))
        assert server.metrics.num_open == 4
        for call in calls:
            await call.leave()
        assert server.metrics.num_open == 0
        return [call.statuses for call in calls]

    assert sorted(asyncio.run(check())) == [[200], [429], [429], [429], [429]]


def test_a_request_of_too_many_samples_is_refused_before_they_are_made(server, monkeypatch):
    made = []
    monkeypatch.setattr("moefold.inference.serve.app.Request", lambda **fields: made.append(fields))

    async def check() -> Call:
        call = Call(server, {"prompt": [[1], [2]], "n": 4})
        await asyncio.wait_for(call.task, 60)
        return call

    call = asyncio.run(check())
    assert call.statuses == [400]
    assert "the request has 8" in json.loads(call.body)["error"]["message"]
    assert not made


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_ends_its_samples(server, streams):
    async def check() -> None:
        call = Call(server, {"prompt": "a", "n": 3, "stream": streams})
        deadline = time.monotonic() + 60
        while not server._loop._receivers and time.monotonic() < deadline:
            await asyncio.sleep(0)
        assert server.metrics.num_open == 3
        await call.leave()
        assert server.metrics.num_open == 0

    asyncio.run(check())
    commands = []
    while not server._loop._commands.empty():
        commands += server._loop._commands.get()
    assert [type(command).__name__ for command in commands] == ["_Add"] * 3 + ["_Cancel"] * 3


def test_a_client_that_leaves_before_its_body_is_complete_is_not_an_error(server):
    async def check() -> None:
        call = Call(server, {"prompt": "a"}, sends_half=True)
        await call.leave()

    asyncio.run(check())
    assert server.metrics.num_open == 0


def test_other_clients_are_answered_while_a_long_prompt_is_tokenised(server, monkeypatch):
    is_answered = threading.Event()
    found = []

    def encode(tokenizer: ByteTokenizer, text: str) -> Any:
        found.append(is_answered.wait(60))
        return np.arange(1, 3)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)

    async def check() -> None:
        long = Call(server, {"prompt": "a long text", "stream": True})
        health = Call(server, {}, path="/health")
        await health.task
        assert health.statuses == [200]
        is_answered.set()
        await asyncio.wait_for(long.started.wait(), 60)
        await long.leave()

    asyncio.run(check())
    assert found == [True]


def added_ranks(loop: EngineLoop, count: int) -> list[int]:
    """The data-parallel ranks of samples that were submitted."""
    commands = [command for _ in range(count) for command in loop._commands.get()]
    return [command.dp_rank for command in commands if isinstance(command, _Add)]


def test_samples_submitted_during_a_pass_are_spread_over_the_ranks():
    loop = idle_loop(dp=3)
    request = Request(prompt=(1,), max_tokens=2)
    received: list[NewToken] = []
    for _ in range(6):
        loop.submit([request], received.append)
    assert added_ranks(loop, 6) == [0, 1, 2, 0, 1, 2]
    # The samples of rank 1 end: the next ones are its own.
    for number in (1, 4):
        loop._send(NewToken(number, 7, -1.0, "length"))
    assert [new.request_id for new in received] == [1, 4]
    loop.submit([request, request], received.append)
    assert added_ranks(loop, 1) == [1, 1]
