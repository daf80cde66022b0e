"""Sizes of the parts that kernels compute one after another, which decide their temporary memory."""

MAX_COPIED_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits that the torch operations of the loss copy to float32 at a time by device: 16 MiB, which a CPU's allocator
reuses without page faults, and 256 MiB, which keeps the launches few."""
CPU_LOSS_TOKENS = 512
"""Tokens of a loss chunk on a CPU if logits are saved (docs/log.md#2026-11-20-chunked-loss-and-recomputation)."""
NUM_UPCAST_CHUNKS = 8
MIN_UPCAST_CHUNK_ROWS = 256
"""A large weight is upcast in NUM_UPCAST_CHUNKS chunks, of at least this many rows."""
LINEAR_CHUNK_SIZE = 64
"""Tokens of a chunk of linear attention: products within chunks grow with it, the number of sequential steps falls with
it."""
