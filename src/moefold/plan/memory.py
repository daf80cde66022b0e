"""The memory of the fullest rank of a mapping, by the formulas that the runtime is held to. Torch-free.

Weights, gradients, moments and activations are those of `metrics/state_memory.py` and `metrics/activation_memory.py`,
in the order of the schedule. They are linear in a few counts (`moments.py`) and a few prices (`held_states.py`,
`kept.py`), each found once, so that a search may ask for the memory of hundreds of thousands of mappings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config
from moefold.metrics.pass_memory import pauses_again
from moefold.plan.columns import Columns, columns_of
from moefold.plan.device import GIB, Device
from moefold.plan.flop_count import layer_parameters
from moefold.plan.held_states import STATE_PARTS, HeldStates
from moefold.plan.kept import KEPT_PARTS, KeptActivations, copies_of, recipe_of
from moefold.plan.mapping import Mapping
from moefold.plan.moments import Moments, Order, heaviest_of, moments_of
from moefold.plan.moments_back import MomentsBack
from moefold.plan.shape import ModelShape
from moefold.plan.stage_split import Chunk
from moefold.plan.stages import Split, chunks_of_rank, split_of
from moefold.plan.workload import Workload

OVERHEAD_GIB = 3.0
"""CUDA context, buffers of NCCL and of the libraries of products, and what the allocator cannot fill."""
WORKING_ROWS = 4
"""Rows of the inner width that the backward pass of an expert has at once for each of its rows, beside what was kept or
computed again: the gradient of the hidden values, the hidden values, and the gradients of gate and up."""
MEMORY_PARTS = (*STATE_PARTS, *KEPT_PARTS, "workspace")
"""Of `MemoryEstimate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of the fullest rank, by part."""

    weights: float
    """Master weights: this rank's shards."""
    gathered: float
    """The weights in the compute type, as much as is there at once."""
    gradients: float
    optimizer: float
    """Moments, and those that an update brings back beyond the room that activations leave."""
    buffers: float
    """Biases and counts of the router, and the rotation."""
    activations: float
    dispatch: float
    """Rows under way to and from experts."""
    logits: float
    pipeline: float
    """Hidden states that were sent or are awaited."""
    workspace: float
    capacity: float

    @property
    def total(self) -> float:
        """All parts."""
        return float(sum(getattr(self, part) for part in MEMORY_PARTS))

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.total <= self.capacity


FindMoments = Callable[[Order, Sequence[Chunk], Sequence[Sequence[int]], Columns], Moments]


class Memory:
    """The memory of the mappings of one model.

    Args:
        shape: the model.
        workload: the batch and the routing.
        device: whose memory it is.
        cfg: the recipe; None: one with nothing but the model and the batch.
        split: which stage holds what.
    """

    def __init__(
        self,
        shape: ModelShape,
        workload: Workload,
        device: Device,
        cfg: Config | None = None,
        split: Split | None = None,
    ) -> None:
        cfg = cfg or recipe_of(shape, workload)
        self.shape, self.workload, self.device = shape, workload, device
        self.split = split or split_of(shape, workload.seq_len)
        self.columns = columns_of(shape)
        self.states = HeldStates(shape, workload, cfg, self.columns)
        self.kept = KeptActivations(shape, workload, cfg, self.columns, on_cpu=device.name == "cpu")
        self._moments: dict[Order, Moments] = {}
        self._heaviest: dict[Order, Moments] = {}
        self.back = MomentsBack(self.states)
        self._overhead = 0.0 if device.name == "cpu" else OVERHEAD_GIB * GIB
        self._backward: dict[tuple[int, ...], float] = {}

    def workspace(self, m: Mapping) -> float:
        """Bytes of `OVERHEAD_GIB`, and of what the backward pass of one layer makes and forgets."""
        key = (m.tp, m.cp, m.mbs, m.ep, m.etp)
        if key not in self._backward:
            self._backward[key] = self._backward_bytes(m)
        return self._overhead + (self._backward[key] if m.world_size > 1 else 0.0)

    def _backward_bytes(self, m: Mapping) -> float:
        """Bytes of the fullest module of FSDP2: its whole gradients, and what makes or what reduces them.

        Experts make them with `WORKING_ROWS` of their inner width for each row (`SortedExperts.backward`; on a CPU
        these are made in place). FSDP2 copies them together into one buffer of the reduced type (`foreach_reduce`),
        whatever is sharded. Megatron-Core adds and reduces gradients in place, and its rows that were fitted had room.
        """
        w, found = self.workload, 0.0
        if w.is_megatron:
            return 0.0
        tokens = m.mbs * w.seq_len / (m.cp * m.tp)
        working = 0 if self.device.name == "cpu" else WORKING_ROWS * w.value_bytes
        for kind, layer in enumerate(self.shape.kinds):
            dense, experts = layer_parameters(self.shape, kind)
            copies = copies_of(layer.feed_forward, w)
            rows = tokens * copies * layer.feed_forward.width if layer.feed_forward else 0.0
            for size, work in ((dense / m.tp, 0.0), (experts / (m.ep * m.etp), rows * working)):
                found = max(found, size * w.value_bytes + max(size * max(w.reduce_bytes, w.value_bytes), work))
        return found

    def estimate(self, m: Mapping) -> MemoryEstimate:
        """All of it, by part."""
        moments = self.moments(m)
        states = self.states.prices(m, sums=self._micro_batches(m) > 1)
        kept = self.kept.prices(m)
        # At the update activations are gone, and moments that live elsewhere come back.
        active, back = moments.active @ kept.sum(axis=0), self.back.at(m, moments.held)
        at = int(np.argmax(moments.held @ states.sum(axis=0) + np.maximum(active, back)))
        parts = dict(zip(STATE_PARTS, (states @ moments.held[at]).tolist(), strict=True))
        parts |= dict(zip(KEPT_PARTS, (kept @ moments.active[at]).tolist(), strict=True))
        parts["optimizer"] += max(0.0, float(back[at] - active[at]))
        return MemoryEstimate(**parts, workspace=self.workspace(m), capacity=self.device.memory_bytes)

    def room(self, m: Mapping, kept: NDArray[np.float64], pauses: NDArray[np.intp]) -> "Room":
        """What the savers of a pipeline are asked about.

        Args:
            m: the mapping; what is sharded, where the moments live, and what saves activations does not count.
            kept: `KeptActivations.totals` of savers.
            pauses: `Savers.pauses` of them.
        """
        moments = self._all_moments(m)
        return Room(self, moments, kept, moments.occurs[:, pauses] > 0 if m.overlap else None)

    def resting_bytes(self, m: Mapping) -> NDArray[np.float64]:
        """Bytes of each state column under a mapping."""
        return self.states.totals(m, sums=self._micro_batches(m) > 1)

    def moments(self, m: Mapping) -> Moments:
        """What may be in memory at once."""
        moments = self._all_moments(m)
        if not m.overlap:
            return moments
        at = moments.occurs[:, int(pauses_again(m.recompute))] > 0
        return Moments(moments.held[at], moments.active[at], moments.occurs[at], moments.messages[at])

    def _all_moments(self, m: Mapping) -> Moments:
        """The same whatever runs again."""
        return self._found(self._order(m), self._moments, moments_of)

    def heaviest(self, m: Mapping) -> Moments:
        """Two of those moments, or some that others outdo: found at a fraction of the cost."""
        return self._found(self._order(m), self._heaviest, heaviest_of)

    def _found(self, order: Order, known: dict[Order, Moments], find: FindMoments) -> Moments:
        """The moments of an order, found once for all that differ in the length of the steady phase alone."""
        if order not in known:
            shortest = order.shortest
            if shortest not in known:
                known[shortest] = find(shortest, *self._stages(order), self.columns)
            further = order.micro_batches - shortest.micro_batches
            known[order] = known[shortest].with_further(further, self.columns) if further else known[shortest]
        return known[order]

    def _order(self, m: Mapping) -> Order:
        schedule = m.schedule if m.pp > 1 else "1f1b"
        return Order(schedule, m.pp, m.vpp, self._micro_batches(m), m.overlap, not self.workload.is_megatron)

    def _stages(self, order: Order) -> tuple[tuple[Chunk, ...], tuple[tuple[int, ...], ...]]:
        chunks = self.split(order.pp * order.vpp)
        return chunks, chunks_of_rank(chunks, order.schedule, order.pp, order.vpp)

    def _micro_batches(self, m: Mapping) -> int:
        return m.num_micro_batches(self.workload.global_batch_size)


class Room:
    """The memory of one pipeline, before it is said what is sharded and what saves activations.

    Args:
        memory: whose mapping it is.
        moments: of the pipeline.
        kept: bytes of each column of activations with each saver, [savers, columns].
        occurs: which moments there are with which savers, [moments, savers]; None: all with all.
    """

    def __init__(
        self,
        memory: Memory,
        moments: Moments,
        kept: NDArray[np.float64],
        occurs: NDArray[np.bool_] | None = None,
    ) -> None:
        self._memory, self._moments, self._kept, self._occurs = memory, moments, kept, occurs

    def activations(self, which: NDArray[np.intp] | slice = slice(None)) -> NDArray[np.float64]:
        """Bytes of activations at each moment with some of the savers, [moments, savers]; -inf where there is none."""
        found: NDArray[np.float64] = self._moments.active @ self._kept[which].T
        if self._occurs is not None:
            found[~self._occurs[:, which]] = -np.inf
        return found

    def totals(self, m: Mapping, activations: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of the fullest rank, [savers].

        Args:
            m: the mapping, whatever saves its activations.
            activations: those of some savers, [moments, savers].
        """
        memory, held = self._memory, self._moments.held
        states = held @ memory.resting_bytes(m) + memory.workspace(m)
        least: float = (states + memory.back.at(m, held)).max()
        found: NDArray[np.float64] = (states[:, None] + activations).max(axis=0).clip(min=least)
        return found
