"""State memory: bytes of weights, gradients and moments under any mapping, by the runtime's formula."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import overrides_any
from moefold.config.groups.layer_sizes import KernelProfile
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.schema import Config
from moefold.cost.memoised import memoised
from moefold.cost.memory_columns import ByteTable
from moefold.cost.state_bytes import ITEM_BYTES, dispatch_buffer_bytes
from moefold.cost.unit_state_memory import STATE_FIELDS, StateMapping, UnitStateMemory
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.model_spec import ModelSpec

STATE_PARTS = ("weights", "gathered", "gradients", "optimizer", "buffers")
"""Parts of `STATE_FIELDS`. Gradients are the reduced gradients or their unsharded sums, whichever are larger."""


class StateMemoryTable:
    """State memory of the units of one model.

    Args:
        workload: its dtypes of gradients and moments replace the recipe's dtypes.
        cfg: the recipe. Its mapping does not count.
    """

    def __init__(self, model_spec: ModelSpec, workload: TrainingWorkload, cfg: Config, kernels: KernelProfile) -> None:
        self.workload = workload
        self.cfg = cfg
        self._copies_weights = chosen_in(cfg.train, OptimizerPart).copies_weights
        item_bytes = None
        if states := workload.state_bytes:
            is_narrow = states.moment == ITEM_BYTES["bfloat16"]
            optimizer = chosen_in(cfg.train, OptimizerPart).with_moment_dtype("bfloat16" if is_narrow else "float32")
            cfg = replace(cfg, train=replace(cfg.train, optimizer=optimizer))
            item_bytes = states.master, states.gradient
        self._units = UnitStateMemory(cfg, kernels, model_spec.kinds, item_bytes)

    def bytes_by_part(self, mapping: ParallelMapping) -> ByteTable:
        """Return the bytes of each state column, [parts, columns]."""
        table = self._table(mapping, self._state_mapping(mapping))[0].copy()
        table[STATE_PARTS.index("buffers")] += self._rank_buffers(mapping)
        return table

    def total_bytes(self, mapping: ParallelMapping) -> ByteTable:
        """Return the sum of `bytes_by_part` over parts, [columns]."""
        total: ByteTable = self._table(mapping, self._state_mapping(mapping))[1] + self._rank_buffers(mapping)
        return total

    def update_bytes(self, mapping: ParallelMapping, state_counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes of prefetched moments and of the weights that the optimizer copies, [snapshots].

        No moments are prefetched if none are offloaded, or if the host updates them.
        """
        found = np.zeros(len(state_counts))
        state_mapping = self._state_mapping(mapping)
        if self._copies_weights:
            # As many bytes as the reduced gradients.
            table, _ = self._table(mapping, state_mapping._replace(has_several_micro_batches=False))
            found = state_counts @ table[STATE_PARTS.index("gradients")]
        # Megatron-Core updates on the host.
        if OFFLOADED_OPTIMIZER not in mapping.offload or self.workload.is_megatron:
            return found
        return found + self._units.moments_in_transit(state_mapping, state_counts)

    @memoised(lambda self, m: (m.cp, self.exchange_bytes(m)))
    def _rank_buffers(self, mapping: ParallelMapping) -> ByteTable:
        return self._units.rank_buffers(mapping.cp, self.exchange_bytes(mapping))

    @memoised(lambda self, m, states: (states, OFFLOADED_OPTIMIZER in m.offload))
    def _table(self, mapping: ParallelMapping, state_mapping: StateMapping) -> tuple[ByteTable, ByteTable]:
        """Return `bytes_by_part` and `total_bytes` without the buffers of a rank."""
        is_offloaded = OFFLOADED_OPTIMIZER in mapping.offload
        fields = self._units.table(state_mapping, offloads_moments=is_offloaded)
        sums = fields[STATE_FIELDS.index("gradient_sums")]
        table = fields[[STATE_FIELDS.index(part) for part in STATE_PARTS]]
        gradients = table[STATE_PARTS.index("gradients")]
        np.maximum(gradients, sums, out=gradients)
        if is_offloaded and self.workload.is_megatron:
            # Megatron-Core updates on the host, and keeps the master weights there.
            table[STATE_PARTS.index("weights")] = table[STATE_PARTS.index("optimizer")] = 0
        return table, table.sum(axis=0)

    def _state_mapping(self, mapping: ParallelMapping) -> StateMapping:
        m = mapping
        is_single = m.world_size == 1
        if m.zero == 0 or is_single:
            degrees = 1, 1
        elif self.workload.shards_over_dp_only:
            degrees = m.dp, max(1, m.edp // m.cp)
        else:
            degrees = m.dp * m.cp, m.edp
        is_accumulated = m.num_micro_batches(self.workload.global_batch_size) > 1
        return StateMapping(m.tp, m.ep, m.etp, degrees, m.zero, is_single, is_accumulated)

    def exchange_bytes(self, mapping: ParallelMapping) -> int:
        """Return the bytes that the dispatcher of a mapping reserves for its exchanges, or 0 for most dispatchers."""
        if not overrides_any(mapping.dispatcher, "reserved_bytes"):
            return 0
        axes = {name: getattr(mapping, name) for name in ("tp", "cp", "ep", "etp", "dispatcher")}
        train = replace(self.cfg.train, micro_batch_size=mapping.mbs)
        return dispatch_buffer_bytes(replace(self.cfg, parallel=replace(self.cfg.parallel, **axes), train=train))
