"""Tool calls in the text of an answer: the formats of chat templates, and their readers."""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moefold.inference.serve.openai_requests import ToolUse
from moefold.inference.serve.request_fields import ApiError
from moefold.inference.text_stream import StopStringFilter


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """Arguments as JSON."""


class ParsedCalls(NamedTuple):
    """Calls at the beginning of a text."""

    calls: Sequence[Call]
    length: int
    """Number of characters of the calls."""


class NoCallError(ValueError):
    """A text begins like a call but is not a call."""


CallParser = Callable[[str, bool, ToolUse], ParsedCalls | None]
"""Reads the calls at the beginning of a text (text, whether it is complete, tools), or None if more text is needed.

Raises `NoCallError` if there is no call.
"""


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls."""

    name: str
    begins: tuple[str, ...]
    """Texts that begin a call anywhere in an answer."""
    parse: CallParser
    marks: tuple[str, ...] = ()
    """Other special tokens of the format."""
    starts_answer: str = ""
    """Text that begins a call only at the beginning of an answer."""


_SPACES = " \t\r\n"
_ENDS = frozenset("}]>;" + _SPACES)
"""Characters that may end or follow a call."""
_DECODER = json.JSONDecoder()


def _decoded(text: str, start: int, *, is_end: bool) -> tuple[Any, int] | None:
    """Return the JSON value at a place and its end, or None if it may be incomplete."""
    try:
        return _DECODER.raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError) as error:
        # Invalid and incomplete JSON raise the same error: the following text decides.
        if is_end or isinstance(error, RecursionError):
            raise NoCallError from None
        return None


def _call_of(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NoCallError
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _object_of(arguments)
    if not isinstance(arguments, dict):
        raise NoCallError
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _object_of(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise NoCallError from None
    if not isinstance(value, dict):
        raise NoCallError
    return value


def _skip(text: str, start: int, separators: str = "") -> int:
    """Return the first place without a space or one of the given characters."""
    while start < len(text) and text[start] in _SPACES + separators:
        start += 1
    return start


_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_tagged(text: str, is_end: bool, tool_use: ToolUse) -> ParsedCalls | None:
    """Read `<tool_call>...</tool_call>` with JSON (Hermes, Qwen) or `<function=...>` (Qwen3-Coder), or GLM's form."""
    start = len(_TAG)
    end = text.find(_END_TAG)
    if end < 0 and not is_end:
        return None
    body = text[start : len(text) if end < 0 else end]
    length = len(text) if end < 0 else end + len(_END_TAG)
    if body.lstrip().startswith("{"):
        decoded = _decoded(body, _skip(body, 0), is_end=True)
        assert decoded is not None
        return ParsedCalls([_call_of(decoded[0])], length)
    if (function := _XML_FUNCTION.fullmatch(body)) is not None:
        pairs = _XML_PARAMETER.findall(function[2])
        return ParsedCalls([_call_of_texts(function[1].strip(), pairs, tool_use)], length)
    if end < 0:
        # The answer is truncated: arguments may be missing.
        raise NoCallError
    if "<arg_key>" in body:
        name = body.partition("<arg_key>")[0].strip()
        pairs = [(key.strip(), value) for key, value in _GLM_ARGUMENT.findall(body)]
        return ParsedCalls([_call_of_texts(name, pairs, tool_use)], length)
    name = body.strip()
    if not name or "<" in name:
        raise NoCallError
    return ParsedCalls([Call(name, "{}")], length)


def _call_of_texts(name: str, pairs: Sequence[tuple[str, str]], tool_use: ToolUse) -> Call:
    """Return a call whose arguments are texts. Arguments that are not strings in the tool's schema are JSON."""
    if name not in _names(tool_use):
        raise NoCallError
    schema = tool_use.parameters_of(name)
    types = schema.get("properties", {})
    arguments = {}
    for key, value in pairs:
        declared = types.get(key) if isinstance(types, dict) else None
        arguments[key] = value if isinstance(declared, dict) and declared.get("type") == "string" else _json_or(value)
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _json_or(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_MISTRAL_MARKS = ("[ARGS]", "[CALL_ID]")
_MISTRAL_NAME = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _array_parser(begin: str, end: str = "") -> CallParser:
    """Return a reader of a mark and a JSON array of calls, or of `NAME[ARGS]{...}` (newer Mistral models)."""

    def parse(text: str, is_end: bool, tool_use: ToolUse) -> ParsedCalls | None:
        start = _skip(text, len(begin))
        if start == len(text):
            return _wait(is_end)
        if text[start] in "[{":
            decoded = _decoded(text, start, is_end=is_end)
            if decoded is None:
                return None
            value, stop = decoded
            calls = [_call_of(entry) for entry in (value if isinstance(value, list) else [value])]
            return ParsedCalls(calls, _skip_mark(text, stop, end))
        match = _MISTRAL_NAME.match(text, start)
        if match is None:
            if "{" in text[start:] or len(text) - start > 256:
                raise NoCallError
            return _wait(is_end)
        decoded = _decoded(text, match.end(), is_end=is_end)
        if decoded is None:
            return None
        return ParsedCalls([_call_of({"name": match[1], "arguments": decoded[0]})], _skip_mark(text, decoded[1], end))

    return parse


def _wait(is_end: bool) -> ParsedCalls | None:
    """Return None to request more text. Raise NoCallError if the text is complete."""
    if is_end:
        raise NoCallError
    return None


def _skip_mark(text: str, start: int, mark: str) -> int:
    return start + len(mark) if mark and text.startswith(mark, start) else start


_PYTHON_TAG = "<|python_tag|>"


def _parse_llama(text: str, is_end: bool, tool_use: ToolUse) -> ParsedCalls | None:
    """Read JSON objects with "name" and "parameters", several with ";" between them."""
    start = _skip(text, len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG) else 0, ";")
    if start == len(text):
        return _wait(is_end)
    if text[start] != "{":
        raise NoCallError
    decoded = _decoded(text, start, is_end=is_end)
    if decoded is None:
        return None
    calls = [_call_of(decoded[0])]
    stop = decoded[1]
    if text[_skip(text, stop) :].startswith(";"):
        tail = text[_skip(text, stop, ";") :]
        more = _parse_llama(tail, is_end, tool_use)
        if more is None:
            return None
        return ParsedCalls([*calls, *more.calls], len(text) - len(tail) + more.length)
    # Another call may follow.
    return ParsedCalls(calls, stop) if is_end or text[_skip(text, stop) :] else None


_DEEPSEEK = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")}
_DEEPSEEK_FENCED = re.compile(r"(.*?)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def _parse_deepseek(text: str, is_end: bool, tool_use: ToolUse) -> ParsedCalls | None:
    """Read the calls between DeepSeek's marks: `function<sep>NAME` and a block of JSON (V3), or `NAME<sep>JSON`."""
    end = text.find(_DEEPSEEK["calls▁end"])
    if end < 0 and not is_end:
        return None
    body = text[: len(text) if end < 0 else end]
    calls = []
    for call in body.split(_DEEPSEEK["call▁begin"])[1:]:
        kind, _, tail = call.partition(_DEEPSEEK["call▁end"])[0].partition(_DEEPSEEK["sep"])
        fenced = _DEEPSEEK_FENCED.fullmatch(tail)
        name, arguments = (fenced[1], fenced[2]) if fenced else (kind, tail)
        calls.append(Call(name.strip(), json.dumps(_object_of(arguments), ensure_ascii=False)))
    if not calls:
        raise NoCallError
    return ParsedCalls(calls, len(text) if end < 0 else end + len(_DEEPSEEK["calls▁end"]))


_BAR_TAG, _END_BAR_TAG = "<|tool_call|>", "<|/tool_call|>"

FORMATS = (
    ToolFormat("DeepSeek's", (_DEEPSEEK["calls▁begin"],), _parse_deepseek, tuple(_DEEPSEEK.values())),
    ToolFormat("<tool_call>", (_TAG,), _parse_tagged, (_END_TAG,)),
    ToolFormat("[TOOL_CALLS]", ("[TOOL_CALLS]",), _array_parser("[TOOL_CALLS]"), _MISTRAL_MARKS),
    ToolFormat("<|tool_call|>", (_BAR_TAG,), _array_parser(_BAR_TAG, _END_BAR_TAG), (_END_BAR_TAG,)),
    ToolFormat("Llama 3's JSON", (_PYTHON_TAG,), _parse_llama, starts_answer="{"),
)


def find_format(template: str, location: str) -> ToolFormat:
    """Return the format of calls in a chat template.

    Raises:
        ApiError: the template does not support tools, or has a format of calls without a reader.
    """
    check_takes_tools(template, location)
    for tool_format in FORMATS:
        if any(begin in template for begin in tool_format.begins):
            return tool_format
    if "ipython" in template and '"parameters"' in template:
        return FORMATS[-1]
    names = ", ".join(tool_format.name for tool_format in FORMATS)
    raise ApiError(
        f"the chat template of {location} writes tool calls in a format that this server does not read (it reads "
        f"{names}); force a call by tool_choice='required' or a function's name, or leave tools out",
        param="tools",
    )


def check_takes_tools(template: str, location: str) -> None:
    """Check that a chat template supports descriptions of tools. Raise ApiError if it does not."""
    if not re.search(r"\btools\b", template):
        raise ApiError(f"the chat template of {location} takes no tools; leave them out", param="tools")


def forced_schema(tool_use: ToolUse) -> dict[str, Any]:
    """Return the JSON schema of an answer that must call a tool: its arguments, or a list of calls."""
    if tool_use.is_named:
        return dict(tool_use.parameters_of(tool_use.forced[0]))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": tool_use.parameters_of(name)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in tool_use.forced
    ]
    limit = {} if tool_use.allows_many else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | limit


def _names(tool_use: ToolUse) -> set[str]:
    return {tool["function"]["name"] for tool in tool_use.tools}


class CallReader:
    """Reader that splits an answer into text and calls, as it arrives.

    A call of an unknown tool, and text that only begins like a call, stay text.
    """

    def __init__(self, tool_use: ToolUse, tool_format: ToolFormat | None) -> None:
        """Start an answer. Without a format a call is forced, and the text is JSON by `forced_schema`."""
        self._tool_use = tool_use
        self._format = tool_format
        self._pending = ""
        """Text of a call that is not complete."""
        self._is_in_call = False
        self._has_text = False
        self._skips_spaces = False
        self.num_calls = 0

    @property
    def is_done(self) -> bool:
        """Return whether the answer is complete: only one call is allowed, and it has a call."""
        return self.num_calls > 0 and not self._tool_use.allows_many

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text, and return the text outside of calls, and complete calls."""
        self._pending += text
        # A call is parsed again only after a possible end.
        waits = self._format is None or (self._is_in_call and not _ENDS.intersection(text))
        return ("", []) if waits else self._split(is_end=False)

    def finish(self) -> tuple[str, list[Call]]:
        """Return the text and calls that were held back."""
        return self._forced() if self._format is None else self._split(is_end=True)

    def _forced(self) -> tuple[str, list[Call]]:
        text, self._pending = self._pending, ""
        try:
            values = json.loads(text)
        except ValueError:
            # The answer is truncated.
            return text, []
        if self._tool_use.is_named:
            return "", self._counted([Call(self._tool_use.forced[0], text.strip())])
        return "", self._counted([_call_of(value) for value in values])

    def _split(self, *, is_end: bool) -> tuple[str, list[Call]]:
        assert self._format is not None
        text = ""
        calls: list[Call] = []
        self._is_in_call = False
        while self._pending and not self.is_done:
            start = self._begin(self._pending, is_end=is_end)
            text += self._text(self._pending[:start])
            self._pending = self._pending[start:]
            if not self._pending or not self._is_call(self._pending):
                break
            try:
                call = self._format.parse(self._pending, is_end, self._tool_use)
                if call is not None and any(call.name not in _names(self._tool_use) for call in call.calls):
                    raise NoCallError
            except NoCallError:
                text += self._text(self._pending[0])
                self._pending = self._pending[1:]
                continue
            if call is None:
                self._is_in_call = True
                break
            self._skips_spaces = True
            calls += self._counted(call.calls)
            self._pending = self._pending[call.length :]
        if self.is_done:
            self._pending = ""
        return text, calls

    def _counted(self, calls: Sequence[Call]) -> list[Call]:
        counted = list(calls) if self._tool_use.allows_many else list(calls[:1])
        self.num_calls += len(counted)
        return counted

    def _is_call(self, text: str) -> bool:
        assert self._format is not None
        starts = self._format.starts_answer
        return text.startswith(self._format.begins) or bool(starts and not self._has_text and text.startswith(starts))

    def _begin(self, text: str, *, is_end: bool) -> int:
        """Return the position where a call begins, or may begin with more text."""
        assert self._format is not None
        if not self._has_text and self._is_call(text.lstrip()):
            return len(text) - len(text.lstrip())
        prefix_filter = StopStringFilter(*self._format.begins)
        return len(prefix_filter.push(text) + (prefix_filter.finish() if is_end else ""))

    def _text(self, text: str) -> str:
        """Return text outside of calls, without spaces after calls."""
        if self._skips_spaces:
            text = text.lstrip()
        if text:
            self._skips_spaces = False
        self._has_text = self._has_text or bool(text.strip())
        return text


def call_id(tool_format: ToolFormat | None) -> str:
    """Return an id of a call. Templates of Mistral require nine letters and digits."""
    if tool_format is not None and tool_format.name == "[TOOL_CALLS]":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def as_json(call: Call, identity: str) -> Mapping[str, Any]:
    """Return a call in the form of the API."""
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
