"""Rendering, tokenisation and targets of a conversation, in one function.

If a template marks the assistant's output, the targets are the tokens of transformers' `return_assistant_tokens_mask`:
every token that overlaps the output. Without marks, the targets are the tokens after the longest common prefix of the
conversation and the prompt that inference continues.
"""

import json
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import MAX_CONFIG_BYTES, read_json
from moefold.data.conversations.chat import ChatRequest, ChatTemplate, RenderedChat
from moefold.data.sources.file_formats import refuse_surrogates
from moefold.data.tokenizer import OffsetTokenizer, refuse_nul
from moefold.errors import ConfigError
from moefold.message_text import Setting

TOOLS = "tools"
REASONING = "reasoning of answers (reasoning_content)"


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """The ids of a conversation, and its targets."""

    ids: NDArray[np.int64]
    """[tokens], at least one."""
    is_target: NDArray[np.bool_]
    """[tokens]."""


class RowReport:
    """Notes on the rows of conversations, with the first row of each kind. Unusable rows raise unless it `skips`."""

    def __init__(self, template: str, *, skips: bool = False) -> None:
        self._template = template
        self.skipped = SkippedRows(skips=skips)
        self.mismatched: dict[str, None] = {}
        """Rows whose prompt has different tokens in inference than in training."""
        self.altered: dict[str, None] = {}
        """Turns that the template writes incompletely because others follow."""
        self.unwritten: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """Rows by the part, such as the tools, that the template does not write."""

    def notes(self) -> list[str]:
        """Return the notes, one line for each kind."""
        notes = [note] if (note := self.skipped.note()) else []
        if self.mismatched:
            notes.append(
                f"the chat template of {self._template}: in {len(self.mismatched)} rows, the prompt at inference has "
                f"other tokens than the conversation in training (first: {next(iter(self.mismatched))}): a token spans "
                "the end of the prompt, or the prompt does not begin a turn as the conversation does. All tokens of "
                "the answer are trained. To make them equal, end the generation prompt with a special token, where a "
                f"finished turn begins ({Setting('data.chat_template')})"
            )
        if self.altered:
            notes.append(
                f"the chat template of {self._template}: in {len(self.altered)} turns, it leaves out a part of the "
                f"answer, such as its reasoning, since other turns follow (first: {next(iter(self.altered))}); this "
                "part is not trained. To train it, give such a turn as the last of a row"
            )
        for field, rows in self.unwritten.items():
            notes.append(
                f"the chat template of {self._template}: in {len(rows)} rows, it does not write the {field} (first: "
                f"{next(iter(rows))}), so that the model does not see them. Set a template that does "
                f"({Setting('data.chat_template')}), or remove them from the rows"
            )
        return notes


def stored_notes(cached: Path, report: RowReport) -> list[str]:
    """Return the notes on a cached file of conversations, which are stored next to it when it is made.

    The report is empty if another process made the file.
    """
    file = cached.with_suffix(".notes.json")
    if notes := report.notes():
        unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
        unfinished.write_text(json.dumps(notes), encoding="utf-8")
        os.replace(unfinished, file)
        return notes
    try:
        stored = read_json(file, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        # A missing file of notes is not an error: the tokens do not depend on it.
        return []
    return [str(note) for note in stored] if isinstance(stored, list) else []


def tokenize_conversations(
    conversations: Sequence[ChatRequest], tokenizer: OffsetTokenizer, template: ChatTemplate, report: RowReport
) -> Iterator[TokenizedConversation | None]:
    """Render and tokenise conversations, and find their targets. A row's conversations are consecutive.

    Yields:
        The tokens of each conversation, or None for a conversation of a skipped row.

    Raises:
        ConfigError: a conversation cannot be used, unless the report skips such rows.
    """
    chats: list[RenderedChat | None] = []
    refused: set[str] = set()
    for req, rendered in zip(conversations, template.render_all(conversations), strict=True):
        try:
            chats.append(_checked(rendered, req, tokenizer, template))
        except ConfigError as error:
            chats.append(None)
            if req.location not in refused:
                report.skipped.refuse(error)
            refused.add(req.location)
    usable = [None if req.location in refused else chat for req, chat in zip(conversations, chats, strict=True)]
    valid = [chat for chat in usable if chat is not None]
    encoded = tokenizer.encode_with_offsets([chat.text for chat in valid])
    prompts_of = iter(_encode_prompts(valid, encoded, tokenizer))
    tokens_of = iter(encoded)
    for req, chat in zip(conversations, usable, strict=True):
        if chat is None:
            yield None
            continue
        ids, places = next(tokens_of)
        prompts = next(prompts_of)
        if chat.altered_turn:
            report.altered[f"{req.location}, turn {chat.altered_turn}"] = None
        for field in _unwritten(req, chat, template.source_for(req.tools)):
            report.unwritten[field][req.location] = None
        if any(_common_length(ids, prompt) < len(prompt) for prompt in prompts):
            report.mismatched[req.location] = None
        yield TokenizedConversation(ids, _targets(chat, ids, places, prompts))


def _encode_prompts(
    chats: Sequence[RenderedChat],
    encoded: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    tokenizer: OffsetTokenizer,
) -> list[list[NDArray[np.int64]]]:
    """Return the ids of the prompts of each conversation.

    Added tokens divide a text first, so that tokens before an added token do not depend on the text after it. For a
    prompt that is a prefix of the conversation, only the part from its last added token on is tokenised.
    """
    starts: list[NDArray[np.int64]] = []
    texts: list[str] = []
    for chat, (ids, places) in zip(chats, encoded, strict=True):
        added_at = np.flatnonzero(np.isin(ids, tokenizer.added_ids))
        for prompt in chat.prompts:
            before = added_at[places[added_at, 1] <= len(prompt)] if chat.text.startswith(prompt) else added_at[:0]
            first = int(before[-1]) if len(before) else 0
            starts.append(ids[:first])
            texts.append(prompt[int(places[first, 0]) if first else 0 :])
    pairs = zip(starts, (ids for ids, _ in tokenizer.encode_with_offsets(texts)), strict=True)
    joined = iter([np.concatenate([start, tail]) for start, tail in pairs])
    return [[next(joined) for _ in chat.prompts] for chat in chats]


def _checked(
    chat: RenderedChat | ConfigError, req: ChatRequest, tokenizer: OffsetTokenizer, template: ChatTemplate
) -> RenderedChat:
    """Return a rendered conversation. Raises ConfigError if it was not rendered, or its text cannot be tokenised."""
    template.check_roles(req)
    if isinstance(chat, ConfigError):
        raise chat
    for field, word in (("tool_calls", "tool_call"), ("function_call", "function_call")):
        calls = [number for number, message in enumerate(req.messages, 1) if message.get(field)]
        if calls and word not in template.source_for(req.tools):
            raise ConfigError(
                f"{req.location}: message {calls[0]} has {field}, which the chat template of {template.location} does "
                f"not write; set a template that does ({Setting('data.chat_template')}), or remove the row"
            )
    # The text may also contain other fields than the content, such as names and tool calls.
    refuse_surrogates(chat.text, f"{req.location}: the rendered conversation")
    if not chat.text:
        raise ConfigError(f"{req.location}: the chat template renders the conversation as no text; remove it")
    refuse_nul(tokenizer, [*req.messages, req.tools], f"{req.location}: the conversation")
    return chat


def _unwritten(req: ChatRequest, chat: RenderedChat, source: str) -> list[str]:
    """Return the parts of a conversation that are not in its text: tools, and reasoning of answers to train on."""
    missing = []
    if not is_each_tool_written(req.tools or (), chat.text, source):
        missing.append(TOOLS)
    answers = [i for i, message in enumerate(req.messages) if message["role"] == "assistant"]
    targets = answers if req.targets is None else list(req.targets)
    # A turn that changes because others follow has its own note.
    checked = targets[-1:] if chat.altered_turn else targets
    reasoning = [req.messages[i].get("reasoning_content") for i in checked]
    if not all(_is_written(text, chat.text) for text in reasoning if isinstance(text, str)):
        missing.append(REASONING)
    return missing


def is_each_tool_written(tools: Sequence[object], text: str, source: str) -> bool:
    """Return whether a template of this source has written the name of each tool into a text."""
    return not tools or ("tools" in source and all(_is_written(_tool_name(tool), text) for tool in tools))


def _tool_name(tool: object) -> str:
    """Return the name of a described tool, or "" if the description has an unknown form."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    name = inner.get("name") if isinstance(inner, Mapping) else inner
    return name if isinstance(name, str) else ""


def _is_written(field: str, text: str) -> bool:
    """Return whether each line of a part is in a text, verbatim or escaped as in JSON."""
    lines = [line.strip() for line in field.splitlines()]
    return all(line in text or json.dumps(line)[1:-1] in text for line in lines)


def _targets(
    chat: RenderedChat, ids: NDArray[np.int64], places: NDArray[np.int64], prompts: Sequence[NDArray[np.int64]]
) -> NDArray[np.bool_]:
    is_target = np.zeros(len(ids), dtype=np.bool_)
    for number, response in enumerate(chat.responses):
        overlaps = (places[:, 1] > response.start) & (places[:, 0] < response.stop)
        if not chat.is_marked and chat.text.startswith(chat.prompts[number]):
            # The prompt has other tokens: the first token of the answer may begin in the prompt.
            first = _common_length(ids, prompts[number])
            overlaps[first:] |= places[first:, 0] < response.stop
        is_target |= overlaps
    return is_target


def _common_length(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(np.argmax(differs)) if differs.any() else size


class SkippedRows:
    """Count of skipped rows. Without `skips`, an unusable row raises its error."""

    def __init__(self, *, skips: bool) -> None:
        self.skips = skips
        self.count = 0
        self.first = ""
        """Error of the first skipped row, or "" if there is none."""

    def refuse(self, error: ConfigError) -> None:
        """Count an unusable row, or raise its error."""
        if not self.skips:
            raise error
        self.first = self.first or str(error)
        self.count += 1

    def note(self) -> str:
        """Return a message with the number and the first error, or "" if there is none."""
        rows = "row" if self.count == 1 else "rows"
        return (
            f"{Setting('data.skip_bad_rows')}: {self.count:,} {rows} skipped; the first: {self.first}"
            if self.count
            else ""
        )
