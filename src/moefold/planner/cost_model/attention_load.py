"""Attention work of samples that hold documents: the numbers of a micro-batch set for the cost model.

Micro-batch set j is the j-th micro-batch of all dp x cp ranks. If the experts fold over dp x cp, the ranks of an ep
group and of a cp group wait for each other in every layer. Attention therefore takes the sum over layers and
micro-batch sets of the maximum over these ranks, not the maximum of their sums.
"""

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from moefold.planner.mapping import ParallelMapping

SUM_BYTES = 4
"""Bytes of a number in sums over ranks: float32, unless numbers are wider."""


class AttentionPeers(NamedTuple):
    """Ranks whose attention is priced together."""

    cp: int
    dp: int
    mbs: int
    group: int
    """Consecutive ranks of dp x cp that wait for each other in every layer, a divisor of dp x cp."""
    num_sets: int
    """Micro-batches of a step."""
    ranks_per_node: int = 0
    """Consecutive ranks of dp x cp that the first link level connects, a node. 0: all."""


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """Attention work of one layer and micro-batch set, per token of a rank. Rows are counted in one rank's exchange."""

    keys: float
    """Visible keys for each query of the busiest rank of a waiting group, on average over the micro-batch sets."""
    mean_keys: float
    """Visible keys for each query, on average over micro-batch sets and ranks."""
    kernel_rows: float
    """Query rows of a kernel's task, on average over the visible pairs."""
    sent_keys: float = 0.0
    """Rows of keys and values that the rank with the most exchanges (sent or received), for each token that it has."""
    sent_queries: float = 0.0
    """The same for rows of queries."""
    remote_keys: float = 0.0
    """Rows of `sent_keys` that leave a node, of the rank with the most of them."""
    remote_queries: float = 0.0
    """The same for `sent_queries`."""
    exchange_ranks: int = 1
    """Consecutive ranks of dp x cp that exchange rows."""
    is_planned: bool = False
    """True if only these rows are exchanged. Otherwise all keys and values pass through all cp ranks."""

    @property
    def max_over_mean(self) -> float:
        """Straggler factor: work of the busiest rank over the mean."""
        return self.keys / self.mean_keys


def attention_peers(
    mapping: ParallelMapping,
    global_batch_size: int,
    *,
    is_coupled: bool,
    has_experts: bool,
    gpus_per_node: int = 0,
) -> AttentionPeers:
    """Return the ranks that wait for each other under a mapping.

    The ranks of an ep group (with their etp groups) are consecutive in a stage if the experts are folded. Groups of two
    sizes that overlap connect as many consecutive ranks as their least common multiple.

    Args:
        is_coupled: ep neighbours are tp*cp ranks apart, as before folding.
        gpus_per_node: GPUs that the first link level connects. 0: all.
    """
    m = mapping
    if not has_experts:
        group = m.cp
    elif is_coupled:
        group = m.cp * min(m.ep, m.dp)
    else:
        group = min(lcm(m.tp * m.cp, m.ep * m.etp) // m.tp, m.cp * m.dp)
    per_node = max(1, gpus_per_node // m.tp) if gpus_per_node else 0
    return AttentionPeers(m.cp, m.dp, m.mbs, group, m.num_micro_batches(global_batch_size), per_node)


def exchange_bytes(
    query_rows: float, key_rows: float, *, query_width: float, kv_width: float, value_bytes: int
) -> tuple[float, float]:
    """Return the bytes that are sent forward and backward.

    Forward, queries go to their hosts and outputs back, and keys and values are sent. Backward, queries, outputs and
    gradients of the outputs go to the hosts, and the gradients of the queries back. Keys and values are sent again, and
    their gradients back, in the precision of sums.

    Args:
        query_rows: rows of queries that are sent, each to one host.
        key_rows: rows of keys and values that are sent, each once to each rank that needs it.
        query_width: numbers of the query and the output of a token on one tp rank, A * (D + Dv).
        kv_width: numbers of its keys and values, G * (D + Dv).
        value_bytes: bytes of a number in the compute dtype.
    """
    keys_and_values = key_rows * kv_width
    forward = (query_rows * query_width + keys_and_values) * value_bytes
    backward = query_rows * 2 * query_width * value_bytes
    return forward, backward + keys_and_values * (value_bytes + max(value_bytes, SUM_BYTES))
