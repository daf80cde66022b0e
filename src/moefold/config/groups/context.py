"""Context parallelism: attention over whole samples whose tokens are sharded over the ranks of cp."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from moefold.config.base.field import Bound, MaxMagnitude, at_least
from moefold.config.base.limits import MAX_SAMPLE_TOKENS
from moefold.config.base.part import Part

BALANCED = "balanced"
TokenPlacement = Literal["samples", "documents", "balanced"]
AttentionHosts = Literal["home", "balanced"]


@dataclass(frozen=True, kw_only=True)
class MicroBatchSetPlan:
    """Ranks that hold the tokens of a micro-batch set, and that compute their attention."""

    placement: TokenPlacement = "samples"
    """Tokens of a rank. samples: two chunks of each sample. documents: two chunks of each document of its samples.
    balanced: documents of all dp x cp ranks, whole where they fit, so that few keys are sent."""
    hosts: AttentionHosts = "home"
    """Ranks that compute the attention of a token. home: the rank that holds it. balanced: rows of queries leave ranks
    with too much attention work, and their outputs return (arXiv:2510.18121)."""
    tolerance: Annotated[
        float, Bound("must lie between 0 and 1: 0.1 keeps 10 % above the mean", lambda tolerance: 0 <= tolerance <= 1)
    ] = 0.1
    """Attention work above the mean that a rank keeps, over the mean (hosts "balanced")."""
    pool: Annotated[int, at_least(0, "0: all ranks")] = 0
    """Ranks that share attention work, a multiple of cp that divides dp*cp. 0: all (hosts "balanced")."""
    block: Annotated[int, at_least(1), MaxMagnitude(MAX_SAMPLE_TOKENS)] = 128
    """Unit in tokens, from the start of a document, for splitting it between ranks (placement "documents", hosts
    "balanced")."""

    @property
    def balances_compute_ranks(self) -> bool:
        """Return whether ranks with too much attention work send queries to others."""
        return self.hosts == BALANCED

    @property
    def moves_tokens(self) -> bool:
        """Return whether ranks hold other tokens than the usual parts of their samples."""
        return self.placement != "samples"

    @property
    def shares_work(self) -> bool:
        """Return whether ranks outside of a sample's context-parallel group may compute its attention."""
        return BALANCED in (self.hosts, self.placement)

    def exchange_ranks(self, cp: int, dp: int) -> int:
        """Return the consecutive ranks of dp x cp that exchange rows of keys or queries."""
        if self.placement == BALANCED:
            return cp * dp
        return self.pool or cp * dp if self.balances_compute_ranks else cp


_UNPLANNED = MicroBatchSetPlan()


@dataclass(frozen=True, kw_only=True)
class ContextPart(Part):
    """Attention over full samples whose tokens are sharded, equal to attention on one rank."""

    group: ClassVar[str] = "context"
    key: ClassVar[str] = "parallel.context"
    changes_maths: ClassVar[bool] = False

    splits_in_chunks: ClassVar[bool] = True
    """True if a rank holds an early and a late chunk of 2*cp chunks of a sample, for equal work, not one of cp
    parts."""
    shards_heads: ClassVar[bool] = False
    """True if a rank computes whole sequences for its share of the heads: cp divides the heads of a tp rank."""
    takes_selected_keys: ClassVar[bool] = False
    """True if sparse attention, which selects among the keys of the whole sequence, may use this kind."""

    @property
    def plan(self) -> MicroBatchSetPlan:
        """Return the plan of micro-batch sets. The default divides each sample among its ranks."""
        return _UNPLANNED

    @property
    def is_planned(self) -> bool:
        """Return whether the runtime plans the attention of documents, without a call of `build`."""
        return self.plan is not _UNPLANNED

    def variants(self) -> Iterator["ContextPart"]:
        """Yield the variants of the part that a search for samples of documents tries, whatever a recipe chooses."""
        yield from ()

    def build(self, cp: Any, window: int, chunk_size: int) -> Callable[..., Any]:
        """Build the core attention of a rank: a `CoreAttention` (`model/attention.py`) over its share of the tokens.

        Args:
            cp: the `Group` of two or more ranks that share a sample.
            window: sliding window, the maximum number of keys per query, its own included. 0: no limit.
            chunk_size: tokens of an attention chunk. 0: no chunks.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a global batch, and the ranks that share it."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    """Micro-batches of a data-parallel rank, including micro-batches of only padding."""
    seq_len: int
    vocab_size: int
    mtp_layers: int
    """Layers of multi-token prediction, each with targets of its own."""
    dp: int
    cp: int
    context: ContextPart
    is_float64: bool

    @property
    def samples_per_rank(self) -> int:
        """Samples of a data-parallel rank, padding included."""
        return self.num_micro_batches * self.micro_batch_size


def zigzag(cp: int, rank: int) -> tuple[int, int]:
    """Return the two of 2*cp chunks that a rank holds."""
    return rank, 2 * cp - 1 - rank
