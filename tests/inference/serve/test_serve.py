"""`moefold serve` answers as `moefold generate` does, to several clients at once, whole and streamed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from moefold.cli.main import main
from tests.e2e.agents import MOEFOLD
from tests.e2e.command import ROOT, environment
from tests.e2e.forked import start_program
from tests.inference.example import recipe, write_checkpoint

pytest.importorskip("starlette", reason="starlette comes with the extra `serve`")
pytest.importorskip("uvicorn", reason="uvicorn comes with the extra `serve`")
pytestmark = pytest.mark.e2e

OPTIONS = ["--tokenizer", "bytes", "--port", "0", "--max-length", "80", "--max-concurrent", "6", "--device", "cpu"]


class Client:
    """Requests to one server."""

    def __init__(self, port: int) -> None:
        self._port = port

    def send(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        content = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", path, content, {"Content-Type": "application/json"} | headers
        )
        response = connection.getresponse()
        return response.status, response.read().decode()

    def json(self, path: str, body: Any = None) -> Any:
        status, text = self.send(path, body)
        assert status == 200, text
        return json.loads(text)

    def events(self, path: str, body: Any) -> list[Any]:
        status, text = self.send(path, body | {"stream": True})
        assert status == 200, text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


@contextmanager
def serving(run_dir: Path, *words: str) -> Iterator[Client]:
    """A server in a process that has torch in memory."""
    with TemporaryDirectory() as folder:
        pipe = Path(folder) / "pipe"
        os.mkfifo(pipe)
        words = ["serve", str(run_dir), *OPTIONS, *words]
        process = start_program(MOEFOLD, words, [pipe, Path(folder) / "errors"], ROOT, environment())
        try:
            with pipe.open() as printed:
                line = printed.readline()
                assert line.startswith("moefold: run at http://127.0.0.1:"), line
                yield Client(int(line.rpartition(":")[2].removesuffix("/v1\n")))
        finally:
            process.terminate()
            process.join()


@pytest.fixture(scope="module")
def byte_model(pool, tmp_path_factory) -> Path:
    """The run folder of a small Mixtral over bytes."""
    from dataclasses import replace

    run_dir = tmp_path_factory.mktemp("serve") / "run"
    cfg = recipe("mixtral", run_dir)
    pool.run(1, write_checkpoint, replace(cfg, model=replace(cfg.model, vocab_size=258)))
    return run_dir


@pytest.mark.parametrize(
    "mapping",
    [
        [],
        pytest.param(["parallel.pp=2", "parallel.ep=2"], marks=pytest.mark.slow),
        pytest.param(["parallel.tp=2"], marks=pytest.mark.slow),
        pytest.param(["parallel.ep=2", "--experts", "fetch"], marks=pytest.mark.slow),
    ],
    ids=["one", "pp2 ep2", "tp2", "fetch"],
)
def test_a_server_answers_as_generate_does(byte_model, mapping, capsys):
    body = {"prompt": "a prompt", "max_tokens": 6, "temperature": 0, "logprobs": 0}
    assert main(["generate", str(byte_model), "a prompt", "--max-tokens", "6", "--temperature", "0", "--json",
                 "--tokenizer", "bytes", "--device", "cpu"]) == 0  # fmt: skip
    expected = json.loads(capsys.readouterr().out)
    with serving(byte_model, *mapping) as client:
        assert client.json("/v1/models")["data"][0]["id"] == "run"
        found = client.json("/v1/completions", body)
        (choice,) = found["choices"]
        assert choice["text"] == expected["text"]
        assert choice["finish_reason"] == {"length": "length", "eos": "stop"}[expected["end"]]
        assert len(choice["logprobs"]["token_logprobs"]) == len(expected["tokens"])
        assert_alternatives(client, body)
        assert found["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": len(expected["tokens"]),
            "total_tokens": 8 + len(expected["tokens"]),
        }
        events = client.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected["text"]
        assert events[-1]["usage"] == found["usage"]
        assert_chat_and_clients(client)
        assert_refusals(client)


def assert_alternatives(client: Client, body: dict[str, Any]) -> None:
    """The most likely tokens come in falling order, and are the same in a stream and under both endpoints."""
    (choice,) = client.json("/v1/completions", body | {"logprobs": 3})["choices"]
    found = choice["logprobs"]
    streamed = client.events("/v1/completions", body | {"logprobs": 3})
    assert [one for event in streamed for one in event["choices"][0]["logprobs"]["top_logprobs"]] == found[
        "top_logprobs"
    ]
    for token, log_prob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) <= 3
        # Greedy decoding draws the most likely token; of tokens with one text the likeliest counts.
        assert top[token] == log_prob == max(top.values())
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    (choice,) = client.json("/v1/chat/completions", chat | {"top_logprobs": 2})["choices"]
    for one in choice["logprobs"]["content"]:
        assert len(one["top_logprobs"]) == 2
        assert one["top_logprobs"][0] == {key: value for key, value in one.items() if key != "top_logprobs"}
        assert one["top_logprobs"][0]["logprob"] >= one["top_logprobs"][1]["logprob"]


def assert_chat_and_clients(client: Client) -> None:
    """Concurrent clients get the same as each by itself; a chat streams the text that it returns whole."""
    bodies = [{"prompt": f"text {i}", "max_tokens": 9, "seed": i, "n": 2} for i in range(3)]
    alone = [client.json("/v1/completions", body)["choices"] for body in bodies]
    with ThreadPoolExecutor(3) as threads:
        assert [found["choices"] for found in threads.map(lambda b: client.json("/v1/completions", b), bodies)] == alone
    assert len({choice["text"] for choices in alone for choice in choices}) == 6
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1}
    (whole,) = client.json("/v1/chat/completions", chat)["choices"]
    events = client.events("/v1/chat/completions", chat)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole["message"]["content"]
    text = alone[0][0]["text"]
    (stopped, _) = client.json("/v1/completions", bodies[0] | {"stop": text[3]})["choices"]
    assert stopped["text"] == text[: text.index(text[3])]
    assert stopped["finish_reason"] == "stop"


def assert_refusals(client: Client) -> None:
    """Requests that cannot be answered have a status and a message, and the server goes on."""
    path = "/v1/completions"
    for body, status, message in (
        ({"prompt": "x" * 90, "max_tokens": 1}, 400, "the prompt has 90 tokens"),
        ({"prompt": "x", "max_tokens": 500}, 400, "longer than 80"),
        ({"prompt": [999]}, 400, "outside the vocabulary"),
        ({"prompt": "x", "n": 7}, 400, "takes at most 6"),
        ({"prompt": "x", "best_of": 7}, 400, "takes at most 6"),
        ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "the keys are token ids"),
        ({"prompt": "x" * 2**21}, 413, "1024 KiB"),
    ):
        found, text = client.send(path, body)
        assert found == status, text
        assert message in json.loads(text)["error"]["message"]
    found, text = client.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\0"}]})
    assert (found, "the conversation holds a NUL character" in text) == (400, True)
    for wrong_path, status in (("/v1/models/other", 404), ("/v1/embeddings", 404), ("/v1/completions", 405)):
        found, text = client.send(wrong_path)
        assert found == status
        assert json.loads(text)["error"]["message"]
    assert client.json("/v1/models/run")["id"] == "run"
    assert client.send(path, {"prompt": "x"}, **{"Content-Type": "text/plain"})[0] == 415
    assert client.send(path, {"prompt": "x"}, Host="evil.example")[0] == 400
    assert client.json("/health") == {"status": "ok", "samples": 0}


def test_an_interrupted_server_exits_without_the_end_of_the_interpreter(byte_model):
    program = (
        "import atexit, sys; from moefold.cli.main import main; "
        "atexit.register(print, 'the interpreter ends'); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "serve", str(byte_model), *OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("moefold: run at ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "moefold: interrupted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port 70000 must lie in [0, 65535]"),
        (["--cache-gib", "0"], "--cache-gib 0 must be above 0"),
        (["--cache-gib", "1e-9"], "--cache-gib 1e-09 is smaller than one page"),
        (["--cache-gib", "0.001", "--max-length", "100000"], "set a larger --cache-gib, or a smaller --max-length"),
        (["--slots", "0"], "--slots 0 must be at least 1"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen there"),
        (
            ["--host", "no-such-host.invalid", "--port", "0"],
            "--host no-such-host.invalid --port 0: cannot listen there",
        ),
    ],
)
def test_wrong_options_are_one_message(byte_model, capsys, words, message):
    assert main(["serve", str(byte_model), *OPTIONS, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
