"""Requests of the OpenAI API in the server's form."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from moefold.inference.engine.requests import LogitRules
from moefold.inference.sampling import MIN_TEMPERATURE, SamplingParams
from moefold.inference.serve.request_fields import (
    ApiError,
    ApiKind,
    ChatFields,
    CompletionFields,
    Message,
    NamedTool,
    SharedFields,
    Tool,
    read_fields,
)

MAX_STOP_STRINGS = 16
MAX_BIAS = 100
DEFAULT_COMPLETION_TOKENS = 16
"""Default of `max_tokens` of /v1/completions, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Tools of a chat."""

    tools: tuple[Mapping[str, Any], ...]
    """Descriptions of the tools, for the template."""
    forced: tuple[str, ...] = ()
    """Names of tools, one of which must be called. Empty means calls are optional."""
    allows_many: bool = True
    """True if an answer may have several calls."""
    is_named: bool = False
    """True if the request names a single tool to call."""

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a tool's arguments."""
        function = next(tool["function"] for tool in self.tools if tool["function"]["name"] == name)
        return function.get("parameters") or {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A checked request."""

    kind: ApiKind
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Prompts of a completion, as text or ids."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Turns of a chat."""
    template_variables: Mapping[str, Any]
    """Other variables of the chat template."""
    continues_last: bool = False
    """True if the last turn stays open and is continued."""
    tool_use: ToolUse | None = None
    schema: str = ""
    """JSON schema of the answer, as JSON. Empty means any text."""
    max_tokens: int | None = None
    """Maximum new tokens. None means as many as fit."""
    sampling: SamplingParams
    rules: LogitRules
    num_samples: int = 1
    """Samples of each prompt."""
    num_choices: int = 1
    """Samples of each prompt in the answer: those with the largest mean log-probability of a token."""
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sample, in addition to the end of text."""
    ignores_end: bool = False
    """True if a sample continues after the model's end-of-text tokens and ends of turns."""
    skips_special: bool = True
    """True if special tokens are omitted from the text."""
    streams: bool = False
    includes_usage: bool = False
    """True if a stream ends with the numbers of tokens."""
    has_log_probs: bool = False
    num_alternatives: int = 0
    """Number of most likely tokens whose log-probabilities are reported at each position."""
    echoes: bool = False
    """True if the text of a completion begins with the prompt."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts of a completion. The messages of a chat are one prompt."""
        return 1 if self.kind == "chat" else len(self.prompts)


def parse_request(body: bytes, kind: ApiKind, model_name: str) -> ApiRequest:
    """Parse and check the JSON body of a request. Raise ApiError if it is not valid, or not supported."""
    fields = read_fields(body, kind)
    if fields.model not in (None, model_name):
        raise ApiError(f"model {fields.model!r} does not exist; this server has {model_name!r}", 404, "model")
    if isinstance(fields, CompletionFields):
        return _completion(fields)
    return _chat(fields)


def _completion(fields: CompletionFields) -> ApiRequest:
    max_tokens = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    echoes = bool(fields.echo)
    if not max_tokens and not echoes:
        raise ApiError("max_tokens=0 must be at least 1, unless echo is true", param="max_tokens")
    if echoes and fields.stream:
        raise ApiError("echo=true is not supported with stream=true; leave one of them out", param="echo")
    num_choices = fields.n or 1
    num_samples = fields.best_of or num_choices
    if num_samples < num_choices:
        raise ApiError(f"best_of={num_samples} must be at least n={num_choices}", param="best_of")
    if num_samples > num_choices and fields.stream:
        raise ApiError("best_of above n is not supported with stream=true; leave one of them out", param="best_of")
    return replace(
        _shared(fields, "completion"),
        num_samples=num_samples,
        prompts=_prompts(fields.prompt),
        max_tokens=max_tokens,
        has_log_probs=fields.logprobs is not None,
        num_alternatives=fields.logprobs or 0,
        echoes=echoes,
    )


def _chat(fields: ChatFields) -> ApiRequest:
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError("top_logprobs has no effect without logprobs=true", param="top_logprobs")
    limits = [limit for limit in (fields.max_tokens, fields.max_completion_tokens) if limit is not None]
    if len(set(limits)) > 1:
        raise ApiError("max_tokens and max_completion_tokens mean the same; give one of them", param="max_tokens")
    if limits and limits[0] < 1:
        raise ApiError("max_tokens=0 must be at least 1", param="max_tokens")
    continues = bool(fields.continue_final_message)
    if continues is not (fields.add_generation_prompt is False):
        raise ApiError(
            "add_generation_prompt=false is supported with continue_final_message=true only, and the latter needs it",
            param="add_generation_prompt",
        )
    if continues and fields.messages[-1].role != "assistant":
        raise ApiError("continue_final_message=true needs a last message of the assistant", param="messages")
    if continues and not isinstance(fields.messages[-1].content, str):
        raise ApiError("continue_final_message=true needs a last message whose content is a text", param="messages")
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    tool_use = _tool_use(fields)
    shared = _shared(fields, "chat")
    if tool_use is not None and shared.schema:
        raise ApiError(
            "response_format and tools cannot be used together; set tool_choice='none', or leave one of them out",
            param="response_format",
        )
    if tool_use is not None and tool_use.forced and shared.rules.min_tokens:
        raise ApiError("min_tokens cannot be used with a forced tool; leave it out", param="min_tokens")
    return replace(
        shared,
        messages=tuple(_turn(message, i) for i, message in enumerate(fields.messages)),
        template_variables=variables,
        continues_last=continues,
        tool_use=tool_use,
        max_tokens=limits[0] if limits else None,
        has_log_probs=bool(fields.logprobs),
        num_alternatives=fields.top_logprobs or 0,
    )


def _shared(fields: SharedFields, kind: ApiKind) -> ApiRequest:
    """Return a request with the settings that are common to both kinds, without its prompt."""
    stops = tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ())
    if len(stops) > MAX_STOP_STRINGS or not all(stops):
        raise ApiError(f"stop must have at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
    options = fields.stream_options
    if options is not None and options.include_usage and not fields.stream:
        raise ApiError("stream_options.include_usage has no effect without stream=true", param="stream_options")
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise ApiError(f"temperature must be 0, or at least {MIN_TEMPERATURE:g}", param="temperature")
    rules = LogitRules(
        bias=_bias(fields.logit_bias or {}),
        repetition_penalty=fields.repetition_penalty or 1.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        min_tokens=fields.min_tokens or 0,
    )
    schema = _schema(fields)
    if schema and (rules.min_tokens or fields.ignore_eos):
        name = "min_tokens" if rules.min_tokens else "ignore_eos"
        raise ApiError(f"{name} cannot be used with response_format, which ends the answer; leave it out", param=name)
    return ApiRequest(
        kind=kind,
        template_variables={},
        sampling=SamplingParams(
            temperature=temperature,
            # The likeliest token is the same with and without the other tokens.
            top_p=(fields.top_p or 1.0) if temperature else 1.0,
            top_k=max(fields.top_k or 0, 0) if temperature else 0,
            min_p=(fields.min_p or 0.0) if temperature else 0.0,
            seed=secrets.randbits(62) if fields.seed is None else fields.seed % 2**63,
        ),
        rules=rules,
        schema=schema,
        num_samples=fields.n or 1,
        num_choices=fields.n or 1,
        stops=stops,
        stop_ids=frozenset(fields.stop_token_ids or ()),
        ignores_end=bool(fields.ignore_eos),
        skips_special=fields.skip_special_tokens is not False,
        streams=bool(fields.stream),
        includes_usage=options is not None and bool(options.include_usage),
    )


def _bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for name, value in biases.items():
        if not name.isdecimal() or not name.isascii() or len(name) > 12:
            raise ApiError(f"logit_bias has the key {name!r}; the keys are token ids", param="logit_bias")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise ApiError(
                f"logit_bias of token {name} is {value:g}; it must be between -{MAX_BIAS} and {MAX_BIAS}",
                param="logit_bias",
            )
        pairs.append((int(name), value))
    return tuple(pairs)


def _schema(fields: SharedFields) -> str:
    """Return the JSON schema that the answer must follow. Empty means any text."""
    answer_format = fields.response_format
    if answer_format is None or answer_format.type == "text":
        return ""
    if answer_format.type == "json_object":
        return json.dumps({"type": "object"})
    schema = None if answer_format.json_schema is None else answer_format.json_schema.json_schema
    if schema is None:
        raise ApiError("response_format.json_schema.schema is required", param="response_format")
    return json.dumps(schema)


def _tool_use(fields: ChatFields) -> ToolUse | None:
    """Return the tools that the model may call. With tool_choice="none" the prompt contains no tools."""
    choice = fields.tool_choice
    if not fields.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice asks for a call, and the request has no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    names = [tool.function.name for tool in fields.tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ApiError(f"tools has the function {repeated[0]!r} twice", param="tools")
    forced: Sequence[str] = ()
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise ApiError(f"tool_choice names {choice.function.name!r}, which is not in tools", param="tool_choice")
        forced = [choice.function.name]
    elif choice == "required":
        forced = names
    if not forced and (strict := [tool.function.name for tool in fields.tools if tool.function.strict]):
        raise ApiError(
            f"tools: strict=true of {strict[0]!r} is kept only where a call is forced; set tool_choice to 'required' "
            "or to a function, or leave strict out",
            param="tools",
        )
    if forced and (fields.ignore_eos or fields.continue_final_message):
        raise ApiError("tool_choice cannot force a call with ignore_eos or continue_final_message", param="tool_choice")
    return ToolUse(
        tools=tuple(_description(tool) for tool in fields.tools),
        forced=tuple(forced),
        allows_many=fields.parallel_tool_calls is not False,
        is_named=isinstance(choice, NamedTool),
    )


def _description(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form of templates, without absent fields."""
    fields = tool.function.model_dump()
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _turn(message: Message, index: int) -> dict[str, Any]:
    """Return a message in the form of chat templates: the arguments of calls are objects.

    If there are calls, null content stays null, because templates test for it.
    """
    place = f"messages[{index}]"
    content = message.content
    if content is None and not message.tool_calls:
        if message.role != "assistant":
            raise ApiError(f"{place}.content is required", param="messages")
        content = ""
    turn: dict[str, Any] = {"role": message.role}
    if isinstance(content, list):
        # Several parts are joined as the template requires; see `join_parts`.
        turn["content"] = [item.model_dump() for item in content] if len(content) != 1 else content[0].text
    else:
        turn["content"] = content
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.reasoning is not None:
        turn.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{number}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{place}.tool_calls[{number}]"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return turn


def _arguments(value: str | Mapping[str, Any], place: str) -> Mapping[str, Any]:
    if not isinstance(value, str):
        return value
    try:
        arguments = from_json(value) if value.strip() else {}
    except ValueError as error:
        raise ApiError(f"{place}.function.arguments is not JSON: {error}", param="messages") from None
    if not isinstance(arguments, dict):
        raise ApiError(f"{place}.function.arguments must be a JSON object", param="messages")
    return arguments


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise ApiError("prompt is empty; give a text, a list of texts, or token ids", param="prompt")
    prompts: list[str | tuple[int, ...]] = []
    ids: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            ids.append(item)
        else:
            prompts.append(item if isinstance(item, str) else tuple(item))
    return (tuple(ids),) if ids else tuple(prompts)


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """Token and its log-probability under the model's distribution, before top-k, top-p and rules of logits."""

    piece: bytes
    """Bytes of the token."""
    log_prob: float | None
    """Log-probability, or None for the first token of a prompt."""
    alternatives: Sequence["TokenLogProb"] = ()
    """The most likely tokens at its position."""
    is_shown: bool = True
    """True if the text contains the token. Special tokens may be omitted."""

    @property
    def text(self) -> str:
        """Text of the token. Bytes of an incomplete character are escaped, as in OpenAI's API."""
        try:
            return self.piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.piece)


@dataclass(frozen=True, kw_only=True)
class ChoiceText:
    """Part of a choice, or a whole one."""

    text: str = ""
    reasoning: str = ""
    """Reasoning before the text."""
    tokens: Sequence[TokenLogProb] = ()
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls in the form of the API."""
    finish_reason: str | None = None


class ResponseBuilder:
    """Builder of the JSON objects of one response."""

    def __init__(self, request: ApiRequest, model_name: str) -> None:
        self._request = request
        self._model_name = model_name
        self._is_chat = request.kind == "chat"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._text_ends: dict[int, int] = {}
        """Number of characters of each choice so far."""
        self._num_calls: dict[int, int] = {}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        return self._envelope("chat.completion" if self._is_chat else "text_completion", choices) | {"usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return an object of a stream. The object with the usage has no choices, all others have a null usage."""
        envelope = self._envelope("chat.completion.chunk" if self._is_chat else "text_completion", choices)
        return envelope | {"usage": usage} if self._request.includes_usage else envelope

    def first_delta(self, index: int) -> dict[str, Any]:
        """Return the choice that begins a stream of a chat."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, choice: ChoiceText, *, is_delta: bool) -> dict[str, Any]:
        """Return a choice with a text or a part of a text."""
        fields = {"index": index, "logprobs": self._log_probs(index, choice), "finish_reason": choice.finish_reason}
        if not self._is_chat:
            return {"text": choice.text} | fields
        calls = list(choice.calls)
        if is_delta:
            first = self._num_calls.get(index, 0)
            self._num_calls[index] = first + len(calls)
            delta: dict[str, Any] = {"reasoning_content": choice.reasoning} if choice.reasoning else {}
            if choice.text:
                delta["content"] = choice.text
            if calls:
                delta["tool_calls"] = [{"index": first + i} | dict(call) for i, call in enumerate(calls)]
            return {"delta": delta} | fields
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls:
            message |= {"content": choice.text if choice.text.strip() else None, "tool_calls": calls}
        return {"message": message} | fields

    def _log_probs(self, index: int, choice: ChoiceText) -> dict[str, Any] | None:
        if not self._request.has_log_probs:
            return None
        if self._is_chat:
            return {
                "content": [
                    _chat_log_prob(token)
                    | {"top_logprobs": [_chat_log_prob(candidate) for candidate in token.alternatives]}
                    for token in choice.tokens
                ],
                "refusal": None,
            }
        offsets = []
        for token in choice.tokens:
            offsets.append(self._text_ends.get(index, 0))
            # The characters that begin in this piece of UTF-8.
            num_characters = sum(byte & 0xC0 != 0x80 for byte in token.piece) if token.is_shown else 0
            self._text_ends[index] = offsets[-1] + num_characters
        return {
            "tokens": [token.text for token in choice.tokens],
            "token_logprobs": [token.log_prob for token in choice.tokens],
            # The token itself is always included. Of several tokens with the same text, the most likely is used.
            "top_logprobs": [
                None
                if token.log_prob is None
                else {candidate.text: candidate.log_prob for candidate in (*reversed(token.alternatives), token)}
                for token in choice.tokens
            ],
            "text_offset": offsets,
        }

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "choices": list(choices),
        }


def _chat_log_prob(token: TokenLogProb) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.log_prob, "bytes": list(token.piece)}


def usage_of(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a response."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }
