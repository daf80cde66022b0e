"""Requests of the API: keys that are understood, and keys that are refused by name."""

import json
from typing import Any

import pytest

from moefold.inference.sampling import SamplingParams
from moefold.inference.serve.openai_requests import parse_request
from moefold.inference.serve.request_fields import ApiError
from moefold.inference.text_stream import StopStringFilter

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def parsed(kind: Any, **fields: Any) -> Any:
    return parse_request(json.dumps(fields).encode(), kind, "m")


def test_prompts_are_texts_or_ids():
    for prompt, expected in (("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2]], ((1,), (2,)))):
        assert parsed("completion", prompt=prompt).prompts == expected


def test_fields_reach_the_sampler():
    request = parsed(
        "completion", prompt="a", temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, n=2, stop="x", logprobs=0
    )
    assert request.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3)
    assert (request.num_samples, request.stops, request.max_tokens, request.has_log_probs) == (2, ("x",), 16, True)
    greedy = parsed("chat", **CHAT, temperature=0, top_p=0.5, min_p=0.5, max_completion_tokens=5)
    assert greedy.sampling.temperature == 0
    greedy.sampling.check()
    assert greedy.max_tokens == 5
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parsed("chat", messages=[{"role": "user", "content": parts}]).messages == (
        {"role": "user", "content": parts},
    )


def test_seeds_differ_where_none_is_given():
    assert parsed("chat", **CHAT).sampling.seed != parsed("chat", **CHAT).sampling.seed


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        ("completion", {}, "prompt", "required"),
        ("completion", {"prompt": []}, "prompt", "empty"),
        ("completion", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ("completion", {"prompt": "a", "echo": True, "stream": True}, "echo", "not supported with stream"),
        ("completion", {"prompt": "a", "logprobs": 21}, "logprobs", "must be at most 20"),
        ("completion", {"prompt": "a", "max_tokens": 0}, "max_tokens", "must be at least 1"),
        ("completion", {"prompt": "a", "n": "2"}, "n", "must be an integer"),
        ("completion", {"prompt": "a", "n": 3, "best_of": 2}, "best_of", "best_of=2 must be at least n=3"),
        ("completion", {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "not supported with stream=true"),
        ("completion", {"prompt": "a", "temperature": -1}, "temperature", "must be at least 0"),
        ("completion", {"prompt": "a", "temperature": 1e-9}, "temperature", "at least 0.001"),
        ("completion", {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "must be at most 2"),
        ("completion", {"prompt": "a", "stop": ["x", ""]}, "stop", "none of them empty"),
        ("completion", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "no effect"),
        ("completion", {"prompt": "a", "model": "other"}, "model", "does not exist"),
        ("chat", CHAT | {"top_logprobs": 2}, "top_logprobs", "no effect without logprobs"),
        ("chat", CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "must be at most 20"),
        ("chat", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "mean the same"),
        ("chat", {"messages": []}, "messages", "at least 1"),
    ],
)
def test_a_refused_request_names_its_parameter(kind, fields, param, message):
    with pytest.raises(ApiError, match=message) as error:
        parsed(kind, **fields)
    assert error.value.param == param
    assert error.value.as_dict()["error"]["param"] == param


def test_a_body_that_is_not_json_is_refused():
    with pytest.raises(ApiError, match="is not JSON"):
        parse_request(b"{", "chat", "m")


def test_text_ends_before_the_first_of_several_stop_strings():
    text = "one two three"
    for stops, expected in ((("two",), "one "), (("three", "o t"), "one tw"), (("wo t", "thr"), "one t"), ((), text)):
        for size in range(1, 5):
            stream = StopStringFilter(*stops)
            pieces = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
            assert "".join(pieces) + stream.finish() == expected
            assert stream.is_stopped == bool(stops)
