"""Whether a mapping fits into memory, for a search that asks it a million times. Torch-free.

The answers are those of `memory.memory_bytes`, where all pipeline ranks hold as many layers: what a layer keeps for a
token is asked once for each (tp, etp) and set of parts that are made again, what a rank holds beside activations once
for each fold and zero, and the rest is one comparison.
"""

from collections.abc import Callable
from dataclasses import replace

from moefold.plan.device import Device
from moefold.plan.flop_count import layer_parameters
from moefold.plan.mapping import Mapping
from moefold.plan.memory import MemoryEstimate, held_by_first_rank, in_flight, layer_bytes, memory_bytes
from moefold.plan.shape import BYTES, ModelShape
from moefold.plan.stage_split import split_stages
from moefold.plan.workload import Workload

Parts = tuple[str, ...]


class Fit:
    """The memory of the mappings of one search.

    Args:
        shape: the model.
        workload: the batch and the routing, whose imbalance the dispatch buffers follow.
        device: whose memory it is.
        recomputes: the sets of parts that may be made again.
    """

    def __init__(self, shape: ModelShape, workload: Workload, device: Device, recomputes: tuple[Parts, ...]) -> None:
        self.shape, self.workload, self.device = shape, workload, device
        self._recomputes = recomputes
        self._kept: dict[tuple[int, ...], tuple[dict[Parts, float], float]] = {}
        self._fixed: dict[tuple[int, ...], MemoryEstimate] = {}
        self._layers: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        self._flights: dict[tuple[object, ...], float] = {}

    def estimate(self, mapping: Mapping) -> MemoryEstimate:
        """All of it, by part; as if the first pipeline rank held as many layers of each kind as any rank does."""
        m, first = mapping, memory_bytes(self.shape, mapping, self.workload, self.device)
        beyond = [most - own for most, own in zip(*self._layers_of(m), strict=True)]
        if not any(beyond):
            return first
        sizes = [layer_parameters(self.shape, kind) for kind in range(len(beyond))]
        dense = sum(count * size[0] for count, size in zip(beyond, sizes, strict=True)) / m.tp
        experts = sum(count * size[1] for count, size in zip(beyond, sizes, strict=True)) / (m.ep * m.etp)
        whole, sharded = dense + experts, dense / (m.dp * m.cp) + experts / m.edp
        kept = sum(count * self._layer(kind, m, m.recompute) for kind, count in enumerate(beyond))
        tokens = m.mbs * self.workload.seq_len / m.cp
        return replace(
            first,
            weights=first.weights + BYTES * (sharded if m.zero >= 3 else whole),
            gradients=first.gradients + self.workload.gradient_bytes * (sharded if m.zero >= 2 else whole),
            optimizer=first.optimizer + self.workload.optimizer_bytes * (sharded if m.zero >= 1 else whole),
            activations=first.activations + self._in_flight(m) * tokens * kept,
        )

    def _layers_of(self, m: Mapping) -> tuple[list[int], list[int]]:
        """Layers of each kind that the fullest rank holds of it, and that the first one holds."""
        key = (m.pp, m.vpp)
        if key not in self._layers:
            chunks = split_stages(self.shape, m.pp * m.vpp, self.workload.seq_len)
            ranks = [[chunks[stage] for stage in stages] for stages in _stages_of_ranks(m)]
            counts = [[sum(column) for column in zip(*(c.counts for c in held), strict=True)] for held in ranks]
            first = held_by_first_rank(self.shape, m, self.workload)[2]
            self._layers[key] = ([max(*column, 0) for column in zip(first, *counts, strict=True)], first)
        return self._layers[key]

    def may_fit(self, mapping: Mapping, zero: int) -> bool:
        """Whether it fits with the set of parts made again that needs least; dispatchers need alike."""
        return self._kept_per_token(mapping)[1] <= self._allowance(mapping, zero)

    def fitting(self, mapping: Mapping, zero: int) -> Callable[[Parts], bool]:
        """Whether it fits with a set of parts made again."""
        kept, allowance = self._kept_per_token(mapping)[0], self._allowance(mapping, zero)
        return lambda parts: kept[parts] <= allowance

    def least(self, mapping: Mapping, zero: int) -> tuple[float, Parts]:
        """Bytes that are lacking for a token, negative where it fits, with the leanest set of parts made again."""
        kept, smallest = self._kept_per_token(mapping)
        parts = next(parts for parts, size in kept.items() if size == smallest)
        return (smallest - self._allowance(mapping, zero)) * self._in_flight(mapping), parts

    def _allowance(self, m: Mapping, zero: int) -> float:
        """Bytes that are left for each token of a micro-batch in flight."""
        fixed = self._state(m, zero)
        tokens = m.mbs * self.workload.seq_len / m.cp
        rest = fixed.capacity - fixed.weights - fixed.gradients - fixed.optimizer - fixed.workspace
        per_token = (fixed.dispatch + fixed.logits) / (self.workload.seq_len / m.cp)
        return (rest / tokens - per_token) / self._in_flight(m)

    def _state(self, m: Mapping, zero: int) -> MemoryEstimate:
        """What does not depend on the batch, and the dispatch buffers and logits of one sample."""
        key = (m.tp, m.cp, m.dp, m.pp, m.vpp, m.ep, m.etp, zero)
        if key not in self._fixed:
            self._fixed[key] = self.estimate(replace(m, mbs=1, zero=zero, recompute=()))
        return self._fixed[key]

    def _in_flight(self, m: Mapping) -> float:
        key = (m.dp * m.mbs, m.pp, m.vpp, m.schedule)
        if key not in self._flights:
            self._flights[key] = in_flight(m, self.workload)
        return self._flights[key]

    def _kept_per_token(self, m: Mapping) -> tuple[dict[Parts, float], float]:
        """Bytes that the layers of the fullest rank keep for a token, by what is made again, and the least of them."""
        key = (m.tp, m.ep, m.etp, m.pp, m.vpp)
        if key not in self._kept:
            counts = self._layers_of(m)[0]
            kept = {
                parts: sum(count * self._layer(kind, m, parts) for kind, count in enumerate(counts))
                for parts in self._recomputes
            }
            self._kept[key] = (kept, min(kept.values()))
        return self._kept[key]

    def _layer(self, kind: int, m: Mapping, parts: Parts) -> float:
        return layer_bytes(self.shape, kind, replace(m, recompute=parts), self.workload)


def _stages_of_ranks(m: Mapping) -> list[range]:
    """The chunks of each pipeline rank, in a loop; a V holds no more of them."""
    return [range(rank, m.pp * m.vpp, m.pp) for rank in range(m.pp)]
