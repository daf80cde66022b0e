"""Test the official client of the OpenAI API, and lm-eval, against a server with a small model."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `serve`")
pytest.importorskip("uvicorn", reason="uvicorn comes with the extra `serve`")

from tests.inference.example import CPU, opened, recipe, write_checkpoint
from tests.inference.serve.scripted import TOOL_TEMPLATE
from tests.inference.words import WORDS, save_with_words

MESSAGES: Any = [{"role": "user", "content": "What comes after two?"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "word": {"enum": ["one", "two"]}},
    "required": ["n", "word"],
    "additionalProperties": False,
}


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[str]:
    """The address of a server in this process."""
    from moefold.host.http_protocol import make_server
    from moefold.host.listen import listen, url_of
    from moefold.inference.engine.engine import GenerationEngine
    from moefold.inference.load import load_model
    from moefold.inference.sampling import SamplingParams
    from moefold.inference.serve.app import CompletionServer
    from moefold.inference.serve.engine_loop import EngineLoop
    from moefold.inference.serve.grammar import JsonGrammars
    from moefold.inference.serve.job import ServeOptions, prepare_server
    from moefold.inference.text import open_tokenizer

    given = ServeOptions(port=0, device="cpu", api_key="key", **options)
    job = prepare_server(str(model), [], given, None)
    tokenizer = open_tokenizer(job.source, given.tokenizer)
    loaded = load_model(job.source, job.cfg, CPU, tokenizer)
    grammars = JsonGrammars(tokenizer, job.source.model.vocab_size)
    listener = listen("127.0.0.1", 0)
    with GenerationEngine(loaded.model, job.settings, SamplingParams()).open(
        job.num_pages, grammars.start
    ) as generation:
        loop = EngineLoop(generation, loaded.model.groups)
        url = url_of(listener)
        http, sockets = make_server(CompletionServer(job, tokenizer, loop, grammars).app(), listener)
        threads = [threading.Thread(target=http.run, kwargs={"sockets": sockets}), threading.Thread(target=loop.run)]
        for thread in threads:
            thread.start()
        try:
            yield url
        finally:
            http.should_exit = True
            loop.stop()
            for thread in threads:
                thread.join(60)


@pytest.fixture(scope="module")
def address(pool, single_rank, tmp_path_factory) -> Iterator[str]:
    """The address of a server with a small Mixtral over bytes."""
    folder = tmp_path_factory.mktemp("openai")
    template = folder / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    cfg = recipe("mixtral", folder / "run")
    pool.run(1, write_checkpoint, replace(cfg, model=replace(cfg.model, vocab_size=258)))
    with serving(folder / "run", tokenizer="bytes", max_length=800, chat_template=str(template)) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    openai = pytest.importorskip("openai", reason="the client of the OpenAI API is optional: pip install openai")
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


def test_a_bias_and_a_penalty_change_the_draw(client):
    def drawn(**fields: Any) -> Any:
        return client.completions.create(
            model="run", prompt="a b", max_tokens=12, temperature=0, logprobs=1, extra_body={"min_tokens": 12}, **fields
        ).choices[0]

    plain = drawn()
    first = plain.logprobs.tokens[0]
    (number,) = first.encode() if len(first) == 1 else bytes.fromhex(first.removeprefix("bytes:\\x"))[:1]
    banned = drawn(logit_bias={str(number): -100})
    assert first not in banned.logprobs.tokens
    # The model's own distribution is reported.
    assert banned.logprobs.top_logprobs[0][first] == pytest.approx(plain.logprobs.token_logprobs[0], abs=1e-5)
    varied = drawn(frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(varied.logprobs.tokens)) >= len(set(plain.logprobs.tokens))


def test_the_best_of_several_samples_are_answered(client):
    ask: Any = {"model": "run", "prompt": ["a b", "c"], "max_tokens": 6, "logprobs": 0, "seed": 3}
    everything = client.completions.create(**ask, n=5)
    found = client.completions.create(**ask, n=2, best_of=5)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    for first in (0, 1):
        of_prompt = sorted(everything.choices[5 * first : 5 * first + 5], key=mean, reverse=True)
        assert [choice.text for choice in found.choices[2 * first : 2 * first + 2]] == [
            choice.text for choice in of_prompt[:2]
        ]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage == everything.usage


def test_tokens_far_below_the_likeliest_are_not_drawn(client):
    ask: Any = {"model": "run", "prompt": "a b", "max_tokens": 8, "logprobs": 0, "seed": 3}
    likeliest = client.completions.create(**ask, temperature=0).choices[0]
    found = client.completions.create(**ask, extra_body={"min_p": 1.0}).choices[0]
    assert found.text == likeliest.text
    assert client.completions.create(**ask).choices[0].text != likeliest.text


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
def test_lm_eval_scores_as_the_model_itself(single_rank, monkeypatch, tmp_path: Path):
    """Under local-completions a model has the log-likelihoods, greedy flags and texts that lm-eval's moefold has."""
    pytest.importorskip("lm_eval", reason="pip install -e '.[eval]' 'lm-eval[api]' installs lm-eval and its client")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from moefold.inference.lm_eval_model import MoefoldLM
    from moefold.inference.scoring import ServedModel
    from moefold.inference.source import find_source
    from moefold.inference.text import open_tokenizer

    folder = save_with_words(tmp_path / "model")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    # One of the words after "the cat" may be the model's choice.
    pairs = [("the cat", f" {word}") for word in WORDS[2:]]
    pairs += [("", "the mat ."), ("the mat", " sat the dog"), ("the cat sat on a mat", " . a")]
    with serving(folder, max_length=48) as url:
        given = f"model=model,base_url={url}/v1/completions,tokenizer={folder},max_length=24,num_concurrent=2"
        loaded = opened(folder, "generate", {}, 24, 2)
        served = ServedModel(replace(loaded, tokenizer=open_tokenizer(find_source(str(folder)))))
        models = [
            LocalCompletionsAPI.create_from_arg_string(given, {"batch_size": 2}),
            MoefoldLM(served, path=str(folder), max_length=24),
        ]
        theirs, ours = (
            (
                model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs]),
                model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("the cat sat on a mat .",), 0)]),
                model.generate_until(
                    [Instance("generate_until", {}, ("the cat", {"until": [], "max_gen_toks": 6}), 0)]
                ),
            )
            for model in models
        )
    assert [flag for _, flag in theirs[0]] == [flag for _, flag in ours[0]]
    assert [value for value, _ in theirs[0]] == pytest.approx([value for value, _ in ours[0]], rel=1e-6)
    assert theirs[1] == pytest.approx(ours[1], rel=1e-6)
    assert theirs[2] == ours[2]
