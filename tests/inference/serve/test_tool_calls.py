"""Formats of tool calls: each is found by its template and read from text that comes in pieces of any size."""

import json

import pytest

from moefold.inference.serve.openai_requests import ToolUse
from moefold.inference.serve.request_fields import ApiError
from moefold.inference.serve.tool_calls import Call, CallReader, find_format, forced_schema

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
USE = ToolUse(
    tools=tuple({"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "say"))
)
ADD = Call("add", '{"a": 1, "text": "x}]"}')
SAY = Call("say", '{"text": "7"}')
ARRAY = f'[{{"name": "add", "arguments": {ADD.arguments}}}, {{"name": "say", "arguments": {SAY.arguments}}}]'
LLAMA = f'{{"name": "add", "parameters": {ADD.arguments}}}; {{"name": "say", "parameters": {SAY.arguments}}}'
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n" + ADD.arguments + "\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n```json\n" + SAY.arguments + "\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD.arguments}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>say<｜tool▁sep｜>{SAY.arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FORMATS = {
    "hermes": (
        "tools <tool_call>",
        f'<tool_call>\n{{"name": "add", "arguments": {ADD.arguments}}}\n</tool_call>\n'
        f'<tool_call>{{"name": "say", "arguments": {SAY.arguments}}}</tool_call>',
    ),
    "qwen3-coder": (
        "tools <tool_call> <function=",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\nx}]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=say>\n<parameter=text>\n7\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        "tools <tool_call> <arg_key>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>text</arg_key>\n"
        "<arg_value>x}]</arg_value>\n</tool_call>\n<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n"
        "</tool_call>",
    ),
    "mistral": (
        "tools [TOOL_CALLS]",
        f"[TOOL_CALLS] {ARRAY}",
    ),
    "mistral by name": (
        "tools [TOOL_CALLS] [ARGS]",
        f"[TOOL_CALLS]add[ARGS]{ADD.arguments}[TOOL_CALLS]say[CALL_ID]abc[ARGS]{SAY.arguments}",
    ),
    "granite": (
        "tools <|tool_call|>",
        f"<|tool_call|>{ARRAY}",
    ),
    "llama": (
        'tools ipython "parameters"',
        LLAMA,
    ),
    "llama by tag": (
        "tools <|python_tag|>",
        f"<|python_tag|>{LLAMA}",
    ),
    "deepseek-v3": ("tools <｜tool▁calls▁begin｜>", DEEPSEEK_V3),
    "deepseek-v3.1": ("tools <｜tool▁calls▁begin｜>", DEEPSEEK_V31),
}


def read(template: str, text: str, size: int, use: ToolUse = USE) -> tuple[str, list[Call]]:
    reader = CallReader(use, find_format(template, "here"))
    found, calls = "", []
    for start in range(0, len(text), size):
        more, new = reader.push(text[start : start + size])
        found += more
        calls += new
    more, new = reader.finish()
    return found + more, calls + new


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_from_pieces_of_any_size(name, size):
    template, text = FORMATS[name]
    assert read(template, text, size) == ("", [ADD, SAY])
    if name != "llama":
        assert read(template, "I look. " + text, size) == ("I look. ", [ADD, SAY])
    (one,) = read(template, text, size, ToolUse(tools=USE.tools, allows_many=False))[1]
    assert one == ADD


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_output_that_is_not_a_call_stays_text(name, size):
    template, text = FORMATS[name]
    cut = text[: len(text) // 4]
    for words in (cut, text.replace("add", "sub", 1)[: text.find("say") - 10], "{} [] <tool", "plain", "", '{"a": 1}'):
        found, calls = read(template, words, size)
        assert (found, calls) == (words, []) or calls == []
        assert found.replace(" ", "").replace("\n", "") == words.replace(" ", "").replace("\n", "")


def test_a_template_without_a_readable_format_is_refused():
    with pytest.raises(ApiError, match="takes no tools"):
        find_format("{{ messages }}", "here")
    with pytest.raises(ApiError, match="does not read .*<tool_call>, .*tool_choice='required'"):
        find_format("{{ tools }} <|channel|>commentary", "here")


def test_the_schema_of_a_forced_call_lists_the_tools():
    schema = forced_schema(ToolUse(tools=USE.tools, forced=("add", "say"), allows_many=False))
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert (names, schema["minItems"], schema["maxItems"]) == (["add", "say"], 1, 1)
    assert forced_schema(ToolUse(tools=USE.tools, forced=("say",), is_named=True)) == PARAMETERS
    reader = CallReader(ToolUse(tools=USE.tools, forced=("add",)), None)
    assert reader.push('[{"name": "add", "parameters"') == ("", [])
    # An answer that was cut stays text.
    assert reader.finish() == ('[{"name": "add", "parameters"', [])
    assert json.loads(SAY.arguments) == {"text": "7"}
