"""Conversations are read from each form of row, and other rows are refused."""

import pytest

from moefold.data.conversations.conversation_cache import read_conversations
from moefold.data.conversations.conversation_format import parse_conversation
from moefold.data.sources.file_formats import JsonlRecord
from moefold.errors import ConfigError


def read(fields: dict):
    return parse_conversation(JsonlRecord("f.jsonl:7", fields, 0))


def test_conversations_are_read_from_messages_or_prompt_and_response():
    turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
    assert read({"messages": list(turns)}).messages == turns
    assert read({"prompt": "hi", "response": "ho"}).messages == turns
    assert read({"prompt": "hi", "completion": "ho", "id": 3}).messages == turns
    assert (
        read({"messages": list(turns), "tools": [1]}).tools
        == read({"messages": list(turns), "tools": "[1]"}).tools
        == [1]
    )
    assert read({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}).messages


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({"instruction": "hi", "output": "ho"}, [("user", "hi"), ("assistant", "ho")]),
        ({"instruction": "hi", "input": "", "output": "ho"}, [("user", "hi"), ("assistant", "ho")]),
        ({"instruction": "hi", "input": "you", "output": "ho"}, [("user", "hi\n\nyou"), ("assistant", "ho")]),
        (
            {"system": "s", "instruction": "hi", "output": "ho"},
            [("system", "s"), ("user", "hi"), ("assistant", "ho")],
        ),
        ({"instruction": "x", "prompt": "hi", "response": "ho"}, [("user", "hi"), ("assistant", "ho")]),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "id": 1},
            [("user", "hi"), ("assistant", "ho")],
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "hi"}]},
            [("system", "s"), ("user", "hi")],
        ),
        ({"conversations": [{"role": "user", "content": "hi"}]}, [("user", "hi")]),
        ({"system": "s", "messages": [{"role": "user", "content": "hi"}]}, [("system", "s"), ("user", "hi")]),
        ({"system": "s", "prompt": "hi", "response": "ho"}, [("system", "s"), ("user", "hi"), ("assistant", "ho")]),
    ],
)
def test_rows_of_alpaca_and_sharegpt(fields, turns):
    assert [(message["role"], message["content"]) for message in read(fields).messages] == turns


def test_other_fields_of_a_turn_of_sharegpt_stay():
    calls = [{"function": {"name": "f", "arguments": {}}}]
    turn = {"from": "gpt", "value": "a", "reasoning_content": "r", "tool_calls": calls, "weight": 0, "id": None}
    parsed = read({"conversations": [{"from": "human", "value": "q"}, turn]})
    kept = {name: parsed.messages[1].get(name) for name in ("role", "content", "reasoning_content", "tool_calls")}
    assert kept == {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": calls}
    assert parsed.untrained == {1}
    assert not parsed.messages[1].keys() & {"from", "value", "weight", "id"}


def test_a_system_text_moves_the_untrained_messages():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": False}]
    assert read({"messages": turns, "system": "s", "tools": [1]}).untrained == {2}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"content": "hi"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "message 2 has no text"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 1 has no text"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "a", "content": "\ud800"}]},
            "message 2 is not Unicode",
        ),
        ({"messages": [{"role": "\ud800", "content": "a"}]}, "message 1 is not Unicode text"),
        ({"prompt": "hi", "response": "\udc00"}, "'response' is not Unicode text"),
        ({"system": "s", "messages": [{"role": "system", "content": "t"}]}, "remove one"),
        ({"system": ["s"], "messages": [{"role": "user", "content": "t"}]}, "column 'system' holds a list"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "at least one message"),
        ({"messages": ["hi"]}, "message 1 must be an object"),
        ({"message": []}, "'message' has another name"),
        ({"prompt": "hi", "responce": "x"}, "did you mean 'responce'"),
        ({"a": 1}, "is not a conversation"),
        ({"conversations": []}, "at least one turn"),
        ({"conversations": ["hi"]}, "turn 1 must be an object"),
        (
            {"conversations": [{"from": "alien", "value": "a"}]},
            "turn 1 has \"from\": 'alien'; it must be one of system",
        ),
        ({"conversations": [{"from": "gpt"}]}, "turn 1: no column 'value'"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1: column 'value' holds a number"),
        ({"instruction": "a"}, "no column 'output'"),
        ({"instruction": "a", "input": ["b"], "output": "c"}, "column 'input' holds a list"),
        # Parts of a conversation that the messages lack.
        (
            {"messages": [{"role": "user", "content": "<image>"}], "images": ["a.png"]},
            "has 'images', which is not read",
        ),
        ({"conversations": [{"from": "gpt", "value": "a"}], "image": "a.png"}, "has 'image', which is not read"),
        ({"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]}, "has 'functions', which is"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "has 'history', which is not read"),
        ({"instruction": "a", "output": "b", "context": "c"}, "has 'context', which is not read"),
        ({"prompt": "a", "response": "b", "history": [["c", "d"]]}, "has 'history', which is not read"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "user", "content": "a"}]},
            '"completion" begins with the messages of "prompt" again',
        ),
    ],
)
def test_rows_that_are_not_conversations(fields: dict, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        read(fields)
    assert "f.jsonl:7" in str(error.value)


def test_an_empty_field_leaves_out_nothing():
    assert read({"prompt": "a", "response": "b", "history": [], "images": [], "image": None}).messages


@pytest.mark.parametrize(
    "field",
    [{"weight": 0}, {"weight": 0.5}, {"train": False}, {"trainable": False}, {"weight": "0.5"}, {"train": "false"}],
)
def test_a_weight_of_a_row_is_refused_unless_it_is_the_reward(field: dict):
    """It was ignored: only messages have weights."""
    (name,) = field
    record = JsonlRecord("f.jsonl:7", {"prompt": "a", "response": "b"} | field, 0)
    with pytest.raises(ConfigError, match=f'f.jsonl:7 has "{name}": .*, which is not read.*; put "weight": 0 into'):
        list(read_conversations(iter([record])))
    (conversation,) = read_conversations(iter([record]), name)
    assert conversation.messages[1] == {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("field", [{}, {"weight": 1.0}, {"weight": None}, {"weight": "5 kg"}, {"train": True}])
def test_a_row_that_counts_as_one_is_read(field: dict):
    record = JsonlRecord("f.jsonl:7", {"prompt": "a", "response": "b"} | field, 0)
    assert len(list(read_conversations(iter([record])))) == 1
