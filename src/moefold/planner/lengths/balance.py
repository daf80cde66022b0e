"""Balance of attention over the ranks, for drawn documents: the runtime's own plan of every round. Torch-free.

Rounds are drawn once, with a fixed seed, and all mappings, placements and hosts are priced with the same documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.planner.cost_model.attention_load import AttentionLoad, AttentionPeers
from moefold.planner.lengths.samples import DocumentSamples, SampleLengths, effective_length
from moefold.planner.lengths.strategy import AttentionStrategy
from moefold.topology.attention_plan import AttentionPlan, pairs_before, plan_attention
from moefold.topology.token_placement import Placement, RoundShape, document_bounds, place

MAX_ROUNDS = 32
"""Most rounds of a mapping that are planned."""
MIN_ROUNDS = 4
RANKS_OF_ALL_ROUNDS = 1024
"""Ranks of all planned rounds together, between the limits of their number: larger rounds vary less."""

SAMPLES_OF_EFFECTIVE_LENGTH = 2048
"""Samples from which the effective length is computed: few long documents have much of it."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RoundLoads:
    """Attention of some rounds, by rank."""

    pairs: Floats
    """Visible (query, key) pairs that each rank computes, [rounds, ranks]."""
    kernel_rows: float
    """Query rows of a task, on average over the pairs."""
    exchanged_keys: Floats
    """Rows of keys and values that each rank sends or receives, the larger number, [rounds, ranks]."""
    exchanged_queries: Floats
    """Rows of queries, likewise."""
    moved_queries: float
    """Rows of queries that are sent to another rank, as a share of all."""
    received_keys: float
    """Rows of keys and values that are sent to another rank, for each token."""

    @cached_property
    def max_over_mean(self) -> float:
        """Pairs of the busiest rank over the mean of all ranks, on average over the rounds."""
        return float((self.pairs.max(1) / self.pairs.mean(1)).mean())


@dataclass(frozen=True)
class DocumentLoads:
    """Attention work of drawn documents under a strategy; an `AttentionLoads` of the cost model.

    Args:
        samples: source of the documents.
        seq_len: tokens of a sample.
        strategy: context parallelism.
        seed: seed of the documents.
        only_round: index of the one round to price; None: the mean over the rounds.
    """

    samples: DocumentSamples
    seq_len: int
    strategy: AttentionStrategy = AttentionStrategy()
    seed: int = 0
    only_round: int | None = None
    _rounds: dict[Any, RoundLoads] = field(default_factory=dict, repr=False, compare=False)
    _drawn: dict[int, list[SampleLengths]] = field(default_factory=dict, repr=False, compare=False)

    def with_strategy(self, strategy: AttentionStrategy) -> "DocumentLoads":
        """Return the loads of the same documents under another strategy."""
        return replace(self, strategy=strategy)

    def of_round(self, index: int) -> "DocumentLoads":
        """Return the loads of one round alone; after the last drawn round the first one follows."""
        return replace(self, only_round=index)

    def load(self, peers: AttentionPeers, window: int) -> AttentionLoad:
        """See `AttentionLoads`."""
        found = self.rounds(peers.cp, peers.dp, peers.mbs, window)
        chosen = slice(None) if self.only_round is None else [self.only_round % len(found.pairs)]
        pairs = found.pairs[chosen]
        tokens = peers.mbs * self.seq_len / peers.cp
        planned = self.strategy.is_planned
        # Ring attention computes chunk by chunk; planned attention joins the two chunks of the middle of a sample.
        chunk = self.seq_len / (2 * peers.cp) if peers.cp > 1 else float(self.seq_len)
        is_chunked = not planned and self.strategy.context != "ulysses"
        return AttentionLoad(
            keys=_busiest(pairs, self._waiting(peers), peers.num_rounds) / tokens,
            mean_keys=float(pairs.mean()) / tokens,
            kernel_rows=min(found.kernel_rows, chunk) if is_chunked else found.kernel_rows,
            sent_keys=float(found.exchanged_keys[chosen].max(1).mean()) / tokens if planned else 0.0,
            sent_queries=float(found.exchanged_queries[chosen].max(1).mean()) / tokens if planned else 0.0,
            exchange_ranks=self._exchange_ranks(peers),
            is_planned=planned,
        )

    def mean_load(self, window: int) -> AttentionLoad:
        """See `AttentionLoads`."""
        key = ("mean", window)
        if key not in self._rounds:
            self._rounds[key] = self._load_rounds(1, 1, 1, window, AttentionStrategy())
        pairs = self._rounds[key].pairs
        keys = float(pairs.mean()) / self.seq_len
        return AttentionLoad(keys, keys, float(self.seq_len), is_planned=self.strategy.is_planned)

    @property
    def effective_length(self) -> float:
        """Effective length of the documents in tokens, see `effective_length`."""
        return effective_length(self._first_samples(SAMPLES_OF_EFFECTIVE_LENGTH))

    def rounds(self, cp: int, dp: int, mbs: int, window: int = 0) -> RoundLoads:
        """Plan the rounds of a mapping; cached."""
        key = (cp, dp, mbs, window, self.strategy)
        if key not in self._rounds:
            self._rounds[key] = self._load_rounds(cp, dp, mbs, window, self.strategy)
        return self._rounds[key]

    def _exchange_ranks(self, peers: AttentionPeers) -> int:
        """Return the consecutive ranks that exchange rows."""
        if not self.strategy.is_planned:
            return 1
        if self.strategy.placement == "balanced":
            return peers.cp * peers.dp
        return peers.cp if self.strategy.hosts == "home" else self.strategy.pool or peers.cp * peers.dp

    def _waiting(self, peers: AttentionPeers) -> int:
        """Return the consecutive ranks that wait for each other in a layer, those that exchange rows included."""
        return min(lcm(peers.group, self._exchange_ranks(peers)), peers.cp * peers.dp)

    def _load_rounds(self, cp: int, dp: int, mbs: int, window: int, strategy: AttentionStrategy) -> RoundLoads:
        count = min(MAX_ROUNDS, max(MIN_ROUNDS, RANKS_OF_ALL_ROUNDS // (cp * dp)))
        samples = self._first_samples(count * dp * mbs)
        rounds = [samples[first : first + dp * mbs] for first in range(0, len(samples), dp * mbs)]
        if strategy.context == "ulysses":
            return _head_loads(rounds, RoundShape(dp=dp, cp=cp, micro_batch_size=mbs, seq_len=self.seq_len), window)
        return plan_loads(
            rounds, RoundShape(dp=dp, cp=cp, micro_batch_size=mbs, seq_len=self.seq_len), window, strategy
        )

    def _first_samples(self, count: int) -> list[SampleLengths]:
        """Return the first samples of the seed; a longer draw begins with those of a shorter one."""
        if count not in self._drawn:
            self._drawn[count] = self.samples.draw(self.seq_len, count, self.seed)
        return self._drawn[count]


def _busiest(pairs: Floats, group: int, num_rounds: int) -> float:
    """Return the pairs of the busiest rank of a round, on average, where the ranks of a group wait for each other.

    Groups wait for each other at the end of a step only: each has its own sum over the rounds of a step.

    Args:
        pairs: [rounds, ranks].
        group: ranks that wait in every round.
        num_rounds: rounds of a step.
    """
    rounds, ranks = pairs.shape
    of_groups = pairs.reshape(rounds, ranks // group, group).max(2)
    per_step = min(num_rounds, rounds)
    steps = [of_groups[first : first + per_step].mean(0).max() for first in range(0, rounds - per_step + 1, per_step)]
    return float(np.mean(steps))


def plan_loads(
    rounds: Sequence[Sequence[SampleLengths]], shape: RoundShape, window: int, strategy: AttentionStrategy
) -> RoundLoads:
    """Plan the attention of some rounds, as the runtime does."""
    plans = [plan_of(samples, shape, window, strategy) for samples in rounds]
    exchanges = [plan.exchange() for plan in plans] if strategy.is_planned else []
    kinds = {"keys": [x.keys for x in exchanges], "queries": [x.queries for x in exchanges]}
    none = np.zeros((len(plans), shape.num_ranks))
    busiest = {
        name: np.stack([np.maximum(x.sent(shape.num_ranks), x.received(shape.num_ranks)) for x in found]).astype(float)
        if found
        else none
        for name, found in kinds.items()
    }
    shares = {
        name: sum(x.num_rows for x in found) / (shape.num_tokens * max(1, len(found))) for name, found in kinds.items()
    }
    pairs = np.concatenate([plan.pairs for plan in plans]).astype(float)
    rows = np.concatenate([plan.stops_K - plan.firsts_K for plan in plans])
    return RoundLoads(
        pairs=np.stack([plan.pairs_of_ranks for plan in plans]).astype(float),
        kernel_rows=float((pairs * rows).sum() / pairs.sum()),
        exchanged_keys=busiest["keys"],
        exchanged_queries=busiest["queries"],
        moved_queries=shares["queries"],
        received_keys=shares["keys"],
    )


def plan_of(
    samples: Sequence[SampleLengths], shape: RoundShape, window: int, strategy: AttentionStrategy
) -> AttentionPlan:
    """Plan the attention of one round."""
    starts = [[0, *np.cumsum(lengths[:-1]).tolist()] for lengths in samples]
    placement: Placement = place(strategy.placement, shape, document_bounds(shape, starts), strategy.block)
    if strategy.hosts == "home":
        return plan_attention(placement, window=window)
    return plan_attention(
        placement, window=window, tolerance=strategy.tolerance, block=strategy.block, pool=strategy.pool
    )


def _head_loads(rounds: Sequence[Sequence[SampleLengths]], shape: RoundShape, window: int) -> RoundLoads:
    """Return the loads of Ulysses attention: each cp rank computes a part of the heads of whole samples."""
    per_dp = np.empty((len(rounds), shape.dp))
    pairs_rows = 0.0
    for j, samples in enumerate(rounds):
        for d in range(shape.dp):
            lengths = np.concatenate(
                [np.array(s) for s in samples[d * shape.micro_batch_size : (d + 1) * shape.micro_batch_size]]
            )
            pairs = pairs_before(lengths, window)
            per_dp[j, d] = pairs.sum()
            pairs_rows += float((pairs * lengths.astype(float)).sum())
    none = np.zeros((len(rounds), shape.num_ranks))
    return RoundLoads(
        pairs=np.repeat(per_dp / shape.cp, shape.cp, axis=1),
        kernel_rows=pairs_rows / float(per_dp.sum()),
        exchanged_keys=none,
        exchanged_queries=none,
        moved_queries=0.0,
        received_keys=0.0,
    )
