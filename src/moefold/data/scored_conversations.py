"""Rewards of scored conversations: filtering, weighting and conditioning on them (arXiv:2308.12050)."""

import hashlib
import json
import reprlib
import sys
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moefold.cache_dir import entry_key
from moefold.config.groups.alignment import AlignmentPart, fill_template, parse_threshold
from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import Message, load_chat_template
from moefold.data.conversations.conversation_cache import FORMAT_VERSION as TOKENS_VERSION
from moefold.data.conversations.conversation_cache import (
    ConversationReader,
    ConversationToRender,
    Tokenization,
    read_conversations,
    usable_records,
)
from moefold.data.conversations.conversation_format import parse_conversation
from moefold.data.conversations.conversation_tokens import RowReport
from moefold.data.sft import ScaledMembers
from moefold.data.source_listing import conversation_files
from moefold.data.sources.file_formats import JsonlRecord, jsonl_records, unknown_column_message
from moefold.data.token_cache import cached_ids, npy_header
from moefold.data.token_file import read_npy_header
from moefold.data.tokenizer import OffsetTokenizer
from moefold.errors import ConfigError
from moefold.message_text import Problem

FORMAT_VERSION = 1
_WORDS = 4
"""32-bit words of a row of the cache: reward (float64) and hash of the prompt."""


class Rewards:
    """Rewards of all conversations of the files, in their order. prompt_N hashes the messages before each answer."""

    def __init__(self, reward_N: NDArray[np.float64], prompt_N: NDArray[np.uint64], column: str) -> None:
        self.reward_N = reward_N
        self.prompt_N = prompt_N
        self._column = column

    def filter(self, members: NDArray[np.int64], threshold: float | str) -> ScaledMembers:
        """Keep the conversations whose reward reaches align.method.threshold. Raises ConfigError if there are none."""
        reward = self._check_differ(members, "filter")
        kind, number = parse_threshold(threshold)
        if kind == "best":
            # By prompt, then the highest reward, then the first row.
            order = np.lexsort((members, -reward, self.prompt_N[members]))
            prompts = self.prompt_N[members][order]
            is_best = np.concatenate(([True], prompts[1:] != prompts[:-1]))
            selected = np.sort(members[order[is_best]])
        else:
            cutoff = float(np.quantile(reward, number)) if kind == "quantile" else number
            selected = members[reward >= cutoff]
            if not len(selected):
                raise ConfigError(
                    f"align.method.threshold={threshold!r} keeps none of {len(members)} conversations, whose "
                    f"rewards lie in [{reward.min():g}, {reward.max():g}]; lower it"
                )
        return ScaledMembers(
            selected,
            message=f"align.method='filter' keeps {len(selected)} of {len(members)} conversations: mean reward "
            f"{self.reward_N[selected].mean():.4g} instead of {reward.mean():.4g}",
        )

    def weight(self, members: NDArray[np.int64], beta: float, cap: float) -> ScaledMembers:
        """Scale the loss of conversation i by exp(reward_i / beta) divided by its mean, at most `cap` (0: no limit)."""
        reward = self._check_differ(members, "weight")
        # The exponents are shifted so that the largest is 0 and none overflows; the shift cancels.
        factor = np.exp((reward - reward.max()) / beta)
        factor /= factor.mean()
        capped = np.minimum(factor, cap) if cap else factor
        scales = np.ones(len(self.reward_N))
        scales[members] = capped
        return ScaledMembers(
            members,
            scales,
            f"align.method='weight' scales losses by {capped.min():.3g} to {capped.max():.3g}, "
            f"{int((factor > capped).sum())} of {len(members)} capped",
        )

    def _check_differ(self, members: NDArray[np.int64], method: str) -> NDArray[np.float64]:
        """Return the rewards of the members. Raises ConfigError if all are equal."""
        reward = self.reward_N[members]
        if len(reward) and reward.min() == reward.max():
            rule = f"has no effect: all {len(members)} rewards in the column {self._column!r} are {reward[0]:g}"
            raise ConfigError(Problem("align.method", method, rule, "give other rewards, or leave align out"))
        return reward


def open_rewards(
    data: DataConfig,
    column: str,
    tokenizer: OffsetTokenizer,
    skipped: Set[Path] = frozenset(),
) -> Rewards:
    """Read the rewards of the conversations that data.path names, except skipped files, and cache them.

    With data.skip_bad_rows, `open_conversations` keeps the same rows with `rewarded_reader`. Raises ConfigError if a
    row has no finite reward.
    """
    files = tuple(file for file in conversation_files(data) if file not in skipped)
    sizes = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    identity = ["rewards", FORMAT_VERSION, sizes, column]
    records: Iterator[JsonlRecord] = chain.from_iterable(jsonl_records(path) for path in files)
    if data.skip_bad_rows:
        template = load_chat_template(data, tokenizer)
        # Skipped rows are reported when they are tokenised for training.
        job = Tokenization(tokenizer, template, RowReport(template.location, skips=True))
        records = usable_records(files, rewarded_reader(column, skips=True), job)
        identity += [TOKENS_VERSION, tokenizer.identity, template.identity]
    key = entry_key(identity)

    def write(file: BinaryIO) -> None:
        rows = [_reward_row(record, column) for record in records]
        words = np.array(rows, dtype=[("reward", "<f8"), ("prompt", "<u8")]).view("<u4")
        file.write(npy_header(words.dtype, len(words)))
        file.write(words.tobytes())

    reader = read_npy_header(cached_ids(key, write)).open()
    words = np.ascontiguousarray(reader[0 : len(reader)], dtype="<u4").reshape(-1, _WORDS)
    return Rewards(words[:, :2].copy().view("<f8")[:, 0], words[:, 2:].copy().view("<u8")[:, 0], column)


def rewarded_reader(column: str, *, skips: bool) -> ConversationReader:
    """Return the reader of conversations with rewards. If bad rows are skipped, it refuses rows without a reward."""
    if not skips:
        return ConversationReader(("sft",), partial(read_conversations, reward_column=column))
    return ConversationReader(("sft rewarded", column), partial(_rewarded, column=column))


def _rewarded(records: Iterator[JsonlRecord], column: str) -> Iterator[ConversationToRender]:
    for record in records:
        reward_of(record, column)
        yield from read_conversations(iter([record]), column)


def conditioned_reader(method: AlignmentPart) -> ConversationReader:
    """Return the reader that writes each reward into the message before the answer."""
    identity = ("sft conditioned", method.reward_column, method.prompt_template)
    return ConversationReader(identity, partial(_conditioned, method=method))


def _conditioned(records: Iterator[JsonlRecord], method: AlignmentPart) -> Iterator[ConversationToRender]:
    for record in records:
        parsed = parse_conversation(record)
        messages = list(parsed.messages)
        number = _prompt_length(messages) - 1
        prompt = messages[number].get("content") if number >= 0 else None
        if not isinstance(prompt, str):
            raise ConfigError(f"{record.location}: no text precedes the answer, to write the reward into; remove it")
        messages[number] = {
            **messages[number],
            "content": fill_template(method.prompt_template, prompt, reward_of(record, method.reward_column)),
        }
        yield ConversationToRender(messages, parsed.tools, record.location, record.size_bytes, parsed.untrained)


def _prompt_length(messages: list[Any]) -> int:
    """Return the number of messages before the last answer, or of all messages if there is no answer."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return answers[-1] if answers else len(messages)


def _reward_row(record: JsonlRecord, column: str) -> tuple[float, int]:
    parsed = parse_conversation(record)
    prompt = list(parsed.messages)[: _prompt_length(list(parsed.messages))]
    return reward_of(record, column), prompt_hash(prompt, parsed.tools)


def prompt_hash(prompt: Sequence[Message], tools: Any = None) -> int:
    """Return a hash of messages, of 64 bits."""
    text = json.dumps([prompt, tools], sort_keys=True, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def reward_of(record: JsonlRecord, column: str) -> float:
    """Return the reward of a row. Raises ConfigError if it is absent or not a finite number."""
    if column not in record.fields:
        raise ConfigError(
            f"{record.location}: {unknown_column_message(column, record.fields)}; align.method.reward names the column"
        )
    reward = record.fields[column]
    # A larger integer does not fit into a float.
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and abs(reward) <= sys.float_info.max
    if not is_number:
        raise ConfigError(
            f"{record.location}: the reward in column {column!r} is {reprlib.repr(reward)}, and must be a finite "
            "number; fix or remove the line"
        )
    return float(reward)
