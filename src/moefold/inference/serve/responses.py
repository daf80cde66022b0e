"""Responses of the API. Torch-free."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moefold.inference.serve.protocol import ApiRequest


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """A token and its log-probability under the law that it was drawn from, before top-k, top-p and rules of logits."""

    piece: bytes
    """What the token writes."""
    log_prob: float | None
    """None for the first token of a prompt."""
    alternatives: Sequence["TokenLogProb"] = ()
    """The most likely tokens at its position."""
    is_shown: bool = True
    """Whether the text holds it; special tokens may be left out."""

    @property
    def text(self) -> str:
        """Text of the token; its bytes are written out where they are a part of a character, as by OpenAI."""
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
    """Tool calls, as the API writes them."""
    finish_reason: str | None = None


class ResponseBuilder:
    """Builds the JSON objects of one response."""

    def __init__(self, request: ApiRequest, model_name: str) -> None:
        self._request = request
        self._model_name = model_name
        self._is_chat = request.kind == "chat"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._text_ends: dict[int, int] = {}
        """Characters of the tokens of each choice so far."""
        self._num_calls: dict[int, int] = {}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        return self._envelope("chat.completion" if self._is_chat else "text_completion", choices) | {"usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return one object of a stream; the one with the usage has no choices, and the others have a null usage."""
        envelope = self._envelope("chat.completion.chunk" if self._is_chat else "text_completion", choices)
        return envelope | {"usage": usage} if self._request.includes_usage else envelope

    def first_delta(self, index: int) -> dict[str, Any]:
        """Return the choice that begins a stream of a chat."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, part: ChoiceText, *, is_delta: bool) -> dict[str, Any]:
        """Return a choice with a text, or a piece of one."""
        rest = {"index": index, "logprobs": self._log_probs(index, part), "finish_reason": part.finish_reason}
        if not self._is_chat:
            return {"text": part.text} | rest
        calls = list(part.calls)
        if is_delta:
            first = self._num_calls.get(index, 0)
            self._num_calls[index] = first + len(calls)
            delta: dict[str, Any] = {"reasoning_content": part.reasoning} if part.reasoning else {}
            if part.text:
                delta["content"] = part.text
            if calls:
                delta["tool_calls"] = [{"index": first + i} | dict(call) for i, call in enumerate(calls)]
            return {"delta": delta} | rest
        message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if calls:
            message |= {"content": part.text if part.text.strip() else None, "tool_calls": calls}
        return {"message": message} | rest

    def _log_probs(self, index: int, part: ChoiceText) -> dict[str, Any] | None:
        if not self._request.has_log_probs:
            return None
        if self._is_chat:
            return {
                "content": [
                    _chat_log_prob(token) | {"top_logprobs": [_chat_log_prob(other) for other in token.alternatives]}
                    for token in part.tokens
                ],
                "refusal": None,
            }
        offsets = []
        for token in part.tokens:
            offsets.append(self._text_ends.get(index, 0))
            self._text_ends[index] = offsets[-1] + (_num_characters(token.piece) if token.is_shown else 0)
        return {
            "tokens": [token.text for token in part.tokens],
            "token_logprobs": [token.log_prob for token in part.tokens],
            # The token itself is among them, likely or not. Of several with one text, the most likely counts.
            "top_logprobs": [
                None
                if token.log_prob is None
                else {other.text: other.log_prob for other in (*reversed(token.alternatives), token)}
                for token in part.tokens
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


def _num_characters(piece: bytes) -> int:
    """Return the characters that begin in a piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)


def _chat_log_prob(token: TokenLogProb) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.log_prob, "bytes": list(token.piece)}


def usage_of(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a response."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }
