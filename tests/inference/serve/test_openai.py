"""The official client of the OpenAI API, and lm-eval, against a server with a small model, in this process."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `serve`")
pytest.importorskip("uvicorn", reason="uvicorn comes with the extra `serve`")

from tests.inference.example import CPU, recipe, write_checkpoint
from tests.inference.serve.scripted import TOOL_TEMPLATE

MESSAGES: Any = [{"role": "user", "content": "What comes after two?"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "word": {"enum": ["one", "two"]}},
    "required": ["n", "word"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def address(pool, single_rank, tmp_path_factory) -> Iterator[str]:
    """The address of a server with a small Mixtral over bytes."""
    from moefold.host.http_protocol import make_server
    from moefold.host.listen import listen, url_of
    from moefold.inference.engine.engine import RolloutEngine
    from moefold.inference.load import load_model
    from moefold.inference.sampling import SamplingParams
    from moefold.inference.serve.app import CompletionServer
    from moefold.inference.serve.engine_loop import EngineLoop
    from moefold.inference.serve.grammar import JsonGrammars
    from moefold.inference.serve.job import ServeOptions, prepare_server
    from moefold.inference.text import open_tokenizer

    folder = tmp_path_factory.mktemp("openai")
    template = folder / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    cfg = recipe("mixtral", folder / "run")
    pool.run(1, write_checkpoint, replace(cfg, model=replace(cfg.model, vocab_size=258)))
    options = ServeOptions(
        tokenizer="bytes", port=0, max_length=800, device="cpu", chat_template=str(template), api_key="key"
    )
    job = prepare_server(str(folder / "run"), [], options, None, lambda skipped: None)
    tokenizer = open_tokenizer(job.source, "bytes")
    loaded = load_model(job.source, job.cfg, CPU, tokenizer)
    grammars = JsonGrammars(tokenizer, job.source.model.vocab_size)
    listener = listen("127.0.0.1", 0)
    with RolloutEngine(loaded.model, job.settings, SamplingParams()).open(job.num_pages, grammars.start) as generation:
        loop = EngineLoop(generation, loaded.groups)
        url = url_of(listener)
        http, sockets = make_server(CompletionServer(job, tokenizer, loop, grammars).app(), listener)
        threads = [threading.Thread(target=http.run, kwargs={"sockets": sockets}), threading.Thread(target=loop.run)]
        for thread in threads:
            thread.start()
        yield url
        http.should_exit = True
        loop.stop()
        for thread in threads:
            thread.join(60)


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    openai = pytest.importorskip("openai", reason="the client of the OpenAI API is optional")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0, timeout=60)


def test_chats_and_completions_of_the_client(client):
    import openai

    assert [model.id for model in client.models.list()] == ["run"]
    ask: Any = {"model": "run", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3, n=2, seed=1)
    assert chat.choices[0].message == chat.choices[1].message
    for token in chat.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob
        assert bytes(token.bytes)
    assert chat.usage.completion_tokens <= 12
    events = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == chat.choices[0].message.content
    assert events[-1].usage.total_tokens == events[-1].usage.prompt_tokens + events[-1].usage.completion_tokens
    again = client.chat.completions.create(
        model="run", messages=[*MESSAGES, chat.choices[0].message.model_dump(), *MESSAGES], max_tokens=2
    )
    assert again.choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.BadRequestError, match="store=true is not supported"):
        client.chat.completions.create(model="run", messages=MESSAGES, store=True)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=MESSAGES)


def test_a_bias_and_a_penalty_change_what_is_drawn(client):
    def drawn(**fields: Any) -> Any:
        return client.completions.create(
            model="run", prompt="a b", max_tokens=12, temperature=0, logprobs=1, extra_body={"min_tokens": 12}, **fields
        ).choices[0]

    plain = drawn()
    first = plain.logprobs.tokens[0]
    (number,) = first.encode() if len(first) == 1 else bytes.fromhex(first.removeprefix("bytes:\\x"))[:1]
    banned = drawn(logit_bias={str(number): -100})
    assert first not in banned.logprobs.tokens
    # What is reported is the model's own law.
    assert banned.logprobs.top_logprobs[0][first] == pytest.approx(plain.logprobs.token_logprobs[0], abs=1e-5)
    varied = drawn(frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(varied.logprobs.tokens)) >= len(set(plain.logprobs.tokens))


def test_an_echoed_prompt_has_the_log_probabilities_of_a_completion(client):
    def answer(prompt: str, **fields: Any) -> Any:
        return client.completions.create(model="run", prompt=prompt, temperature=0, logprobs=2, **fields).choices[0]

    whole = answer("hello", max_tokens=3, extra_body={"min_tokens": 3})
    echoed = answer("hello" + whole.text, echo=True, max_tokens=0)
    assert echoed.text == "hello" + whole.text
    assert echoed.logprobs.token_logprobs[0] is None
    if "\ufffd" not in whole.text:
        assert echoed.logprobs.token_logprobs[5:] == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_formats_are_kept_by_a_model_that_never_learned_them(client, seed):
    pytest.importorskip("llguidance", reason="llguidance comes with the extra `serve`")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    ask: Any = {"model": "run", "messages": MESSAGES, "seed": seed, "temperature": 0.5, "max_tokens": 300}
    choice = client.chat.completions.create(**ask, response_format=wanted).choices[0]
    if choice.finish_reason == "stop":
        found = json.loads(choice.message.content)
        assert set(found) == {"n", "word"}
    assert choice.message.content.lstrip(" \t\r\n").startswith("{")
    tool: Any = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA, "strict": True}}
    choice = client.chat.completions.create(**ask, tools=[tool], tool_choice="required").choices[0]
    if choice.finish_reason == "tool_calls":
        assert choice.message.tool_calls[0].function.name == "pick"
        assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"n", "word"}


@pytest.mark.slow
def test_lm_eval_scores_as_the_model_itself(address, monkeypatch, tmp_path: Path):
    pytest.importorskip("lm_eval", reason="lm-eval comes with the extra `eval`")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "key")
    model = LocalCompletionsAPI(
        model="run",
        base_url=f"{address}/v1/completions",
        tokenizer_backend=None,
        tokenized_requests=True,
        max_length=500,
    )
    model.tok_encode = lambda text, **_: list(text.encode())
    request = Instance("loglikelihood", {}, ("hello wo", "rld"), 0)
    context, continuation = list(b"hello wo"), list(b"rld")
    ((log_prob, is_greedy),) = model._loglikelihood_tokens([(request.args, context, continuation)])
    assert log_prob < 0
    assert is_greedy in (True, False)
