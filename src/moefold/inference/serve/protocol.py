"""Requests and responses of the OpenAI API that the server understands. Torch-free.

A field that is unknown, or has a value that would have no effect, is refused with its name.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moefold.inference.sampling import MIN_TEMPERATURE, SamplingParams

MAX_STOP_STRINGS = 16
MAX_SAMPLES = 128
"""Largest `n`."""
MAX_ALTERNATIVES = 20
"""Largest `logprobs` of completions and `top_logprobs` of chats."""
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where a request has none, as OpenAI's."""

ApiKind = Literal["completion", "chat"]


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        message: what is wrong, and what would be right.
        status: HTTP status.
        param: field of the request.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Strict):
    include_usage: bool = False


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: str = Field(max_length=64)
    content: str | list[_TextPart]

    def as_turn(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class _TextFormat(_Strict):
    type: Literal["text"]


class _SharedFields(_Strict):
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    # Other values than the neutral ones have no implementation.
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)


class _CompletionFields(_SharedFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


class _ChatFields(_SharedFields):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    response_format: _TextFormat | None = None


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A checked request."""

    kind: ApiKind
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Prompts of a completion, as text or ids."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Turns of a chat."""
    max_tokens: int | None = None
    """None: as many as fit."""
    sampling: SamplingParams
    num_samples: int = 1
    """Samples of each prompt."""
    stops: tuple[str, ...] = ()
    streams: bool = False
    includes_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    has_log_probs: bool = False
    num_alternatives: int = 0
    """Most likely tokens whose log-probabilities are reported at each position."""

    @property
    def num_prompts(self) -> int:
        """Prompts of a completion; the messages of a chat are one."""
        return 1 if self.kind == "chat" else len(self.prompts)


def parse_request(body: bytes, kind: ApiKind, model_name: str) -> ApiRequest:
    """Parse and check the body of a request.

    Args:
        body: JSON.
        kind: of the endpoint.
        model_name: name of the served model.

    Raises:
        ApiError: the body is not valid, or asks for something that is not implemented.
    """
    try:
        fields = (_CompletionFields if kind == "completion" else _ChatFields).model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from None
    if fields.model not in (None, model_name):
        raise ApiError(f"model {fields.model!r} does not exist; this server has {model_name!r}", 404, "model")
    stops = tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ())
    if len(stops) > MAX_STOP_STRINGS or not all(stops):
        raise ApiError(f"stop must have at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
    if fields.stream_options is not None and not fields.stream:
        raise ApiError("stream_options has no effect without stream=true", param="stream_options")
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise ApiError(f"temperature must be 0, or at least {MIN_TEMPERATURE:g}", param="temperature")
    shared: dict[str, Any] = {
        "kind": kind,
        "sampling": SamplingParams(
            temperature=temperature,
            # The likeliest token is the same with and without the other tokens.
            top_p=(fields.top_p or 1.0) if temperature else 1.0,
            top_k=(fields.top_k or 0) if temperature else 0,
            seed=secrets.randbits(62) if fields.seed is None else fields.seed,
        ),
        "num_samples": fields.n or 1,
        "stops": stops,
        "streams": bool(fields.stream),
        "includes_usage": fields.stream_options is not None and fields.stream_options.include_usage,
    }
    if isinstance(fields, _CompletionFields):
        return ApiRequest(
            **shared,
            prompts=_prompts(fields.prompt),
            max_tokens=fields.max_tokens or DEFAULT_COMPLETION_TOKENS,
            has_log_probs=fields.logprobs is not None,
            num_alternatives=fields.logprobs or 0,
        )
    if fields.top_logprobs is not None and not fields.logprobs:
        raise ApiError("top_logprobs has no effect without logprobs=true", param="top_logprobs")
    if None not in (fields.max_tokens, fields.max_completion_tokens):
        raise ApiError("max_tokens and max_completion_tokens mean the same; give one of them", param="max_tokens")
    return ApiRequest(
        **shared,
        messages=tuple(message.as_turn() for message in fields.messages),
        max_tokens=fields.max_tokens or fields.max_completion_tokens,
        has_log_probs=bool(fields.logprobs),
        num_alternatives=fields.top_logprobs or 0,
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise ApiError("prompt is empty; give a text, a list of texts, or token ids", param="prompt")
    prompts: list[str | tuple[int, ...]] = []
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
        else:
            prompts.append(part if isinstance(part, str) else tuple(part))
    return (tuple(ids),) if ids else tuple(prompts)


_NEUTRAL_VALUES = {"presence_penalty": "0", "frequency_penalty": "0", "echo": "false", "best_of": "1"}
"""The only values of fields without an implementation."""


def _api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # A union repeats the error for each of its members, whose names follow the field's.
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return ApiError(f"{'.'.join(map(str, first['loc']))} is not supported; leave it out", param=param)
    if param in _NEUTRAL_VALUES:
        return ApiError(f"{param} is only supported as {_NEUTRAL_VALUES[param]}; leave it out", param=param)
    return ApiError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}", param=param)


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """A token and its log-probability under the law that it was drawn from, before top-k and top-p."""

    text: str
    """Text of the token by itself."""
    log_prob: float
    alternatives: Sequence["TokenLogProb"] = ()
    """The most likely tokens at its position."""


class ResponseBuilder:
    """Builds the JSON objects of one response.

    Args:
        request: the request.
        model_name: name of the served model.
    """

    def __init__(self, request: ApiRequest, model_name: str) -> None:
        self._request = request
        self._model_name = model_name
        self._is_chat = request.kind == "chat"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        return self._envelope("chat.completion" if self._is_chat else "text_completion", choices) | {"usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return one object of a stream; the one with the usage has no choices."""
        envelope = self._envelope("chat.completion.chunk" if self._is_chat else "text_completion", choices)
        return envelope if usage is None else envelope | {"usage": usage}

    def first_delta(self, index: int) -> dict[str, Any]:
        """Return the choice that begins a stream of a chat."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(
        self, index: int, text: str, tokens: Sequence[TokenLogProb], finish_reason: str | None, *, is_delta: bool
    ) -> dict[str, Any]:
        """Return a choice with a text, or a piece of one."""
        rest = {"index": index, "logprobs": self._log_probs(tokens), "finish_reason": finish_reason}
        if not self._is_chat:
            return {"text": text} | rest
        if is_delta:
            return {"delta": {"content": text} if text else {}} | rest
        return {"message": {"role": "assistant", "content": text}} | rest

    def _log_probs(self, tokens: Sequence[TokenLogProb]) -> dict[str, Any] | None:
        if not self._request.has_log_probs:
            return None
        if self._is_chat:
            return {
                "content": [
                    _chat_log_prob(token) | {"top_logprobs": [_chat_log_prob(other) for other in token.alternatives]}
                    for token in tokens
                ]
            }
        found: dict[str, Any] = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
        }
        if self._request.num_alternatives:
            # Tokens without a text of their own have the same text: the most likely one counts.
            found["top_logprobs"] = [
                {other.text: other.log_prob for other in reversed(token.alternatives)} for token in tokens
            ]
        return found

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "choices": list(choices),
        }


def _chat_log_prob(token: TokenLogProb) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.log_prob, "bytes": list(token.text.encode())}


def usage_of(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a response."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }
