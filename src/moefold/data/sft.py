"""Supervised fine-tuning data: tokenised conversations, packed into samples by best fit.

Packing depends on the sequence length. Every process computes the same packing from the lengths.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moefold.config.sections.data import DataConfig
from moefold.data.bin_packing import pack_best_fit
from moefold.data.conversations.conversation_cache import TokenizedConversations
from moefold.data.held_out import hold_out
from moefold.data.sample import Sample, SampleSource, fill_up, packed_sample
from moefold.data.source_listing import conversation_files
from moefold.data.sources.file_formats import jsonl_records
from moefold.errors import ConfigError
from moefold.message_text import Setting

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScaledMembers:
    """Conversations to train on, and the factors of their losses."""

    members: NDArray[np.int64]
    """Numbers of the conversations, ascending."""
    scales: NDArray[np.float64] | None = None
    """Factor of the loss of each conversation of the files, [conversations]. None means 1."""
    message: str = ""
    """Message for the log."""


class PackedMembers(SampleSource):
    """Samples of padding and whole members, which are conversations or pairs. No member spans two samples.

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
        scales: factor of the loss of each conversation, [conversations]. None means 1.
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
        select: chooses from the conversations with a target, and scales their losses. None means all, unscaled.

    Raises:
        ConfigError: there is no response, a conversation is too long and data.overlong is "refuse", or no training data
            is left.
    """
    is_long = find_overlong(
        data, np.diff(conversations.starts), seq_len, "conversation", partial(conversation_location, data)
    )
    members = np.flatnonzero(conversations.count_targets(seq_len + 1))
    if not len(members):
        raise ConfigError(
            f"{Setting('data.path')}: none of {len(conversations)} conversations has a response of the assistant "
            f"within train.seq_len={seq_len}; name conversations with one, or raise train.seq_len"
        )
    num_skipped = len(conversations) - len(members)
    selected = ScaledMembers(members) if select is None else select(members)
    training, validation = (
        PackedConversations(conversations, split, seq_len=seq_len, pad_id=pad_id, scales=selected.scales)
        for split in hold_out(selected.members, data.validation_fraction)
    )
    if reports:
        if selected.message:
            logger.warning("%s", selected.message)
        _report(num_skipped, int(is_long[selected.members].sum()), len(selected.members), training)
    return training, validation


def find_overlong(
    data: DataConfig, lengths: NDArray[np.int64], seq_len: int, noun: str, location: Callable[[int], str]
) -> NDArray[np.bool_]:
    """Return which conversations or pairs have more than seq_len + 1 tokens, or refuse them if `data.overlong` does."""
    is_long: NDArray[np.bool_] = lengths > seq_len + 1
    if data.overlong == "refuse" and is_long.any():
        number = int(np.argmax(is_long))
        raise ConfigError(
            f"{location(number)}: the {noun} has {lengths[number]} tokens, and {int(is_long.sum())} of {len(lengths)} "
            f"have more than the {seq_len + 1} of train.seq_len={seq_len}; raise it to {int(lengths.max()) - 1}, or "
            'set data.overlong="cut"'
        )
    return is_long


def conversation_location(data: DataConfig, number: int) -> str:
    """Return FILE:LINE of a conversation, or its number if rows may have been skipped."""
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
