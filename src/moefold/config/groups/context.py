"""Context parallelism: how the ranks of cp, each with some tokens of a sample, attend to all of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.part import Part


@dataclass(frozen=True, kw_only=True)
class ContextPart(Part):
    """Attention over full samples whose tokens are sharded; equal to attention on one rank."""

    group: ClassVar[str] = "context"
    key: ClassVar[str] = "parallel.context"
    changes_maths: ClassVar[bool] = False

    splits_in_chunks: ClassVar[bool] = True
    """Whether a rank holds an early and a late one of 2*cp chunks of a sample, for equal work, not one of cp parts."""
    shards_heads: ClassVar[bool] = False
    """Whether a rank computes whole sequences for its share of the heads: cp divides the heads of a tp rank."""
    takes_selected_keys: ClassVar[bool] = False
    """Whether sparse attention, which selects among the keys of the whole sequence, goes with it."""
    is_planned: ClassVar[bool] = False
    """Whether the runtime plans the attention of each round by its documents; then `build` is not called."""

    @property
    def balances_hosts(self) -> bool:
        """Return whether ranks with too much attention work send queries to others."""
        return False

    @property
    def moves_tokens(self) -> bool:
        """Return whether ranks hold other tokens than the usual parts of their samples."""
        return False

    @property
    def shares_work(self) -> bool:
        """Return whether the attention of a sample may be computed by ranks outside of its context-parallel group."""
        return False

    def build(self, cp: Any, window: int, chunk_size: int) -> Any:
        """Build the core attention of a rank: a `CoreAttention` (`model/attention.py`) over its share of the tokens.

        Args:
            cp: the `Group` of two or more ranks that share a sample.
            window: sliding window, the maximum number of keys per query, its own included; 0: no limit.
            chunk_size: tokens of an attention chunk; 0: no chunks.
        """
        raise NotImplementedError
