"""Requests and answers of clients of the OpenAI API, over an engine whose samples are written in advance."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `serve`")

from moefold.errors import ConfigError
from moefold.inference.serve.app import CompletionServer
from moefold.inference.serve.reasoning import check_reasons
from tests.inference.serve.scripted import TOOL_TEMPLATE, ScriptedLoop, answered, scripted, send, streamed

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TOOLS = ASK | {"tools": [ADD]}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("template") / "tools.jinja"
    file.write_text(TOOL_TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def answering() -> tuple[CompletionServer, ScriptedLoop]:
    return scripted()


@pytest.fixture
def plain(answering) -> tuple[CompletionServer, ScriptedLoop]:
    """A server whose process of the template is shared by tests."""
    answering[1].requests.clear()
    return answering


NEUTRAL = [
    {name: None} for name in ("logit_bias", "tools", "functions", "metadata", "temperature", "n", "stop", "unheard_of")
] + [
    {"logit_bias": {}},
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none"},
    {"functions": []},
    {"parallel_tool_calls": True},
    {"store": False},
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"modalities": ["text"]},
    {"top_logprobs": 0},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"response_format": {"type": "text"}},
    {"ignore_eos": False, "skip_special_tokens": True, "min_tokens": 0, "min_p": 0.0, "best_of": 1},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": True, "continue_final_message": False, "echo": False, "stop_token_ids": []},
    {"stream_options": None, "stream": False, "user": "me", "prompt_cache_key": "k", "verbosity": "medium"},
    {"top_k": -1, "max_tokens": 9, "max_completion_tokens": 9, "seed": -1, "guided_json": {}},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=lambda fields: json.dumps(fields))
def test_fields_that_ask_for_nothing_are_accepted(plain, fields):
    server, loop = plain
    found = answered(server, CHAT, ASK | fields)
    assert found["choices"][0]["message"]["content"].startswith("answer")
    assert loop.requests[0].rules is None


def test_messages_that_clients_send_back_are_accepted(template):
    server, loop = scripted(template=template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    absent = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "parsed": None}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "bob"},
        {"role": "assistant", "content": "x", "tool_calls": None, **absent},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    answered(server, CHAT, {"messages": messages})
    prompt = bytes(loop.requests[0].prompt).decode()
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\n3<|im_end|>" in prompt


REFUSED = [
    ({"logit_bias": {"x": 1}}, "logit_bias", "the keys are token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "outside the vocabulary of 256"),
    ({"stop_token_ids": [999]}, "stop_token_ids", "outside the vocabulary"),
    ({"tools": [ADD]}, "tools", "the chat template of bytes takes no tools"),
    ({"tool_choice": "required"}, "tool_choice", "has no tools"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"store": True}, "store", "store=true is not supported; leave it out, or set false"),
    ({"modalities": ["audio"]}, "modalities", r'set \["text"\]'),
    ({"service_tier": "flex"}, "service_tier", "not supported"),
    ({"min_p": 1.1}, "min_p", "min_p=1.1 must be at most 1"),
    ({"min_p": False}, "min_p", "min_p=false must be a number"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens=5 must be at most max_tokens=4"),
    ({"best_of": 2}, "best_of", "best_of=2 must be 1"),
    ({"suffix": "x"}, "suffix", 'suffix="x" is not supported; leave it out, or set ""'),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "does not read 'enable_thinking'"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "a field of the request itself"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "does not read 'reasoning_effort'"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
    ({"max_token": 4}, "max_token", "did you mean 'max_tokens'"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty=3 must be at most 2"),
    ({"temperature": "hot"}, "temperature", 'temperature="hot" must be a number'),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is required"),
    ({"messages": [{"role": "user"}]}, "messages", r"messages\[0\].content is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", r"messages\[0\].content must be a text"),
    ({"messages": [{"content": "a"}]}, "messages", r"messages\[0\].role is required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "this server reads text only",
    ),
    ({"messages": [{"role": "user", "content": "a", "mood": "x"}]}, "messages", r"messages\[0\].mood is not supported"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_setting_without_implementation_is_refused_by_name_in_words(plain, fields, param, message):
    server, loop = plain
    status, text = send(server, CHAT, ASK | fields)
    assert status == 400, text
    error = json.loads(text)["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(message, error["message"]), error["message"]
    for word in ("pydantic", "Input should", "validation error", "\n"):
        assert word not in error["message"]
    assert not loop.requests


def test_rules_of_logits_reach_the_engine():
    server, loop = scripted()
    rules = {"logit_bias": {"65": -100, "66": 1.5}, "presence_penalty": 0.5, "frequency_penalty": -1}
    answered(server, TEXT, {"prompt": "a", **rules, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9]})
    found = loop.requests[0]
    assert found.rules is not None
    assert found.rules.bias == ((65, -100.0), (66, 1.5))
    assert (found.rules.presence_penalty, found.rules.frequency_penalty) == (0.5, -1)
    assert (found.rules.repetition_penalty, found.rules.min_tokens) == (1.1, 2)
    assert found.eos_ids == {0, 9}
    answered(server, TEXT, {"prompt": "a", "ignore_eos": True})
    assert loop.requests[1].eos_ids == frozenset()


def test_log_probabilities_of_a_completion_have_every_field():
    server, _ = scripted("né")
    found = answered(server, TEXT, {"prompt": "ab", "logprobs": 2, "max_tokens": 9})
    (choice,) = found["choices"]
    assert choice["text"] == "né"
    assert choice["finish_reason"] == "stop"
    # The parts of a character are written out. The end-of-text token is a token of the answer.
    assert choice["logprobs"] == {
        "tokens": ["n", "bytes:\\xc3", "bytes:\\xa9", "\0"],
        "token_logprobs": [-0.125] * 4,
        "top_logprobs": [{"A": -0.5, "B": -1.5, token: -0.125} for token in ("n", "bytes:\\xc3", "bytes:\\xa9", "\0")],
        "text_offset": [0, 1, 2, 2],
    }
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    zero = answered(server, TEXT, {"prompt": "ab", "logprobs": 0})["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"n": -0.125}


def test_log_probabilities_of_a_chat_have_every_field():
    server, _ = scripted("né")
    (choice,) = answered(server, CHAT, ASK | {"logprobs": True, "top_logprobs": 1})["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": token,
            "logprob": -0.125,
            "bytes": [byte],
            "top_logprobs": [{"token": "A", "logprob": -0.5, "bytes": [65]}],
        }
        for token, byte in (("n", 110), ("bytes:\\xc3", 195), ("bytes:\\xa9", 169))
    ]
    events = streamed(server, CHAT, ASK | {"logprobs": True, "stream_options": {"include_usage": True}})
    tokens = [
        token
        for event in events[:-1]
        for one in event["choices"]
        for token in (one["logprobs"] or {"content": []})["content"]
    ]
    assert [token["bytes"] for token in tokens] == [[110], [195], [169]]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4


def test_a_prompt_is_echoed_with_its_log_probabilities():
    server, loop = scripted("xyz")
    body = {"prompt": [[97, 98, 99], [100, 101]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    first, second = answered(server, TEXT, body)["choices"]
    assert (first["text"], second["text"]) == ("abcx", "dex")
    assert first["logprobs"] == {
        "tokens": ["a", "b", "c", "x"],
        "token_logprobs": [None, -1.0, -2.0, -0.125],
        "top_logprobs": [None, {"a": -0.25, "b": -1.0}, {"a": -0.25, "c": -2.0}, {"A": -0.5, "x": -0.125}],
        "text_offset": [0, 1, 2, 3],
    }
    found = answered(server, TEXT, body | {"max_tokens": 0, "prompt": "abc"})
    assert found["choices"][0]["text"] == "abc"
    assert found["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert found["usage"]["completion_tokens"] == 0
    plain = answered(server, TEXT, {"prompt": "abc", "echo": True, "max_tokens": 2})["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("abcxy", None)
    assert loop.requests[-1].prompt_alternatives is None
    assert send(server, TEXT, {"prompt": "abc", "max_tokens": 0})[0] == 400


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_tool_calls_are_parsed_and_finish_the_answer(template):
    server, loop = scripted(f"Let me see.\n{CALL}\n{CALL}", template=template)
    (choice,) = answered(server, CHAT, TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.\n"
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert calls[0]["id"] != calls[1]["id"]
    prompt = bytes(loop.requests[0].prompt).decode()
    assert json.dumps(ADD["function"]["name"]) in prompt  # type: ignore[index]
    one = answered(server, CHAT, TOOLS | {"parallel_tool_calls": False})["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    assert loop.cancelled
    assert "add" not in _prompt(loop, server, TOOLS | {"tool_choice": "none"})


def _prompt(loop: Any, server: Any, body: Any) -> str:
    answered(server, CHAT, body)
    return bytes(loop.requests[-1].prompt).decode()


def test_tool_calls_are_streamed(template):
    server, _ = scripted(f"Hm <b>.{CALL}", CALL, template=template)
    events = streamed(server, CHAT, TOOLS | {"n": 2})
    texts, calls, reasons = {0: "", 1: ""}, {0: [], 1: []}, {}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        calls[choice["index"]] += choice["delta"].get("tool_calls", [])
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "Hm <b>.", 1: ""}
    assert reasons == {0: "tool_calls", 1: "tool_calls"}
    for found in calls.values():
        assert [(call["index"], call["function"]["name"]) for call in found] == [(0, "add")]


def test_text_that_is_not_a_call_stays_text(template):
    for text in ("<tool_call>nothing", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "a <tool_cal"):
        server, _ = scripted(text, template=template)
        (choice,) = answered(server, CHAT, TOOLS)["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"
        deltas = [event["choices"][0]["delta"] for event in streamed(server, CHAT, TOOLS)]
        assert "".join(delta.get("content", "") for delta in deltas) == text


@pytest.mark.parametrize(
    ("answer", "variables", "reasoning", "content"),
    [
        ("why\n</think>\n\nso", {"enable_thinking": True}, "why\n", "\n\nso"),
        (" <think>why</think>so", {}, "why", "so"),
        ("so <think>", {}, "", "so <think>"),
        ("<thin", {}, "", "<thin"),
        ("why </thin", {"enable_thinking": True}, "why </thin", ""),
        ("", {}, "", ""),
    ],
)
def test_reasoning_is_told_apart_from_the_answer(template, answer, variables, reasoning, content):
    ask = ASK | {"chat_template_kwargs": variables}
    server, _ = scripted(answer, template=template, reasoning=True)
    message = answered(server, CHAT, ask)["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
    deltas = [event["choices"][0]["delta"] for event in streamed(server, CHAT, ask)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning
    assert "".join(delta.get("content", "") for delta in deltas) == content
    # Without the option, and in an answer by a grammar, all is content.
    server, _ = scripted(answer, template=template)
    assert answered(server, CHAT, ask)["choices"][0]["message"] == {
        "role": "assistant",
        "content": answer,
        "refusal": None,
    }


def test_reasoning_needs_a_template_with_its_marks():
    with pytest.raises(ConfigError, match="--reasoning has no effect: the chat template of x has no <think>"):
        check_reasons("{{ messages }}", "x")
    check_reasons(TOOL_TEMPLATE + "</think>", "x")


def test_a_forced_tool_is_called_by_a_grammar(template):
    pytest.importorskip("llguidance", reason="llguidance comes with the extra `serve`")
    server, loop = scripted('{"a": 1}', template=template)
    named = TOOLS | {"tool_choice": {"type": "function", "function": {"name": "add"}}}
    (choice,) = answered(server, CHAT, named)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert loop.requests[0].rules is not None
    assert json.loads(loop.requests[0].rules.grammar) == ADD["function"]["parameters"]  # type: ignore[index]
    server, loop = scripted('[{"name": "add", "parameters": {"a": 1}}]', template=template)
    events = streamed(server, CHAT, TOOLS | {"tool_choice": "required"})
    (call,) = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    status, text = send(server, CHAT, TOOLS | {"response_format": {"type": "json_object"}})
    assert (status, json.loads(text)["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tools": [ADD], "tool_choice": "required"},
        {"tools": [ADD]},
    ],
    ids=["object", "schema", "named tool", "any tool", "free tool"],
)
def test_an_answer_cut_inside_its_grammar_ends_by_its_length(template, wanted):
    """Nothing is lost or made up: the text is unchanged, and a call that is not complete stays text."""
    pytest.importorskip("llguidance", reason="llguidance comes with the extra `serve`")
    whole = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    if "tool_choice" in wanted:
        whole = '[{"name": "add", "parameters": {"a": 1}}]' if wanted["tool_choice"] == "required" else '{"a": 1}'
    if "tools" not in wanted:
        whole = '{"a": "b"}'
    # The arguments of a free call are complete before its end tag.
    for length in range(1, len(whole.removesuffix("}</tool_call>")), 7):
        server, _ = scripted(whole, template=template)
        ask = ASK | wanted | {"max_tokens": length}
        (choice,) = answered(server, CHAT, ask)["choices"]
        assert choice["finish_reason"] == "length"
        assert not choice["message"].get("tool_calls")
        assert choice["message"]["content"] == whole[:length]
        events = streamed(server, CHAT, ask)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole[:length]
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_schema_that_cannot_be_followed_is_refused(plain):
    pytest.importorskip("llguidance", reason="llguidance comes with the extra `serve`")
    server, loop = plain
    for schema in ({"type": "nothing"}, {"type": "object", "not": {}}):
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        status, text = send(server, CHAT, ASK | {"response_format": wanted})
        assert status == 400
        assert "the JSON schema cannot be followed" in json.loads(text)["error"]["message"]
    assert not loop.requests


def test_json_formats_without_the_package_name_the_command_that_installs_it(plain, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    server, _ = plain
    status, text = send(server, CHAT, ASK | {"response_format": {"type": "json_object"}})
    assert status == 400
    assert "the package llguidance: pip install" in json.loads(text)["error"]["message"]


def test_a_last_turn_is_continued(plain):
    server, loop = plain
    messages = [*ASK["messages"], {"role": "assistant", "content": "Three"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    answered(server, CHAT, body)
    assert bytes(loop.requests[0].prompt).decode().endswith("<|im_start|>assistant\nThree")


def test_a_key_guards_all_but_the_sign_of_life():
    server, loop = scripted(api_key="secret")
    for given, expected in (
        ({}, 401),
        ({"authorization": "Bearer other"}, 401),
        ({"authorization": "bearer secret"}, 200),
    ):
        for path, body in ((TEXT, {"prompt": "a"}), ("/v1/models", None), ("/metrics", None)):
            status, text = send(server, path, body, **given)
            assert status == expected
            if status == 401:
                assert json.loads(text)["error"]["type"] == "authentication_error"
    assert send(server, "/health")[0] == 200
    assert len(loop.requests) == 1


def test_metrics_and_access_log_count_requests_and_tokens():
    lines: list[str] = []
    server, _ = scripted("abc", log=lines.append)
    answered(server, TEXT, {"prompt": "ab", "max_tokens": 2})
    streamed(server, CHAT, ASK)
    send(server, TEXT, {"prompt": 5})
    send(server, "/secret\nplace")
    status, text = send(server, "/metrics")
    assert status == 200
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert found['moefold_requests_total{path="/v1/completions",status="200"}'] == "1"
    assert found['moefold_requests_total{path="/v1/completions",status="400"}'] == "1"
    assert found['moefold_requests_total{path="other",status="404"}'] == "1"
    assert found["moefold_samples_open"] == "0"
    assert found["moefold_generation_tokens_total"] == "6"
    assert found["moefold_request_seconds_count"] == "4"
    assert found['moefold_first_token_seconds_bucket{le="+Inf"}'] == "2"
    assert len(lines) == 5
    assert " 127.0.0.1 POST /v1/completions 200 " in lines[0]
    assert lines[0].endswith(" 2+2 tokens")


def test_the_access_log_is_one_line_a_request_whatever_its_path(tmp_path: Path):
    from moefold.errors import ConfigError
    from moefold.inference.serve.access import AccessLog

    file = tmp_path / "access.log"
    log = AccessLog(str(file))
    log.write("GET /a\n\x1b[2Jb 404")
    assert file.read_text() == "GET /a\\x0a\\x1b[2Jb 404\n"
    with pytest.raises(ConfigError, match="--access-log .* cannot be written"):
        AccessLog(str(tmp_path / "missing" / "access.log"))
