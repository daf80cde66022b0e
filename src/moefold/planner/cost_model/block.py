"""Time of one block of a layer, a token mixer or a feed-forward network: items, sums, and what all blocks have."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.planner.cost_model.collective import RankGroup, all_gather_s, seconds_of_groups
from moefold.planner.cost_model.gemm import GemmCost
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping


class Launches(NamedTuple):
    """Kernels that the host launches for a part of a layer."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, other: "Launches", times: float = 1) -> "Launches":
        """Return the sum with a multiple of the launches of another part."""
        return Launches(self.forward + times * other.forward, self.backward + times * other.backward)


KERNEL_COUNTS = {
    "mixer": Launches(16, 26),
    "dense": Launches(8, 14),
    "moe": Launches(44, 66),
    "shared_experts": Launches(6, 10),
}
"""Kernels of a part of a Megatron-like layer, forward and backward: norm, cast, GEMM and element-wise passes.
Source: counts of a profile (arXiv:2603.07685 sec. on CUDA graphs)."""

TRACED_KERNEL_COUNTS = KERNEL_COUNTS | {"mixer": Launches(13, 20), "moe": Launches(36, 55)}
"""Kernels of a part of moefold's layer: grouped GEMMs and Triton kernels compute all experts at once. Source:
tests/gpu_static/traces.json, 91 of an MoE layer with all-to-all on 8 ranks, 124 with attention."""

BACKWARD_PASSES = 1.6
"""Memory traffic of norms and residuals in the backward pass over their traffic in the forward pass. Not fitted."""


class CostItem(NamedTuple):
    """One timed operation of a layer."""

    part: str
    seconds: Any
    """A number, or an array of many mappings."""

    @property
    def is_comm(self) -> bool:
        """True for a collective, whose part is named after the axis of its ranks."""
        return self.part.endswith("_comm")


class DirectionCost(NamedTuple):
    """Seconds of one direction through a layer or one of its blocks, summed by kind."""

    compute_s: Any
    tp_s: Any
    """Tensor-parallel collectives."""
    all_to_all_s: Any
    """Expert all-to-all."""

    def __add__(self, other: "DirectionCost") -> "DirectionCost":  # type: ignore[override]
        # Unrolled for speed: a search adds up a hundred thousand of them.
        compute_s, tp_s, all_to_all_s = other
        return DirectionCost(self.compute_s + compute_s, self.tp_s + tp_s, self.all_to_all_s + all_to_all_s)


@dataclass(frozen=True)
class BlockTime:
    """One block of a layer (mixer or feed-forward), in the order of execution. Seconds are numbers, or arrays."""

    forward: tuple[CostItem, ...] = ()
    backward: tuple[CostItem, ...] = ()
    wgrad_s: Any = 0.0
    """Part of the backward pass: weight gradients. No other rank waits for them."""
    kernels: Launches = Launches()
    host_syncs: float = 0.0
    """Number of forward device-to-host syncs. The host launches nothing ahead during one."""
    recompute: tuple[tuple[str, Any], ...] = ()
    """Seconds that recomputing a part adds to the backward pass. Additive over parts that do not contain each other.
    `moe` contains expert_activation and shared_experts, `layer` everything."""

    @cached_property
    def forward_cost(self) -> DirectionCost:
        """Sums of `forward`."""
        return _sum_direction(self.forward)

    @cached_property
    def backward_cost(self) -> DirectionCost:
        """Sums of `backward`."""
        return _sum_direction(self.backward)

    @property
    def sums(self) -> NDArray[np.float64]:
        """The sums of both directions, the kernels, the syncs and the weight gradients, [10] or [10, mappings]."""
        values = (*self.forward_cost, *self.backward_cost, *self.kernels, self.host_syncs, self.wgrad_s)
        return np.array(np.broadcast_arrays(*values), dtype=float)

    def at(self, place: int) -> "BlockTime":
        """Return the block of one of many mappings."""

        def number(value: Any) -> Any:
            return float(value[place]) if isinstance(value, np.ndarray) else value

        return BlockTime(
            tuple(CostItem(part, number(seconds)) for part, seconds in self.forward),
            tuple(CostItem(part, number(seconds)) for part, seconds in self.backward),
            number(self.wgrad_s),
            self.kernels,
            self.host_syncs,
            tuple((part, number(seconds)) for part, seconds in self.recompute),
        )


def block_of_sums(rows: NDArray[np.float64]) -> BlockTime:
    """Return many blocks as one, from `BlockTime.sums` of each, [10, mappings]. It cannot be recomputed."""
    forward, backward = (
        tuple(map(CostItem, ("attention", "tp_comm", "ep_comm"), sums)) for sums in (rows[:3], rows[3:6])
    )
    return BlockTime(forward, backward, kernels=Launches(rows[6], rows[7]), host_syncs=rows[8])


def _sum_direction(items: tuple[CostItem, ...]) -> DirectionCost:
    all_to_all = sum(work.seconds for work in items if work.part == "ep_comm")
    tensor = sum(work.seconds for work in items if work.part == "tp_comm")
    return DirectionCost(
        sum(work.seconds for work in items if work.part not in ("ep_comm", "tp_comm")), tensor, all_to_all
    )


def micro_batch_tokens(workload: TrainingWorkload, mapping: ParallelMapping) -> Any:
    """Return the tokens of a micro-batch on the ranks of one tp group."""
    return mapping.mbs * workload.seq_len / mapping.cp


def tp_gather(gemm: GemmCost, hidden_size: int, mapping: ParallelMapping) -> CostItem:
    """Return the time of an all-gather, or a reduce-scatter, of hidden states over tp."""
    num_bytes = micro_batch_tokens(gemm.workload, mapping) * hidden_size * gemm.value_bytes
    price = partial(all_gather_s, gemm.device)
    return CostItem("tp_comm", seconds_of_groups(price, RankGroup(mapping.tp, 1), num_bytes))


class BlockCost:
    """Sizes and times that all blocks of a layer have."""

    def __init__(self, gemm: GemmCost, hidden_size: int, mapping: ParallelMapping) -> None:
        self.gemm = gemm
        self.device = gemm.device
        self.workload = gemm.workload
        self.mapping = mapping
        self.tp = mapping.tp
        self.hidden = hidden_size
        self.tokens = micro_batch_tokens(self.workload, mapping)
        self.local_tokens = self.tokens / self.tp
        self.gather = tp_gather(gemm, hidden_size, mapping)
        stream_s = self.gemm.memory_bound_s(self.local_tokens * self.hidden * self.gemm.value_bytes)
        self.passes_s = 5 * stream_s
        """Norm and residual move 5 hidden widths."""
        self.norm_again = ("norms", 2 * stream_s)

    def kernel_counts(self, block: str) -> Launches:
        """Return the launches of a block: of a Megatron-like layer, or traced in moefold's."""
        return (KERNEL_COUNTS if self.workload.is_megatron else TRACED_KERNEL_COUNTS)[block]
