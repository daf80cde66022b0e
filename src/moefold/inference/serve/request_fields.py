"""Fields of requests: their types, their neutral values, and error messages.

Null means an absent field. A field without an implementation is accepted only with its neutral values, which do not
change the answer. Other values, and unknown names, are refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from moefold.message_text import closest_match
from moefold.package_table import package_table

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error that answers a request, with the HTTP status and the field of the request."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


MAX_SAMPLES = 128
"""Largest `n`."""
MAX_ALTERNATIVES = 20
"""Largest `logprobs` of completions and `top_logprobs` of chats."""
MAX_BIASED_TOKENS = 1024
MAX_TOOLS = 128

ApiKind = Literal["completion", "chat"]

_TABLES = package_table("inference/serve/request_fields.toml")
LABELS: tuple[str, ...] = tuple(_TABLES["labels"])
"""Fields that identify the client, which have no effect on the answer."""
NEUTRAL: Mapping[str, Sequence[Any]] = MappingProxyType(_TABLES["neutral"])
"""Fields of OpenAI and vLLM without an implementation, and their neutral values."""
_UNIONS: Mapping[str, str] = MappingProxyType(_TABLES["unions"])
"""Texts of the errors for values that have none of a field's types."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    """A call of a function in a message."""

    name: str
    arguments: str | dict[str, Any] = ""
    parsed_arguments: Any = None


class ToolCall(_Strict):
    """A call of a tool in a message."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(_Strict):
    """Turn of a chat, written by a client or sent back from an answer."""

    role: str = Field(max_length=64)
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Fields of answers that are sent back; the parsed form repeats the content.
    refusal: Literal[""] | None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    parsed: Any = None


class FunctionTool(_Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class _FunctionName(_Strict):
    name: str


class NamedTool(_Strict):
    """Choice of one tool."""

    type: Literal["function"]
    function: _FunctionName


class JsonSchema(_Strict):
    """A JSON schema of the answer."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SharedFields(_Strict):
    """Fields of completions and of chats."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASED_TOKENS)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionFields(SharedFields):
    """Fields of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    add_special_tokens: Literal[True] | None = None


class ChatFields(SharedFields):
    """Fields of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


def read_fields(body: bytes, kind: ApiKind) -> CompletionFields | ChatFields:
    """Read the fields of a request. Raise ApiError if the body is not valid, or requests an unsupported feature."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError("the body must be a JSON object")
    schema = CompletionFields if kind == "completion" else ChatFields
    values = {}
    for name, value in content.items():
        if value is None or name in LABELS:
            continue
        if name in schema.model_fields:
            values[name] = value
        else:
            _check_neutral(name, value, schema)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _api_error(error) from None


def _check_neutral(name: str, value: Any, schema: type[SharedFields]) -> None:
    """Refuse a field without an implementation, unless its value is neutral."""
    if name not in NEUTRAL:
        guess = closest_match(name, [*schema.model_fields, *NEUTRAL, *LABELS])
        hint = f"; did you mean {guess!r}?" if guess else "; leave it out"
        raise ApiError(f"{name!r} is not supported: this server has no such field{hint}", param=name)
    values = NEUTRAL[name]
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values):
        return
    neutral_values = " or ".join(json.dumps(neutral) for neutral in values)
    way_out = _TABLES["ways_out"].get(name, f"leave it out{f', or set {neutral_values}' if neutral_values else ''}")
    raise ApiError(f"{name}={_shown(value)} is not supported; {way_out}", param=name)


def _api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    place = _place(first)
    param = str(first["loc"][0])
    name = str(place[-1])
    if name in _UNIONS and first["type"] != "missing":
        return ApiError(f"{_dotted(place)} {_UNIONS[name]}", param=param)
    if first["type"] == "extra_forbidden":
        return ApiError(f"{_dotted(place)} is not supported; leave it out", param=param)
    words = _TABLES["words"].get(first["type"], "is not valid").format(**first.get("ctx", {}))
    value = first["input"]
    value_text = "" if first["type"] == "missing" or isinstance(value, dict | list) else f"={_shown(value)}"
    return ApiError(f"{_dotted(place)}{value_text} {words}", param=param)


def _place(error: ErrorDetails) -> list[str | int]:
    """Return the path of keys to a value, without the names of a union's members, which follow its field."""
    place: list[str | int] = []
    for key in error["loc"]:
        if place and place[-1] in _UNIONS:
            break
        place.append(key)
    return place


def _dotted(place: list[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
