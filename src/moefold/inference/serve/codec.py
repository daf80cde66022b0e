"""Prompts to token ids and new tokens to text, for the server."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from moefold.data.conversations.chat import ChatRequest, ChatTemplate, end_of_turn_marker
from moefold.data.hf_tokenizer.tokenizer_process import TokenTable
from moefold.data.tokenizer import NumberTokenizer, Tokenizer, refuse_nul
from moefold.errors import ConfigError
from moefold.inference.engine.requests import LogitRules, NewToken
from moefold.inference.serve.grammar import GrammarError, JsonGrammars
from moefold.inference.serve.job import ServeJob
from moefold.inference.serve.openai_requests import ApiRequest, ChoiceText, TokenLogProb
from moefold.inference.serve.reasoning import BEGIN, MARKS, ReasoningReader
from moefold.inference.serve.request_fields import ApiError
from moefold.inference.serve.tool_calls import (
    CallReader,
    ToolFormat,
    as_json,
    call_id,
    check_takes_tools,
    find_format,
    forced_schema,
)
from moefold.inference.text import encode_prompts, open_chat_template, stop_token_ids
from moefold.inference.text_stream import StopStringFilter, TextStream

_RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True, kw_only=True)
class EncodedRequest:
    """Request in tokens."""

    request: ApiRequest
    prompts: Sequence[tuple[int, ...]]
    eos_ids: frozenset[int]
    """Tokens that end a sample."""
    stops: tuple[str, ...]
    """Texts that end a sample."""
    rules: LogitRules | None
    """Changes of the logits."""
    tool_format: ToolFormat | None = None
    """Format of calls in the text, or None if there are no calls, or they are forced."""
    prompt_reasons: bool | None = None
    """True if the prompt ends inside reasoning, or None if reasoning is not separated from the answer."""
    skipped_ids: frozenset[int] = field(repr=False)
    """Special tokens that are omitted from the text."""


class PromptEncoder:
    """Encoder of the prompts of requests, with the conditions that end a completion."""

    def __init__(self, job: ServeJob, tokenizer: Tokenizer, grammars: JsonGrammars) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._end_ids = stop_token_ids(job.source, tokenizer)
        self._vocab_size = job.source.model.vocab_size
        # The process of the template answers one conversation at a time.
        self._template_lock = asyncio.Lock()

    @cached_property
    def table(self) -> TokenTable:
        """Return the table of the text of each id. The first request reads it, on its thread."""
        return self._tokenizer.token_table()

    @cached_property
    def _template(self) -> ChatTemplate:
        if isinstance(self._tokenizer, NumberTokenizer):
            raise ConfigError("the model was trained on bare ids and has no tokenizer, so it has no chat")
        return open_chat_template(self._job.source, self._job.options.tokenizer, self._job.options.chat_template)

    @cached_property
    def _end_of_turn(self) -> tuple[frozenset[int], str]:
        return end_of_turn_marker(self._template, self._tokenizer)

    async def encode(self, request: ApiRequest) -> EncodedRequest:
        """Return a request in tokens.

        Raises:
            ConfigError: there is no chat template, or it refuses the conversation.
            ApiError: an id is outside the vocabulary, a prompt is empty, or the model cannot answer in this form.
        """
        # On a thread, because a long text takes as long as many passes for other clients.
        if request.kind == "chat":
            async with self._template_lock:
                return await asyncio.to_thread(self._encode_chat, request)
        return await asyncio.to_thread(self._encode_completion, request)

    def _encode_completion(self, request: ApiRequest) -> EncodedRequest:
        encoded = []
        for prompt in request.prompts:
            ids = encode_prompts(self._job.source, self._tokenizer, [prompt])[0] if isinstance(prompt, str) else prompt
            if not ids:
                raise ApiError("the prompt has no token", param="prompt")
            self._check_ids(ids, "prompt")
            encoded.append(ids)
        return self._with_ends(request, encoded, self._end_ids, request.stops)

    def _encode_chat(self, request: ApiRequest) -> EncodedRequest:
        template = self._template
        tool_use = request.tool_use
        tools = None if tool_use is None else tool_use.tools
        source = template.source_for(tools)
        template.check_roles(ChatRequest(request.messages, tools, "messages"))
        refuse_nul(self._tokenizer, [*request.messages, tools], "the conversation")
        tool_format = None
        if tool_use is not None and tool_use.forced:
            check_takes_tools(source, template.location)
        elif tool_use is not None:
            tool_format = find_format(source, template.location)
        text = template.render_prompt(
            request.messages,
            "messages",
            add_generation_prompt=not request.continues_last,
            tools=tools,
            variables=_known_variables(request.template_variables, source, template.location),
        )
        ids = tuple(self._tokenizer.encode(text).tolist())
        if not ids:
            raise ApiError("the chat template makes an empty text of these messages", param="messages")
        # A grammar begins with the first token.
        reasons = self._job.options.reasoning and not request.schema and (tool_use is None or not tool_use.forced)
        turn_ids, turn_end = self._end_of_turn
        ends = (turn_end,) if turn_end and not request.ignores_end else ()
        encoded = self._with_ends(request, [ids], self._end_ids | turn_ids, (*request.stops, *ends))
        return replace(
            encoded,
            tool_format=tool_format,
            prompt_reasons=text.rstrip().endswith(BEGIN) if reasons else None,
            skipped_ids=self._skipped_ids(request, tool_format, MARKS if reasons else frozenset()),
        )

    def _with_ends(
        self, request: ApiRequest, prompts: Sequence[tuple[int, ...]], end_ids: frozenset[int], stops: tuple[str, ...]
    ) -> EncodedRequest:
        self._check_ids(request.stop_ids, "stop_token_ids")
        self._check_ids([token for token, _ in request.rules.bias], "logit_bias")
        eos_ids = request.stop_ids if request.ignores_end else end_ids | request.stop_ids
        return EncodedRequest(
            request=request,
            prompts=prompts,
            eos_ids=eos_ids,
            stops=stops,
            rules=self._rules(request, eos_ids),
            skipped_ids=self._skipped_ids(request, None, frozenset()),
        )

    def _skipped_ids(
        self, request: ApiRequest, tool_format: ToolFormat | None, marks: frozenset[str]
    ) -> frozenset[int]:
        if not request.skips_special or not self.table.special_ids:
            return frozenset()
        if tool_format is not None:
            marks |= {*tool_format.begins, *tool_format.marks}
        pieces = self.table.pieces
        return frozenset(token for token in self.table.special_ids if pieces[token].decode() not in marks)

    def _rules(self, request: ApiRequest, eos_ids: frozenset[int]) -> LogitRules | None:
        tool_use = request.tool_use
        schema = json.dumps(forced_schema(tool_use)) if tool_use is not None and tool_use.forced else request.schema
        if schema:
            param = "tool_choice" if tool_use is not None else "response_format"
            try:
                self._grammars.check(schema, eos_ids)
            except GrammarError as error:
                raise ApiError(f"{param}: {error}", param=param) from None
        rules = replace(request.rules, grammar=schema)
        return None if rules == LogitRules() else rules

    def _check_ids(self, ids: Sequence[int] | frozenset[int], param: str) -> None:
        if unknown_ids := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise ApiError(f"{param}: id {unknown_ids[0]} is outside the vocabulary of {self._vocab_size}", param=param)


def _known_variables(variables: Mapping[str, Any], source: str, location: str) -> Mapping[str, Any]:
    """Return the variables of a request if its template reads them. False and null are equal to absent variables."""
    for name, value in variables.items():
        param = "reasoning_effort" if name == "reasoning_effort" else "chat_template_kwargs"
        if name in _RESERVED_VARIABLES:
            raise ApiError(f"chat_template_kwargs.{name} is a field of the request itself; set that", param=param)
        if value not in (None, False) and not re.search(rf"\b{re.escape(name)}\b", source):
            raise ApiError(
                f"{param}: the chat template of {location} does not read {name!r}; leave it out", param=param
            )
    return variables


class SampleText:
    """Text and calls of one sample as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, encoded: EncodedRequest) -> None:
        self._encoded = encoded
        self._tokenizer = tokenizer
        self._table = table
        self._request = encoded.request
        self._stream = TextStream(tokenizer)
        self._filter = StopStringFilter(*encoded.stops)
        tool_use = self._request.tool_use
        self._calls = None if tool_use is None else CallReader(tool_use, encoded.tool_format)
        reasons = encoded.prompt_reasons
        self._reasoning = None if reasons is None else ReasoningReader(is_open=reasons)
        self.num_tokens = 0
        """New tokens, including the end-of-text token."""
        self.is_finished = False
        self._log_prob_sum = 0.0

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of the new tokens."""
        return self._log_prob_sum / max(1, self.num_tokens)

    def push(self, new: NewToken) -> ChoiceText:
        """Add a token of an unfinished sample."""
        self.num_tokens += 1
        self._log_prob_sum += new.log_prob
        is_end = new.token in self._encoded.eos_ids
        text = ""
        if not is_end and new.token not in self._encoded.skipped_ids:
            text = self._filter.push(self._stream.push(new.token))
        reason: str | None = None
        if self._filter.is_stopped or is_end:
            reason = "stop"
        elif new.finish_reason is not None:
            reason = "length"
        if reason is not None and not self._filter.is_stopped:
            text += self._filter.push(self._stream.finish()) + self._filter.finish()
            reason = "stop" if self._filter.is_stopped else reason
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text, is_end=reason is not None)
        text, calls, reason = self._split(text, reason)
        self.is_finished = reason is not None
        # A chat has log-probabilities of its content. A completion has log-probabilities of all tokens.
        is_left_out = is_end and self._request.kind == "chat"
        tokens = [] if is_left_out else [self._with_alternatives(new.token, new.log_prob, new.alternatives)]
        return ChoiceText(
            text=text,
            reasoning=reasoning,
            tokens=tokens if self._request.has_log_probs else [],
            calls=calls,
            finish_reason=reason,
        )

    def echo(self, prompt: Sequence[int], new: NewToken) -> ChoiceText:
        """Return the prompt of a completion, with the log-probabilities reported with its first token."""
        visible = [token for token in prompt if token not in self._encoded.skipped_ids]
        tokens = []
        if self._request.has_log_probs:
            tokens = [self._with_alternatives(prompt[0], None, ())]
            for token, score in zip(prompt[1:], new.prompt_scores, strict=True):
                tokens.append(self._with_alternatives(token, score.log_prob, score.alternatives))
        return ChoiceText(text=self._tokenizer.decode(visible), tokens=tokens)

    def _split(self, text: str, reason: str | None) -> tuple[str, list[Mapping[str, Any]], str | None]:
        """Return the text without calls, the calls, and the reason for the end."""
        if self._calls is None:
            return text, [], reason
        content, calls = self._calls.push(text)
        if reason is not None:
            extra, last = self._calls.finish()
            content += extra
            calls += last
        if self._calls.num_calls and (reason == "stop" or self._calls.is_done):
            reason = "tool_calls"
        return content, [as_json(call, call_id(self._encoded.tool_format)) for call in calls], reason

    def _with_alternatives(
        self, token: int, log_prob: float | None, alternatives: Sequence[tuple[int, float]]
    ) -> TokenLogProb:
        candidates = tuple(
            TokenLogProb(piece=self._piece(candidate), log_prob=value) for candidate, value in alternatives
        )
        is_shown = token not in self._encoded.skipped_ids
        return TokenLogProb(piece=self._piece(token), log_prob=log_prob, alternatives=candidates, is_shown=is_shown)

    def _piece(self, token: int) -> bytes:
        return self._table.pieces[token] if token < len(self._table.pieces) else b""
