"""Samples of conversations for fine-tuning, fine-tuning by rewards, and preference pairs."""

from collections.abc import Callable, Set
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moefold.config.align import AlignConfig
from moefold.config.chosen import chosen_in
from moefold.config.data import DataConfig
from moefold.config.groups.alignment import AlignmentPart
from moefold.data.preference import pack_pairs, preference_reader
from moefold.data.sample import ReferenceLogProbs, SampleSource
from moefold.data.scored_conversations import conditioned_reader, open_rewards, rewarded_reader
from moefold.data.sft import ScaledMembers, open_conversations, pack_conversations
from moefold.data.tokenizer import OffsetTokenizer


def open_samples(
    data: DataConfig,
    align: AlignConfig,
    tokenizer: OffsetTokenizer,
    skipped: Set[Path],
    *,
    seq_len: int,
    cache_dir: Path | None,
    is_first: bool,
) -> tuple[SampleSource, SampleSource, ReferenceLogProbs | None]:
    """Return the training samples, the held-out samples, and the log-probabilities under the reference model.

    Args:
        tokenizer: the recipe's tokenizer.
        skipped: files that are not used.
        is_first: this process shows progress and logs skipped files and rows.
    """
    is_preference = data.kind == "preference"
    reader = preference_reader(align) if is_preference else None
    method = chosen_in(align, AlignmentPart)
    if method.prompt_template:
        reader = conditioned_reader(method)
    elif method.reward_column and data.skip_bad_rows:
        reader = rewarded_reader(method.reward_column)
    conversations = open_conversations(
        data, tokenizer, skipped, reader=reader, cache_dir=cache_dir, shows_progress=is_first
    )
    pad_id = tokenizer.separator_id or 0
    if is_preference:
        pairs, held_out = pack_pairs(data, align, conversations, seq_len=seq_len, pad_id=pad_id, reports=is_first)
        return pairs, held_out, pairs.reference
    select: Callable[[NDArray[np.int64]], ScaledMembers] | None = None
    if method.selects_rows:
        rewards = open_rewards(data, method.reward_column, tokenizer, skipped, cache_dir=cache_dir)
        select = partial(method.select, rewards)
    return *pack_conversations(
        data, conversations, seq_len=seq_len, pad_id=pad_id, reports=is_first, select=select
    ), None
