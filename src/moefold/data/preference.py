"""Preference data: pairs of completions, or completions with a label.

A row has both sequences of a pair. The formats are TRL's: {"prompt", "chosen", "rejected"}, {"chosen", "rejected"} with
the prompt as their common prefix, and {"prompt", "completion", "label"}. Each text is a message or a list of messages.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.data.conversations.chat import Message
from moefold.data.conversations.conversation_cache import (
    ConversationReader,
    ConversationToRender,
    TokenizedConversations,
)
from moefold.data.conversations.conversation_format import (
    Conversation,
    parse_messages,
    parse_tools,
    refuse_repeated_prompt,
    refuse_row_weight,
    refuse_unread,
    with_system,
)
from moefold.data.held_out import hold_out
from moefold.data.sample import ReferenceLogProbs, Sample, fill_up, packed_sample
from moefold.data.scored_conversations import prompt_hash
from moefold.data.sft import PackedMembers, conversation_location, find_overlong
from moefold.data.sources.file_formats import JsonlRecord, column_text, unknown_column_message
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

Messages = list[Message]

logger = logging.getLogger(__name__)


def preference_reader(align: AlignConfig) -> ConversationReader:
    """Return the reader of pairs: conversation 2k is chosen and 2k + 1 rejected.

    For kto, conversation 2k is a completion. Conversation 2k + 1 has the same prompt and the completion of the next row
    with another prompt. The label bit of 2k is set if the completion is desirable.
    """
    if _is_labelled(align):
        return ConversationReader(("preference", "kto"), _read_labelled, _read_labelled_alone)
    return ConversationReader(("preference", "pairs"), _read_pairs)


def _is_labelled(align: AlignConfig) -> bool:
    method = chosen_in(align, AlignmentPart)
    return method.preference is not None and method.preference.labelled


class PackedPairs(PackedMembers):
    """Samples of whole pairs and padding. Both sequences of a pair are documents of one sample.

    K is twice the largest number of pairs in any sample. A sample has the columns:

    * "sequence_ids" [S]: 2k and 2k + 1 for the targets of the k-th pair, and -1 elsewhere.
    * "pair_ids" [K / 2]: number of each pair in the files, or -1.
    * "is_desirable" [K / 2]: the label of each pair (kto).
    * "reference_log_probs" [K]: sums of the reference model, if the loss needs one.

    Weights of sequence 2k add up to 1. Both sequences are consecutive conversations with targets after `cut_lengths`.
    """

    noun = "pairs"

    def __init__(
        self,
        conversations: TokenizedConversations,
        pairs: NDArray[np.int64],
        reference: ReferenceLogProbs,
        align: AlignConfig,
        *,
        seq_len: int,
        pad_id: int,
    ) -> None:
        lengths = cut_lengths(_pair_lengths(conversations)[pairs], seq_len + 1)
        super().__init__(conversations, pairs, lengths.sum(1), seq_len=seq_len, pad_id=pad_id)
        self.reference = reference
        self._align = align
        self._length_of_pair = dict(zip(pairs.tolist(), lengths.tolist(), strict=True))
        self._max_pairs = max((len(packed) for packed in self._bins), default=0)

    def annotated_sample(self, number: int) -> Sample:
        """Return one sample."""
        size = self.seq_len + 1
        packed = self._bins[number]
        sides = [
            self._conversations.read(2 * pair + i, length)
            for pair in packed.tolist()
            for i, length in enumerate(self._length_of_pair[pair])
        ]
        ids = [np.where(targets, sequence, -1) for sequence, (_, targets) in enumerate(sides)]
        weights = [
            targets / targets.sum() if i % 2 == 0 else np.zeros(len(targets)) for i, (_, targets) in enumerate(sides)
        ]
        slots = self._max_pairs - len(packed)
        sample_columns: dict[str, NDArray[Any]] = {"pair_ids": np.pad(packed, (0, slots), constant_values=-1)}
        if _is_labelled(self._align):
            labels = [self._conversations.has_label(2 * int(pair)) for pair in packed]
            sample_columns["is_desirable"] = np.array(labels + [False] * slots)
        if chosen_in(self._align, AlignmentPart).has_reference:
            sample_columns["reference_log_probs"] = np.pad(self.reference.values[packed].ravel(), (0, 2 * slots))
        return packed_sample(
            [tokens for tokens, _ in sides],
            size,
            self._pad_id,
            weights=fill_up(weights, size, 0)[1:],
            token_columns={"sequence_ids": fill_up(ids, size, -1)[1:]},
            sample_columns=sample_columns,
        )


def pack_pairs(
    data: DataConfig,
    align: AlignConfig,
    conversations: TokenizedConversations,
    *,
    seq_len: int,
    pad_id: int,
    reports: bool,
) -> tuple[PackedPairs, PackedPairs]:
    """Split pairs into training and validation, and pack both parts.

    Pairs whose completions have no target within their part of the sample (`cut_lengths`) are skipped.

    Raises:
        ConfigError: a pair is too long and data.overlong is "refuse", or no pair is left.
    """
    lengths = _pair_lengths(conversations)

    def location(number: int) -> str:
        # With labels, a row may become two pairs.
        is_labelled = _is_labelled(align)
        return f"pair {number} of {Setting('data.path')}" if is_labelled else conversation_location(data, number)

    is_long = find_overlong(data, lengths.sum(1), seq_len, "pair", location)
    cut = cut_lengths(lengths, seq_len + 1)
    num_targets = conversations.count_targets(cut.ravel()).reshape(-1, 2)
    pairs = np.flatnonzero(num_targets.all(1))
    if not len(pairs):
        rule = f": none of {len(lengths)} pairs has both completions within train.seq_len={seq_len}"
        raise ConfigError(Problem("data.path", None, rule, "raise it"))
    reference = ReferenceLogProbs(num_targets)
    training, validation = (
        PackedPairs(conversations, split, reference, align, seq_len=seq_len, pad_id=pad_id)
        for split in hold_out(pairs, data.validation_fraction)
    )
    if reports:
        logger.warning(
            f"{Setting('data.path')}: %d pairs, %d skipped without a completion within train.seq_len, %d cut to %d "
            "tokens; %d samples to train on",
            len(lengths),
            len(lengths) - len(pairs),
            int(is_long[pairs].sum()),
            seq_len + 1,
            len(training),
        )
    return training, validation


def cut_lengths(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Cut pairs to `size` tokens, [pairs, 2]: a sequence keeps half of them, or what the other does not need."""
    half = size // 2
    other_lengths = lengths[:, ::-1]
    cut: NDArray[np.int64] = np.minimum(lengths, np.maximum(half, size - np.minimum(other_lengths, size)))
    return cut


def _pair_lengths(conversations: TokenizedConversations) -> NDArray[np.int64]:
    """Return the tokens of both sequences of each pair, [pairs, 2]."""
    return np.diff(conversations.starts).reshape(-1, 2)


def _read_pairs(records: Iterator[JsonlRecord]) -> Iterator[ConversationToRender]:
    for record in records:
        prompt, *completions = parse_pair(record)
        for number, completion in enumerate(completions):
            yield _to_render(prompt, completion, record, size_bytes=record.size_bytes * (1 - number))


def _read_labelled(records: Iterator[JsonlRecord]) -> Iterator[ConversationToRender]:
    """Yield each completion, then its prompt with the completion of the next row with another prompt, cyclically."""
    waiting: list[tuple[JsonlRecord, Messages, Messages, bool]] = []
    # First completion of each of the first two prompts, for the last rows.
    first_completions: dict[int, Messages] = {}
    waiting_hash = 0
    for record in records:
        for prompt, completion, label in parse_labelled(record):
            this_hash = prompt_hash(prompt)
            if len(first_completions) < 2:
                first_completions.setdefault(this_hash, completion)
            if waiting and this_hash != waiting_hash:
                yield from _with_mismatch(waiting, completion)
                waiting.clear()
            waiting_hash = this_hash
            waiting.append((record, prompt, completion, label))
    if not waiting:
        return
    partner = next((completion for key, completion in first_completions.items() if key != waiting_hash), None)
    if partner is None:
        raise ConfigError(
            f"{waiting[0][0].location}: all rows have one prompt, and kto compares with the completion of another "
            "prompt; give rows of several prompts"
        )
    yield from _with_mismatch(waiting, partner)


def _read_labelled_alone(record: JsonlRecord) -> list[ConversationToRender]:
    """Return the completions of one row, without completions of other rows."""
    return [_to_render(prompt, completion, record, size_bytes=0) for prompt, completion, _ in parse_labelled(record)]


def _with_mismatch(
    rows: Sequence[tuple[JsonlRecord, Messages, Messages, bool]], mismatched: Messages
) -> Iterator[ConversationToRender]:
    for record, prompt, completion, label in rows:
        yield _to_render(prompt, completion, record, size_bytes=record.size_bytes, has_label=label)
        yield _to_render(prompt, mismatched, record, size_bytes=0)


def _to_render(
    prompt: Messages, completion: Messages, record: JsonlRecord, *, size_bytes: int, has_label: bool = False
) -> ConversationToRender:
    return ConversationToRender(
        [*prompt, *completion],
        parse_tools(record),
        record.location,
        size_bytes,
        untrained=frozenset(range(len(prompt))),
        has_label=has_label,
    )


def parse_pair(record: JsonlRecord) -> tuple[Messages, Messages, Messages]:
    """Return prompt, chosen and rejected completion of a row, which must differ and share the prompt."""
    fields = record.fields
    place = record.location
    for column in ("chosen", "rejected"):
        if column not in fields:
            raise ConfigError(
                f'{place} is not a pair: {unknown_column_message(column, fields)}; give it "prompt", "chosen" and '
                '"rejected"'
            )
    are_messages = isinstance(fields["chosen"], list)
    if are_messages != isinstance(fields["rejected"], list):
        raise ConfigError(f'{place}: one of "chosen" and "rejected" is a text, and the other a list; make them alike')
    refuse_unread(fields, place)
    refuse_row_weight(fields, place)
    if "prompt" not in fields or (are_messages and isinstance(fields["prompt"], str)):
        prompt, chosen, rejected = _split_common_prompt(record)
    else:
        prompt, chosen = _parse_answered(record, "chosen")
        _, rejected = _parse_answered(record, "rejected")
    if chosen == rejected:
        raise ConfigError(f'{place}: "chosen" and "rejected" are equal, so that neither is preferred; remove the line')
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        if not completion:
            raise ConfigError(f'{place}: "{name}" has no completion after the prompt; fix or remove the line')
    return _with_system(prompt, record), chosen, rejected


def _parse_answered(record: JsonlRecord, column: str) -> tuple[Messages, Messages]:
    """Return the prompt of a row, and the completion of a column."""
    prompt = _as_messages(record, "prompt", "user")
    completion = _as_messages(record, column, "assistant")
    refuse_repeated_prompt(prompt, completion, f'{record.location}: "{column}"')
    return prompt, completion


def _with_system(prompt: Messages, record: JsonlRecord) -> Messages:
    return list(with_system(Conversation(tuple(map(dict, prompt))), record.fields, record.location).messages)


def _split_common_prompt(record: JsonlRecord) -> tuple[Messages, Messages, Messages]:
    """Split off the longest common prefix of both completions as the prompt, like TRL. What follows may be empty."""
    if isinstance(record.fields["chosen"], list):
        answers = [_as_messages(record, column, "assistant") for column in ("chosen", "rejected")]
        pairs = zip(*answers, strict=False)
        shared = next((i for i, (first, other) in enumerate(pairs) if first != other), min(map(len, answers)))
        prompt, ends = answers[0][:shared], [answer[shared:] for answer in answers]
    else:
        texts = [column_text(record.fields, column, record.location) for column in ("chosen", "rejected")]
        shared = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        # A space belongs to the following word.
        shared -= shared > 0 and texts[0][shared - 1] == " "
        prompt = [{"role": "user", "content": texts[0][:shared]}] if shared else []
        ends = [[{"role": "assistant", "content": text[shared:]}] if text[shared:] else [] for text in texts]
    if not prompt:
        raise ConfigError(
            f'{record.location}: "chosen" and "rejected" share no prompt; begin both with it, or give it as "prompt"'
        )
    _check_question(prompt, record)
    return prompt, ends[0], ends[1]


def _check_question(prompt: Messages, record: JsonlRecord) -> None:
    """Raise ConfigError if a row has a text "prompt" that is in none of the messages that its answers begin with."""
    question = record.fields.get("prompt")
    texts = [message["content"] for message in prompt if message["role"] == "user" and message["content"]]
    if isinstance(question, str) and not any(question.strip() in text or text in question for text in map(str, texts)):
        raise ConfigError(
            f'{record.location}: "chosen" and "rejected" begin with other messages than the text "prompt", which would '
            "be missing; give the prompt as a list of messages, or remove it"
        )


def parse_labelled(record: JsonlRecord) -> list[tuple[Messages, Messages, bool]]:
    """Return prompt, completion and label of a row. A row with a pair has a desirable and an undesirable completion."""
    fields = record.fields
    if "completion" not in fields and "chosen" in fields:
        prompt, chosen, rejected = parse_pair(record)
        return [(prompt, chosen, True), (prompt, rejected, False)]
    for column in ("prompt", "completion", "label"):
        if column not in fields:
            raise ConfigError(
                f'{record.location}: {unknown_column_message(column, fields)}; kto needs "prompt", "completion" and '
                '"label"'
            )
    label = fields["label"]
    if not isinstance(label, bool):
        raise ConfigError(f'{record.location}: "label" is {label!r}, and must be true (desirable) or false; fix it')
    refuse_unread(fields, record.location)
    refuse_row_weight(fields, record.location)
    prompt, completion = _parse_answered(record, "completion")
    return [(_with_system(prompt, record), completion, label)]


def _as_messages(record: JsonlRecord, column: str, role: str) -> Messages:
    """Return the messages of a column. A text is one message of the role."""
    value = record.fields[column]
    place = f'{record.location}: "{column}"'
    if isinstance(value, list):
        parsed = parse_messages(value, place)
        if parsed.untrained and column != "prompt":
            raise ConfigError(f"{place} has a message of weight 0, which no preference can train; remove the weight")
        return list(parsed.messages)
    text = column_text(record.fields, column, record.location)
    # A completion may be empty, if the model ended immediately.
    if not text and column == "prompt":
        raise ConfigError(f"{place} is empty; fix or remove the line")
    return [{"role": role, "content": text}]
