"""Sizes of the chunks in which the logits and the loss of a micro-batch are computed (`train.loss_chunk`)."""

LARGE_LOGITS = 1 << 28
"""Logits of a micro-batch on a rank above which train.loss_chunk = -1 computes them in chunks: 1 GiB in float32."""
LOSS_CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits of a loss chunk with train.loss_chunk = -1 by device: 64 MiB, and 1 GiB, in float32."""
MAX_COPIED_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits that the loss copies to float32 at a time by device: 16 MiB (no page faults), and 256 MiB (few launches)."""
CPU_LOSS_TOKENS = 512
"""Tokens of a loss chunk on a CPU if logits are saved (docs/log.md#2026-11-20-chunked-loss-and-recomputation)."""
NUM_UPCAST_CHUNKS = 8
MIN_UPCAST_CHUNK_ROWS = 256
"""A large weight is upcast in NUM_UPCAST_CHUNKS chunks, of at least this many rows."""
MIN_LOSS_CHUNK_TOKENS = 256
"""Minimum tokens of a loss chunk with train.loss_chunk = -1."""


def automatic_loss_chunk(device_type: str, tokens: int, vocab_rows: int) -> int:
    """Return the tokens of a loss chunk with `train.loss_chunk` = -1. 0: all tokens of a micro-batch.

    Args:
        tokens: tokens of a micro-batch whose losses a rank computes.
        vocab_rows: rows of the vocabulary on a rank.
    """
    if tokens * vocab_rows <= LARGE_LOGITS:
        return 0
    logits = LOSS_CHUNK_LOGITS.get(device_type, LOSS_CHUNK_LOGITS["cpu"])
    return max(MIN_LOSS_CHUNK_TOKENS, logits // vocab_rows)
