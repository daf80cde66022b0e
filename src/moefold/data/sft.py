"""Supervised fine-tuning data: tokenised conversations, packed into samples by best fit.

The cache holds one uint32 per token: the id, a bit for targets (assistant output), and two bits for the first token of
a conversation and its label. Packing depends on the sequence length. Every process computes the same packing from the
lengths.
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
from moefold.config.data import DataConfig
from moefold.data.conversations.chat import ChatRequest, ChatTemplate, Message, load_chat_template
from moefold.data.conversations.conversation_format import parse_conversation
from moefold.data.conversations.conversation_tokens import (
    RowReport,
    SkippedRows,
    TokenizedConversation,
    stored_notes,
    tokenize_conversations,
)
from moefold.data.input_paths import check_no_duplicates, data_paths, files_below, is_jsonl
from moefold.data.sample import Sample, SampleSource, fill_up, packed_sample
from moefold.data.shard_reader import ShardReader
from moefold.data.sources.file_formats import JsonlRecord, jsonl_records
from moefold.data.token_cache import cached_ids, npy_header
from moefold.data.token_file import read_npy_header
from moefold.data.tokenizer import OffsetTokenizer
from moefold.errors import ConfigError
from moefold.integer_hash import hash_ints
from moefold.message_text import Setting
from moefold.progress import ReadProgress

FORMAT_VERSION = 5
RESPONSE_BIT = np.uint32(1 << 31)
FIRST_TOKEN_BIT = np.uint32(1 << 30)
LABEL_BIT = np.uint32(1 << 29)
"""Bit of the first token of a conversation. Its meaning depends on the kind of data."""
_ID_MASK = np.uint32((1 << 29) - 1)
_BATCH_ROWS = 256
_SCAN_CHUNK_TOKENS = 2**24

logger = logging.getLogger(__name__)


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
    """Returns the conversations that depend only on one row; None: `read` does."""

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


@dataclass(frozen=True, slots=True)
class ScaledMembers:
    """Conversations to train on, and the factors of their losses."""

    members: NDArray[np.int64]
    """Numbers of the conversations, ascending."""
    scales: NDArray[np.float64] | None = None
    """Factor of the loss of each conversation of the files, [conversations]; None: 1."""
    message: str = ""
    """Message for the log."""


class PackedMembers(SampleSource):
    """Samples of padding and whole members, which are conversations or pairs; no member spans two samples.

    A sample has S + 1 tokens and shares no token with another sample.
    """

    has_annotations = True
    noun = "conversations"
    """Name of the members in messages."""

    def __init__(
        self,
        conversations: TokenizedConversations,
        members: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        seq_len: int,
        pad_id: int,
    ) -> None:
        """Pack members, by their numbers, of lengths of at most seq_len + 1 tokens."""
        self.seq_len = seq_len
        self._conversations = conversations
        self._pad_id = pad_id
        self.num_tokens = int(lengths.sum())
        """Tokens of the members, without padding."""
        packing = pack_best_fit(lengths.tolist(), seq_len + 1)
        self._bins = [members[packed] for packed in packing]
        # The last token of a full sample of seq_len + 1 tokens is not an input.
        num_filled = sum(min(int(lengths[packed].sum()), seq_len) for packed in packing)
        self.fill_fraction = num_filled / (len(packing) * seq_len) if packing else 1.0

    def __len__(self) -> int:
        return len(self._bins)

    def origin(self, number: int) -> str:
        """Return the members of a sample, by their numbers in the order of the files."""
        return f"{self.noun} {', '.join(str(int(member)) for member in self._bins[number])}"


class PackedConversations(PackedMembers):
    """Samples of whole conversations, which are truncated to S + 1 tokens, each with a target among them.

    Args:
        members: numbers of the conversations to pack.
        scales: factor of the loss of each conversation, [conversations]; None: 1.
    """

    def __init__(
        self,
        conversations: TokenizedConversations,
        members: NDArray[np.int64],
        *,
        seq_len: int,
        pad_id: int,
        scales: NDArray[np.float64] | None = None,
    ) -> None:
        lengths = np.minimum(np.diff(conversations.starts)[members], seq_len + 1)
        super().__init__(conversations, members, lengths, seq_len=seq_len, pad_id=pad_id)
        self._scales = scales

    def annotated_sample(self, number: int) -> Sample:
        """Return one sample. Its weights are 1 for targets that the assistant wrote, else 0."""
        size = self.seq_len + 1
        conversations = [self._conversations.read(int(member), size) for member in self._bins[number]]
        scale = None
        if self._scales is not None:
            lengths = [len(ids) for ids, _ in conversations]
            scale = fill_up([np.repeat(self._scales[self._bins[number]], lengths)], size, 1)[1:]
        return packed_sample(
            [ids for ids, _ in conversations],
            size,
            self._pad_id,
            weights=fill_up([targets for _, targets in conversations], size, False)[1:],
            weight_scale=scale,
        )


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
        reader: conversion of rows to conversations; None if each row is a conversation.

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


def pack_conversations(
    data: DataConfig,
    conversations: TokenizedConversations,
    *,
    seq_len: int,
    pad_id: int,
    reports: bool,
    select: Callable[[NDArray[np.int64]], ScaledMembers] | None = None,
) -> tuple[PackedConversations, PackedConversations]:
    """Split conversations into training and validation, and pack both parts.

    The split depends only on the number of conversations and the fraction. Conversations without a target among their
    first seq_len + 1 tokens are skipped.

    Args:
        select: chooses from the conversations with a target, and scales their losses; None: all, unscaled.

    Raises:
        ConfigError: there is no response, a conversation is too long and data.overlong is "refuse", or no training data
            is left.
    """
    lengths = np.diff(conversations.starts)
    is_long = lengths > seq_len + 1
    if data.overlong == "refuse" and is_long.any():
        number = int(np.argmax(is_long))
        raise ConfigError(
            f"{conversation_location(data, number)}: the conversation has {lengths[number]} tokens, and "
            f"{int(is_long.sum())} of {len(lengths)} have more than the {seq_len + 1} of train.seq_len={seq_len}; "
            f'raise it to {int(lengths.max()) - 1}, or set data.overlong="cut"'
        )
    members = np.flatnonzero(conversations.count_targets(seq_len + 1))
    if not len(members):
        raise ConfigError(
            f"{Setting('data.path')}: none of {len(conversations)} conversations has a response of the assistant "
            f"within train.seq_len={seq_len}; name conversations with one, or raise train.seq_len"
        )
    num_skipped = len(conversations) - len(members)
    selected = ScaledMembers(members) if select is None else select(members)
    training, validation = hold_out(selected.members, data.validation_fraction)
    splits = (
        PackedConversations(conversations, training, seq_len=seq_len, pad_id=pad_id, scales=selected.scales),
        PackedConversations(conversations, validation, seq_len=seq_len, pad_id=pad_id, scales=selected.scales),
    )
    if reports:
        if selected.message:
            logger.warning("%s", selected.message)
        _report(num_skipped, int(is_long[selected.members].sum()), len(selected.members), splits[0])
    return splits


def conversation_files(data: DataConfig) -> tuple[Path, ...]:
    """Return the JSON lines files that data.path names, folders recursively."""
    roots = data_paths(data.path, data.kind)
    files = tuple(file for root in roots for file in files_below(root) if not root.is_dir() or is_jsonl(file))
    if not files:
        raise ConfigError(f"{Setting('data.path', roots[0]):s} holds no .jsonl file; name files of conversations")
    check_no_duplicates(tuple(file.resolve() for file in files))
    return files


def read_conversations(records: Iterator[JsonlRecord]) -> Iterator[ConversationToRender]:
    """Yield each record as one conversation."""
    for record in records:
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
        """Tokenise conversations, grouped by their rows; see `tokenize_conversations`."""
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
    """Write the flagged ids of all conversations as an .npy file; return their number."""
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


def hold_out(members: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split conversation numbers into training and validation by a hash of them; both ascending."""
    if fraction == 0:
        return members, members[:0]
    num_held_out = max(1, round(len(members) * fraction))
    if num_held_out >= len(members):
        raise ConfigError(
            f"data.validation_fraction={fraction} leaves none of {len(members)} conversations to train on; "
            "give more data or set data.validation_fraction=0"
        )
    hashes = np.array([hash_ints(len(members), number) for number in members.tolist()], dtype=np.uint64)
    order = np.argsort(hashes, kind="stable")
    return np.sort(members[order[num_held_out:]]), np.sort(members[order[:num_held_out]])


def conversation_location(data: DataConfig, number: int) -> str:
    """Return FILE:LINE of a conversation; its number if rows may have been skipped."""
    if data.skip_bad_rows:
        return f"{Setting('data.path')}: conversation {number + 1}, of those not skipped"
    records = (record for path in conversation_files(data) for record in jsonl_records(path))
    return next(islice(records, number, None)).location


def _report(num_skipped: int, num_cut: int, num_members: int, training: PackedConversations) -> None:
    filled = training.num_tokens / (len(training) * (training.seq_len + 1))
    logger.warning(
        f"{Setting('data.path')}: %d conversations, %d skipped without a response within train.seq_len, %d cut to %d "
        "tokens; %d samples to train on, %.1f %% filled",
        num_members + num_skipped,
        num_skipped,
        num_cut,
        training.seq_len + 1,
        len(training),
        100 * filled,
    )


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins by best fit decreasing: longest first, each into the bin with the least sufficient space.

    Uses at most 11/9 of the minimum number of bins, plus one (D. S. Johnson, 1973); local, O(n * capacity / 64).
    Lengths are 1 .. capacity.

    Returns:
        The item numbers in each bin, ascending; bins in the order of their first number.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit s of `spaces` is set if a bin with space s exists. The lowest set bit from `length` on is the best fit.
    spaces = 0
    for i in order:
        length = lengths[i]
        sufficient = spaces >> length
        if sufficient:
            space = length + (sufficient & -sufficient).bit_length() - 1
            number_of_bin = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space = capacity
            number_of_bin = len(bins)
            bins.append([])
        bins[number_of_bin].append(i)
        with_space[space - length].append(number_of_bin)
        if space > length:
            spaces |= 1 << (space - length)
    return sorted(sorted(members) for members in bins)
