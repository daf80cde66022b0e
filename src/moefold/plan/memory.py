"""The memory of the fullest rank of a mapping, by the formulas that the runtime is held to. Torch-free.

Weights, gradients, moments and activations are those of `metrics/state_memory.py` and `metrics/activation_memory.py`,
in the order of the schedule. They are linear in a few counts (`moments.py`) and a few prices (`held_states.py`,
`kept.py`), each found once, so that a search may ask for the memory of hundreds of thousands of mappings.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config
from moefold.plan.device import GIB, Device
from moefold.plan.held_states import STATE_PARTS, HeldStates
from moefold.plan.kept import KEPT_PARTS, KeptActivations, Saver, recipe_of
from moefold.plan.mapping import Mapping
from moefold.plan.moments import Columns, Moments, Order, moments_of
from moefold.plan.shape import ModelShape
from moefold.plan.stages import Split, chunks_of_rank, split_of
from moefold.plan.workload import Workload

OVERHEAD_GIB = 3.0
"""CUDA context, buffers of NCCL and of the libraries of products, and what the allocator cannot fill."""
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
        self.columns = Columns(len(shape.kinds))
        self.states = HeldStates(shape, workload, cfg, self.columns)
        self.kept = KeptActivations(shape, workload, cfg, self.columns, on_cpu=device.name == "cpu")
        self._moments: dict[Order, Moments] = {}
        self._workspace = 0.0 if device.name == "cpu" else OVERHEAD_GIB * GIB

    def estimate(self, m: Mapping) -> MemoryEstimate:
        """All of it, by part."""
        moments = self.moments(m)
        states = self.states.prices(m, sums=self._micro_batches(m) > 1)
        kept = self.kept.prices(m)
        totals = moments.held @ states.sum(axis=0) + moments.active @ kept.sum(axis=0)
        at = int(np.argmax(totals))
        parts = dict(zip(STATE_PARTS, (states @ moments.held[at]).tolist(), strict=True))
        parts |= dict(zip(KEPT_PARTS, (kept @ moments.active[at]).tolist(), strict=True))
        return MemoryEstimate(**parts, workspace=self._workspace, capacity=self.device.memory_bytes)

    def states_fit(self, m: Mapping) -> bool:
        """Whether what rests between two steps fits."""
        states = self.moments(m).held @ self.states.prices(m, sums=self._micro_batches(m) > 1).sum(axis=0)
        return bool(states.max() + self._workspace <= self.device.memory_bytes)

    def room(self, m: Mapping) -> "Room":
        """What the savers of a mapping are asked about."""
        moments = self.moments(m)
        states = moments.held @ self.states.prices(m, sums=self._micro_batches(m) > 1).sum(axis=0)
        return Room(m, moments.active, states + self._workspace, self)

    def moments(self, m: Mapping) -> Moments:
        """What may be in memory at once."""
        order = Order(
            m.schedule if m.pp > 1 else "1f1b",
            m.pp,
            m.vpp,
            self._micro_batches(m),
            m.overlap,
            not self.workload.is_megatron,
        )
        if order not in self._moments:
            chunks = self.split(m.pp * m.vpp)
            placed = chunks_of_rank(chunks, order.schedule, m.pp, m.vpp)
            self._moments[order] = moments_of(order, chunks, placed, self.columns)
        return self._moments[order]

    def _micro_batches(self, m: Mapping) -> int:
        return m.num_micro_batches(self.workload.global_batch_size)


class Room:
    """The memory of one mapping, before it is said what saves activations."""

    def __init__(self, m: Mapping, active: NDArray[np.float64], resting: NDArray[np.float64], memory: Memory) -> None:
        self._m, self._active, self._resting, self._memory = m, active, resting, memory

    def totals(self, which: NDArray[np.intp], savers: tuple[Saver, ...]) -> NDArray[np.float64]:
        """Bytes of the fullest rank with some of the savers of a list."""
        kept = self._memory.kept.totals(self._m, savers)[which]
        found: NDArray[np.float64] = (self._resting[:, None] + self._active @ kept.T).max(axis=0)
        return found

    def fitting(self, which: NDArray[np.intp], savers: tuple[Saver, ...]) -> NDArray[np.bool_]:
        """Whether it fits with some of the savers of a list."""
        fits: NDArray[np.bool_] = self.totals(which, savers) <= self._memory.device.memory_bytes
        return fits
