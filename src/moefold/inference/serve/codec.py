"""Prompts to token ids and new tokens to text, for the server. Torch-free."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from moefold.data.chat import ChatTemplate, end_of_turn_marker
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.errors import ConfigError
from moefold.inference.engine.requests import NewToken, Request
from moefold.inference.serve.job import ServeJob
from moefold.inference.serve.protocol import ApiError, ApiRequest, TokenLogProb
from moefold.inference.text import (
    StopStringFilter,
    TextStream,
    encode_prompts,
    open_chat_template,
    stop_token_ids,
)


class PromptEncoder:
    """Encodes the prompts of requests, and knows what ends a completion.

    Args:
        job: the server.
        tokenizer: of the model.
    """

    def __init__(self, job: ServeJob, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._end_ids = stop_token_ids(job.source, tokenizer)
        self._vocab_size = job.source.model.vocab_size
        # The process of the template answers one conversation at a time.
        self._template_lock = asyncio.Lock()

    @cached_property
    def _template(self) -> ChatTemplate:
        if isinstance(self._tokenizer, NumberTokenizer):
            raise ConfigError("the model was trained on bare ids and has no tokenizer, so it has no chat")
        return open_chat_template(self._job.source, self._job.options.tokenizer, self._job.options.chat_template)

    @cached_property
    def _end_of_turn(self) -> tuple[frozenset[int], str]:
        return end_of_turn_marker(self._template, self._tokenizer)

    async def encode(self, request: ApiRequest) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt of a request.

        Raises:
            ConfigError: there is no chat template, or it refuses the conversation.
            ApiError: an id is outside the vocabulary, or a prompt is empty.
        """
        if request.kind == "chat":
            async with self._template_lock:
                ids = await asyncio.to_thread(self._encode_chat, request)
            if not ids:
                raise ApiError("the chat template makes an empty text of these messages", param="messages")
            return [ids]
        # On a thread: a long text takes as long as many passes, during which other clients are answered.
        return await asyncio.to_thread(self._encode_prompts, request)

    def _encode_prompts(self, request: ApiRequest) -> list[tuple[int, ...]]:
        encoded = []
        for prompt in request.prompts:
            ids = encode_prompts(self._job.source, self._tokenizer, [prompt])[0] if isinstance(prompt, str) else prompt
            if not ids:
                raise ApiError("the prompt has no token", param="prompt")
            if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
                raise ApiError(f"token id {wrong[0]} is outside the vocabulary of {self._vocab_size}", param="prompt")
            encoded.append(ids)
        return encoded

    def _encode_chat(self, request: ApiRequest) -> tuple[int, ...]:
        text = self._template.render_prompt(request.messages, "messages", add_generation_prompt=True)
        # Read here, on the thread that may wait for the process of the template.
        assert self._end_of_turn is not None
        return tuple(self._tokenizer.encode(text).tolist())

    def eos_ids(self, request: ApiRequest) -> frozenset[int]:
        """Return the tokens that end a completion; for a chat, after `encode`."""
        return self._end_ids | self._end_of_turn[0] if request.kind == "chat" else self._end_ids

    def stop_strings(self, request: ApiRequest) -> tuple[str, ...]:
        """Return the texts that end a completion in addition to those of the request; after `encode`."""
        return (self._end_of_turn[1],) if request.kind == "chat" and self._end_of_turn[1] else ()


@dataclass(frozen=True)
class TextPiece:
    """Text that a new token adds to a sample."""

    text: str
    """Text that is now final."""
    tokens: Sequence[TokenLogProb]
    """The token, unless it has no text of its own."""
    finish_reason: str | None
    """None: the sample continues; "stop": by an end-of-text token or a stop string; "length"."""


class SampleText:
    """Text of one sample as its tokens come.

    Args:
        tokenizer: of the model.
        sample: the sample.
        stops: texts that end it, and are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, sample: Request, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sample.eos_ids
        self._stream = TextStream(tokenizer)
        self._filter = StopStringFilter(*stops)
        self.is_finished = False

    def push(self, new: NewToken) -> TextPiece:
        """Add a token of a sample that is not finished."""
        if new.token in self._eos_ids:
            self.is_finished = True
            return TextPiece(self._rest(), [], "stop")
        text = self._filter.push(self._stream.push(new.token))
        if not self._filter.is_stopped and new.finish_reason is not None:
            text += self._rest()
        finish_reason = "stop" if self._filter.is_stopped else new.finish_reason
        self.is_finished = finish_reason is not None
        alternatives = tuple(self._with_text(token, log_prob) for token, log_prob in new.alternatives)
        token = replace(self._with_text(new.token, new.log_prob), alternatives=alternatives)
        return TextPiece(text, [token], finish_reason)

    def _with_text(self, token: int, log_prob: float) -> TokenLogProb:
        return TokenLogProb(text=self._tokenizer.decode([token]), log_prob=log_prob)

    def _rest(self) -> str:
        """Return the text that was held back."""
        return self._filter.push(self._stream.finish()) + self._filter.finish()
