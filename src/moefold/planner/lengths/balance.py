"""Balance of attention over the ranks, for drawn documents: the runtime's own plan of every micro-batch set.

Micro-batch sets are drawn once, with a fixed seed, and all mappings and placements are priced with the same documents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import default_part
from moefold.config.groups.context import BALANCED, ContextPart, MicroBatchSetPlan
from moefold.planner.cost_model.attention_load import AttentionLoad, AttentionPeers
from moefold.planner.lengths.samples import DocumentSamples, SampleLengths, effective_length
from moefold.topology.attention_plan import Transfers, pairs_before, plan_attention
from moefold.topology.token_placement import Integers, MicroBatchSetShape, Placement, place_tokens

MAX_SETS = 32
"""Maximum number of planned micro-batch sets of a mapping."""
MIN_SETS = 4
RANKS_OF_ALL_SETS = 1024
"""Ranks of all planned micro-batch sets together, between the limits of their number: larger micro-batch sets vary
less."""

SAMPLES_OF_EFFECTIVE_LENGTH = 2048
"""Samples for the effective length. It needs many, because few long documents decide it."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MicroBatchSetLoads:
    """Attention of some micro-batch sets, by rank."""

    pairs: Floats
    """Visible (query, key) pairs that each rank computes, [sets, ranks]."""
    kernel_rows: float
    """Query rows of a task, on average over the pairs."""
    exchanged: Mapping[str, Floats] = field(default_factory=dict)
    """Rows that each rank sends or receives, the larger number, [sets, ranks]: keys and values ("keys"), queries
    ("queries"), and the part of both that leaves a node ("remote_keys", "remote_queries"). Empty unless attention is
    planned."""
    moved_queries: float = 0.0
    """Rows of queries that are sent to another rank, as a share of all."""
    received_keys: float = 0.0
    """Rows of keys and values that are sent to another rank, for each token."""

    @property
    def max_over_mean(self) -> float:
        """Pairs of the busiest rank over the mean of all ranks, on average over the micro-batch sets."""
        return float((self.pairs.max(1) / self.pairs.mean(1)).mean())


@dataclass(frozen=True)
class DocumentLoads:
    """Attention work of drawn documents under a strategy.

    Args:
        only_set: index of the one micro-batch set to price, the first again after the last. None: the mean over the
            micro-batch sets.
    """

    samples: DocumentSamples
    seq_len: int
    strategy: ContextPart = field(default_factory=lambda: default_part(ContextPart))
    seed: int = 0
    only_set: int | None = None
    is_lower_bound: bool = False
    """True if `load` returns a lower bound: equal work on all ranks, whole samples in a kernel, no exchange."""
    known_sets: dict[Any, MicroBatchSetLoads] = field(default_factory=dict, repr=False, compare=False)
    """Micro-batch sets planned so far, by shape, window, ranks of a node and strategy."""
    _drawn: dict[int, list[SampleLengths]] = field(default_factory=dict, repr=False, compare=False)
    _pairs_of_samples: dict[tuple[int, int], Floats] = field(default_factory=dict, repr=False, compare=False)
    _balanced: dict[MicroBatchSetShape, Placement] = field(default_factory=dict, repr=False, compare=False)

    def load(self, peers: AttentionPeers, window: int) -> AttentionLoad:
        """Return the work of layers with a sliding window of `window` keys. 0: no limit."""
        if self.is_lower_bound:
            return self._even_load(peers, window)
        found = self.sets(peers.cp, peers.dp, peers.mbs, window, peers.ranks_per_node)
        chosen = slice(None) if self.only_set is None else [self.only_set % len(found.pairs)]
        pairs = found.pairs[chosen]
        tokens = peers.mbs * self.seq_len / peers.cp
        planned = self.strategy.is_planned
        rows = {name: float(x[chosen].max(1).mean()) / tokens for name, x in found.exchanged.items()}
        # A step of ring attention computes the two chunks of a rank at once. Planned attention joins only chunks in the
        # middle of a sample.
        num_joined = 2 if peers.cp > 1 else 1
        is_chunked = not planned and not self.strategy.shards_heads
        step_rows = min(num_joined * found.kernel_rows, self.seq_len / peers.cp)
        return AttentionLoad(
            keys=_busiest(pairs, self._waiting(peers), peers.num_sets) / tokens,
            mean_keys=float(pairs.mean()) / tokens,
            kernel_rows=step_rows if is_chunked else found.kernel_rows,
            sent_keys=rows.get("keys", 0.0),
            sent_queries=rows.get("queries", 0.0),
            remote_keys=rows.get("remote_keys", 0.0),
            remote_queries=rows.get("remote_queries", 0.0),
            exchange_ranks=self._exchange_ranks(peers),
            is_planned=planned,
        )

    def mean_load(self, window: int) -> AttentionLoad:
        """Return the mean work: equal on all ranks, whole samples in a kernel."""
        pairs = self._loads_of(MicroBatchSetShape(seq_len=self.seq_len), window, 0, default_part(ContextPart)).pairs
        keys = float(pairs.mean()) / self.seq_len
        return AttentionLoad(keys, keys, float(self.seq_len), is_planned=self.strategy.is_planned)

    @property
    def effective_length(self) -> float:
        """Effective length of the documents in tokens, see `effective_length`."""
        return effective_length(self._first_samples(SAMPLES_OF_EFFECTIVE_LENGTH))

    def sets(self, cp: int, dp: int, mbs: int, window: int = 0, ranks_per_node: int = 0) -> MicroBatchSetLoads:
        """Plan the micro-batch sets of a mapping with some consecutive ranks of dp x cp in a node (0: all), cached."""
        shape = MicroBatchSetShape(dp=dp, cp=cp, micro_batch_size=mbs, seq_len=self.seq_len)
        in_node = ranks_per_node if self._depends_on_nodes(cp, dp, ranks_per_node) else 0
        return self._loads_of(shape, window, in_node, self.strategy)

    def _exchange_ranks(self, peers: AttentionPeers) -> int:
        """Return the consecutive ranks that exchange rows."""
        return self.strategy.plan.exchange_ranks(peers.cp, peers.dp) if self.strategy.is_planned else 1

    def _waiting(self, peers: AttentionPeers) -> int:
        """Return the consecutive ranks that wait for each other in a layer, those that exchange rows included."""
        return min(lcm(peers.group, self._exchange_ranks(peers)), peers.cp * peers.dp)

    def _depends_on_nodes(self, cp: int, dp: int, ranks_per_node: int) -> bool:
        """Return whether the nodes of the ranks change the plan of a micro-batch set or the rows that leave a node."""
        if not self.strategy.is_planned or ranks_per_node >= cp * dp:
            return False
        return self.strategy.plan.shares_work or ranks_per_node % cp != 0

    def _even_load(self, peers: AttentionPeers, window: int) -> AttentionLoad:
        """Return a lower bound of `load`: the busiest rank has at least the mean of the sets that `_busiest` uses."""
        num_samples = peers.dp * peers.mbs
        count = num_planned_sets(peers.cp * peers.dp)
        key = (count * num_samples, window)
        if key not in self._pairs_of_samples:
            samples = self._first_samples(count * num_samples)
            self._pairs_of_samples[key] = np.array([pairs_before(np.array(x), window).sum() for x in samples], float)
        pairs = self._pairs_of_samples[key].reshape(count, num_samples).sum(1)
        if self.only_set is not None:
            pairs = pairs[[self.only_set % count]]
        per_step = min(peers.num_sets, len(pairs))
        used = pairs[: len(pairs) // per_step * per_step]
        tokens = num_samples * self.seq_len
        return AttentionLoad(
            keys=float(used.mean()) / tokens,
            mean_keys=float(pairs.mean()) / tokens,
            kernel_rows=float(self.seq_len),
            is_planned=self.strategy.is_planned,
        )

    def _loads_of(
        self, shape: MicroBatchSetShape, window: int, ranks_per_node: int, strategy: ContextPart
    ) -> MicroBatchSetLoads:
        shape, strategy = _merged(shape, strategy)
        key = shape, window, ranks_per_node, strategy
        if key not in self.known_sets:
            self.known_sets[key] = (
                _head_loads(self._sets(shape), shape, window)
                if strategy.shards_heads
                else plan_loads(self._placement(shape, strategy.plan), shape, window, strategy, ranks_per_node)
            )
        return self.known_sets[key]

    def _sets(self, shape: MicroBatchSetShape) -> list[list[SampleLengths]]:
        """Return the samples of the micro-batch sets that are planned for a shape."""
        size = shape.num_samples
        samples = self._first_samples(num_planned_sets(shape.num_ranks) * size)
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    def _placement(self, shape: MicroBatchSetShape, plan: MicroBatchSetPlan) -> Placement:
        """Return the placement of the sets of a shape. "balanced", which takes longest, is kept."""
        if plan.placement != BALANCED:
            return place_sets(self._sets(shape), shape, plan)
        if shape not in self._balanced:
            self._balanced[shape] = place_sets(self._sets(shape), shape, plan)
        return self._balanced[shape]

    def _first_samples(self, count: int) -> list[SampleLengths]:
        """Return the first samples of the seed. A longer draw begins with the samples of a shorter one."""
        if count not in self._drawn:
            self._drawn[count] = self.samples.draw(self.seq_len, count, self.seed)
        return self._drawn[count]


def num_planned_sets(num_ranks: int) -> int:
    """Return the number of micro-batch sets that are planned for a number of ranks."""
    return min(MAX_SETS, max(MIN_SETS, RANKS_OF_ALL_SETS // num_ranks))


def _busiest(pairs: Floats, group: int, num_sets: int) -> float:
    """Return the mean over micro-batch sets of the pairs of the busiest rank.

    The ranks of a group wait for each other in every set. Groups wait for each other at the end of a step only: each
    has its own sum over the micro-batch sets of a step.

    Args:
        pairs: [sets, ranks].
        group: ranks that wait in every micro-batch set.
        num_sets: micro-batch sets of a step.
    """
    sets, ranks = pairs.shape
    of_groups = pairs.reshape(sets, ranks // group, group).max(2)
    per_step = min(num_sets, sets)
    steps = [of_groups[first : first + per_step].mean(0).max() for first in range(0, sets - per_step + 1, per_step)]
    return float(np.mean(steps))


def _merged(shape: MicroBatchSetShape, strategy: ContextPart) -> tuple[MicroBatchSetShape, ContextPart]:
    """Return the shape and the strategy that stand for all those with the same plan."""
    if strategy.plan.placement == BALANCED:
        # It reads only the numbers of ranks and of samples.
        dp = gcd(shape.num_ranks, shape.num_samples)
        sizes = {"dp": dp, "cp": shape.num_ranks // dp, "micro_batch_size": shape.num_samples // dp}
        return replace(shape, **sizes), strategy
    if strategy.plan.moves_tokens and shape.cp == 1:
        # Whole samples stay on their ranks.
        samples: dict[str, Any] = {"placement": "samples"}
        return shape, replace(strategy, **samples)
    return shape, strategy


def plan_loads(
    placement: Placement, shape: MicroBatchSetShape, window: int, strategy: ContextPart, ranks_per_node: int = 0
) -> MicroBatchSetLoads:
    """Plan the attention of micro-batch sets of a shape, placed by `place_sets`, as the runtime does."""
    ranks = shape.num_ranks
    num_sets = placement.shape.num_ranks // ranks
    nodes = np.tile(np.arange(ranks) // (ranks_per_node or ranks), num_sets)
    own = strategy.plan
    plan = plan_attention(
        placement,
        window=window,
        tolerance=own.tolerance if own.balances_compute_ranks else None,
        block=own.block,
        pool=own.pool or ranks,
        nodes=nodes.tolist(),
    )
    exchanged: dict[str, Transfers] = {}
    if strategy.is_planned:
        exchange = plan.exchange()
        exchanged = {"keys": exchange.keys, "queries": exchange.queries}
        exchanged |= {f"remote_{name}": _between_nodes(x, nodes) for name, x in exchanged.items()}
    pairs = plan.pairs.astype(float)
    tokens = placement.shape.num_tokens
    num_rows = {name: x.num_rows / tokens for name, x in exchanged.items()}
    most_rows = {
        name: np.maximum(x.sent(num_sets * ranks), x.received(num_sets * ranks)) for name, x in exchanged.items()
    }
    return MicroBatchSetLoads(
        pairs=plan.pairs_of_ranks.reshape(-1, ranks).astype(float),
        kernel_rows=float((pairs * (plan.stops_K - plan.firsts_K)).sum() / pairs.sum()),
        exchanged={name: rows.reshape(-1, ranks).astype(float) for name, rows in most_rows.items()},
        moved_queries=num_rows.get("queries", 0.0),
        received_keys=num_rows.get("keys", 0.0),
    )


def _between_nodes(transfers: Transfers, nodes: Integers) -> Transfers:
    """Return the transfers between ranks of different nodes."""
    leaves = nodes[transfers.sources_X] != nodes[transfers.destinations_X]
    return Transfers(*(column[leaves] for column in transfers))


def place_sets(
    sets: Sequence[Sequence[SampleLengths]], shape: MicroBatchSetShape, plan: MicroBatchSetPlan
) -> Placement:
    """Place the tokens of micro-batch sets side by side: each set has its own ranks and tokens."""
    joint = replace(shape, dp=shape.dp * len(sets))
    lengths = np.fromiter(chain.from_iterable(chain.from_iterable(sets)), np.int64)
    bounds_N = np.concatenate(([0], np.cumsum(lengths)))
    assert bounds_N[-1] == joint.num_tokens, (bounds_N[-1], joint)
    if plan.placement != BALANCED:
        # No token leaves the dp rank of its sample, so that sets do not mix.
        return place_tokens(plan.placement, joint, bounds_N, plan.block)
    cuts = np.searchsorted(bounds_N, np.arange(len(sets) + 1) * shape.num_tokens)
    placed = [
        place_tokens(plan.placement, shape, bounds_N[first : stop + 1] - bounds_N[first], plan.block)
        for first, stop in pairwise(cuts.tolist())
    ]
    return Placement(
        joint,
        bounds_N,
        ranks_M=np.concatenate([one.ranks_M + i * shape.num_ranks for i, one in enumerate(placed)]),
        firsts_M=np.concatenate([one.firsts_M + i * shape.num_tokens for i, one in enumerate(placed)]),
        lengths_M=np.concatenate([one.lengths_M for one in placed]),
    )


def _head_loads(sets: Sequence[Sequence[SampleLengths]], shape: MicroBatchSetShape, window: int) -> MicroBatchSetLoads:
    """Return the loads of Ulysses attention: each cp rank computes a part of the heads of whole samples."""
    found = []
    for samples in sets:
        for first in range(0, shape.num_samples, shape.micro_batch_size):
            own = samples[first : first + shape.micro_batch_size]
            lengths = np.fromiter(chain.from_iterable(own), np.int64)
            pairs = pairs_before(lengths, window)
            found.append((float(pairs.sum()), float((pairs * lengths.astype(float)).sum())))
    per_dp, pairs_rows = np.array(found).T
    return MicroBatchSetLoads(
        pairs=np.repeat(per_dp.reshape(len(sets), shape.dp) / shape.cp, shape.cp, axis=1),
        kernel_rows=float(sum(pairs_rows) / per_dp.sum()),
    )
