"""Tokenised conversations of the files of a recipe, in the cache.

The cache holds one uint32 per token: the id, a bit for targets (assistant output), and two bits for the first token of
a conversation and its label.
"""

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moefold.cache_dir import entry_key
from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import ChatRequest, ChatTemplate, Message, load_chat_template
from moefold.data.conversations.conversation_format import parse_conversation, refuse_row_weight
from moefold.data.conversations.conversation_tokens import (
    RowReport,
    SkippedRows,
    TokenizedConversation,
    stored_notes,
    tokenize_conversations,
)
from moefold.data.shard_reader import ShardReader
from moefold.data.source_listing import conversation_files
from moefold.data.sources.file_formats import JsonlRecord, jsonl_records
from moefold.data.token_cache import cached_ids, npy_header
from moefold.data.token_file import read_npy_header
from moefold.data.tokenizer import OffsetTokenizer
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.progress import ReadProgress

logger = logging.getLogger(__name__)

FORMAT_VERSION = 5
RESPONSE_BIT = np.uint32(1 << 31)
FIRST_TOKEN_BIT = np.uint32(1 << 30)
LABEL_BIT = np.uint32(1 << 29)
"""Bit of the first token of a conversation. Its meaning depends on the kind of data."""
_ID_MASK = np.uint32((1 << 29) - 1)
_BATCH_ROWS = 256
_SCAN_CHUNK_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class ConversationToRender:
    """Conversation of the files, ready for rendering."""

    messages: Sequence[Message]
    tools: Any
    location: str
    """FILE:LINE, for messages."""
    size_bytes: int
    """Bytes of the conversation in the files, for the progress."""
    untrained: frozenset[int] = frozenset()
    """Indices of the assistant's messages that belong to the prompt, and have no targets."""
    has_label: bool = False
    """If True, set `LABEL_BIT`."""

    def request(self) -> ChatRequest:
        """Return the request to the template."""
        roles = enumerate(message["role"] for message in self.messages)
        targets = tuple(i for i, role in roles if role == "assistant" and i not in self.untrained)
        return ChatRequest(self.messages, self.tools, self.location, targets)


@dataclass(frozen=True, slots=True)
class ConversationReader:
    """Reader that converts the rows of the files to conversations."""

    identity: tuple[str, ...]
    """Part of the name of the cache entry, which differs for different conversations."""
    read: Callable[[Iterator[JsonlRecord]], Iterator[ConversationToRender]]
    read_alone: Callable[[JsonlRecord], Sequence[ConversationToRender]] | None = None
    """Returns the conversations that depend only on one row. None means `read` does that."""

    def of_row(self, record: JsonlRecord) -> Sequence[ConversationToRender]:
        """Return the conversations that depend only on one row."""
        return list(self.read(iter([record]))) if self.read_alone is None else self.read_alone(record)


@dataclass(frozen=True, slots=True)
class TokenizedConversations:
    """All conversations of the files, tokenised. Only their offsets are in memory, the ids stay on disk."""

    flagged: ShardReader
    """Ids with `RESPONSE_BIT` and `FIRST_TOKEN_BIT` of all conversations, uint32 [tokens]."""
    starts: NDArray[np.int64]
    """Offset of each conversation's first token, and of the end, [conversations + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, number: int, max_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the first `max_tokens` ids of a conversation, and the mask of its targets."""
        start = int(self.starts[number])
        flagged = self.flagged[start : min(start + max_tokens, int(self.starts[number + 1]))]
        return (flagged & _ID_MASK).astype(np.int64), _is_target(flagged)

    def has_label(self, number: int) -> bool:
        """Return whether the label bit of a conversation is set."""
        start = int(self.starts[number])
        return bool(self.flagged[start : start + 1][0] & LABEL_BIT)

    def count_targets(self, max_tokens: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of targets among the first `max_tokens` tokens of each conversation, [conversations]."""
        limits = np.broadcast_to(max_tokens, len(self))
        counts = np.zeros(len(self), dtype=np.int64)
        first = 0
        while first < len(self):
            # As many whole conversations as fit into a chunk of bounded size, but at least one.
            end = int(np.searchsorted(self.starts, self.starts[first] + _SCAN_CHUNK_TOKENS, side="right")) - 1
            end = min(max(end, first + 1), len(self))
            starts = self.starts[first : end + 1]
            targets = _is_target(self.flagged[starts[0] : starts[-1]])
            places = np.arange(starts[0], starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
            targets &= places < np.repeat(limits[first:end], np.diff(starts))
            counts[first:end] = np.add.reduceat(targets, starts[:-1] - starts[0], dtype=np.int64)
            first = end
        return counts


def open_conversations(
    data: DataConfig,
    tokenizer: OffsetTokenizer,
    skipped: Set[Path] = frozenset(),
    *,
    reader: ConversationReader | None = None,
    shows_progress: bool,
) -> TokenizedConversations:
    """Open the conversations that data.path names, except skipped files. The first call tokenises them.

    Args:
        reader: conversion of rows to conversations, or None if each row is a conversation.

    Raises:
        ConfigError: a file is missing, a line is not a conversation (the message has file and line), the tokenizer has
            no chat template, or there is no conversation.
    """
    files = tuple(file for file in conversation_files(data) if file not in skipped)
    template = load_chat_template(data, tokenizer)
    sizes = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    reader = reader or ConversationReader(("sft",), read_conversations)
    skips = ["skip_bad_rows"] if data.skip_bad_rows else []
    identity = [*reader.identity, FORMAT_VERSION, sizes, tokenizer.identity, template.identity, *skips]
    key = entry_key(identity)
    report = RowReport(template.location, skips=data.skip_bad_rows)
    job = Tokenization(tokenizer, template, report)

    def write(file: BinaryIO) -> None:
        records: Iterator[JsonlRecord] = (
            record for path in files for record in jsonl_records(path, report.skipped.refuse)
        )
        if skips and reader.read_alone is not None:
            records = usable_records(files, reader, job)
        elif skips:
            records = (record for record, _ in _readable(records, reader, report.skipped))
        total_bytes = sum(path.stat().st_size for path in files)
        with ReadProgress("Tokenising conversations", total_bytes, is_shown=shows_progress) as progress:
            num_tokens = _write_conversations(file, reader.read(records), job, progress)
        if not num_tokens:
            raise ConfigError(
                f"{Setting('data.path', files[0]):s} is empty: there is no conversation; name files with some"
            )

    cached = cached_ids(key, write)
    is_new = bool(report.notes())
    for note in stored_notes(cached, report):
        # Logged once per run: one process shows progress, and one makes the file.
        if shows_progress or is_new:
            logger.warning("%s", note)
    flagged = read_npy_header(cached).open()
    starts = [
        first + np.flatnonzero(flagged[first : first + _SCAN_CHUNK_TOKENS] & FIRST_TOKEN_BIT)
        for first in range(0, len(flagged), _SCAN_CHUNK_TOKENS)
    ]
    return TokenizedConversations(flagged, np.concatenate([*starts, [len(flagged)]]).astype(np.int64))


def read_conversations(records: Iterator[JsonlRecord], reward_column: str = "") -> Iterator[ConversationToRender]:
    """Yield each record as one conversation, or raise ConfigError if one has a weight that is not its reward."""
    for record in records:
        refuse_row_weight(record.fields, record.location, reward_column)
        parsed = parse_conversation(record)
        yield ConversationToRender(parsed.messages, parsed.tools, record.location, record.size_bytes, parsed.untrained)


def _readable(
    records: Iterator[JsonlRecord], reader: ConversationReader, skipped: SkippedRows
) -> Iterator[tuple[JsonlRecord, Sequence[ConversationToRender]]]:
    """Yield the records that can be read without the other rows, with their conversations."""
    for record in records:
        try:
            conversations = reader.of_row(record)
        except ConfigError as error:
            skipped.refuse(error)
        else:
            yield record, conversations


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Tokenizer, chat template and report of a tokenisation."""

    tokenizer: OffsetTokenizer
    template: ChatTemplate
    report: RowReport

    def tokenize(self, conversations: Sequence[ConversationToRender]) -> Iterator[TokenizedConversation | None]:
        """Tokenise conversations, grouped by their rows, as `tokenize_conversations` does."""
        requests = [conversation.request() for conversation in conversations]
        return tokenize_conversations(requests, self.tokenizer, self.template, self.report)


def usable_records(files: Sequence[Path], reader: ConversationReader, job: Tokenization) -> Iterator[JsonlRecord]:
    """Yield the records of files that can be read, rendered and tokenised without the other rows.

    This requires tokenising the file, so that readers that compare rows know the usable rows in advance. Unusable
    rows raise ConfigError, unless the report skips them.
    """
    skipped = job.report.skipped
    records = (record for path in files for record in jsonl_records(path, skipped.refuse))
    readable = _readable(records, reader, skipped)
    while batch := list(islice(readable, _BATCH_ROWS)):
        tokenized = job.tokenize([conversation for _, conversations in batch for conversation in conversations])
        for record, conversations in batch:
            is_used = [next(tokenized) is not None for _ in conversations]
            if all(is_used):
                yield record


def _write_conversations(
    file: BinaryIO, conversations: Iterator[ConversationToRender], job: Tokenization, progress: ReadProgress
) -> int:
    """Write the flagged ids of all conversations as an .npy file, and return their number."""
    dtype = np.dtype("<u4")
    file.write(npy_header(dtype, 0))
    num_tokens = 0
    # The conversations of one row stay together, because a row is skipped as a whole.
    rows = (list(group) for _, group in groupby(conversations, key=lambda conversation: conversation.location))
    while batch := list(islice(rows, _BATCH_ROWS)):
        flat = [conversation for row in batch for conversation in row]
        for conversation, encoded in zip(flat, job.tokenize(flat), strict=True):
            if encoded is not None:
                flagged = _flag(encoded, has_label=conversation.has_label)
                file.write(flagged.astype(dtype).tobytes())
                num_tokens += len(flagged)
        progress.advance(sum(conversation.size_bytes for conversation in flat))
    file.seek(0)
    file.write(npy_header(dtype, num_tokens))
    return num_tokens


def _flag(tokenized: TokenizedConversation, *, has_label: bool) -> NDArray[np.uint32]:
    flagged = tokenized.ids.astype(np.uint32)
    flagged[tokenized.is_target] |= RESPONSE_BIT
    flagged[0] |= FIRST_TOKEN_BIT
    if has_label:
        flagged[0] |= LABEL_BIT
    return flagged


def _is_target(flagged: NDArray[np.integer]) -> NDArray[np.bool_]:
    # The first token of a conversation has no context for a prediction.
    is_target: NDArray[np.bool_] = (flagged & (RESPONSE_BIT | FIRST_TOKEN_BIT)) == RESPONSE_BIT
    return is_target
