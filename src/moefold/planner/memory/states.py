"""State memory: bytes of weights, gradients and moments of each unit of a model, by the runtime's formula. Torch-free.

A unit is the embedding, a layer of a kind, the head, or an MTP layer. Its dense weights depend on tp and on the
data-parallel ranks that shard them, its experts on ep, etp and edp: each is computed once.
"""

from dataclasses import replace
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import is_own
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.param_spec import ParamSpec
from moefold.config.schema import Config
from moefold.cost.memory_columns import ByteTable, MemoryColumns
from moefold.cost.state_memory import (
    PARAMS_IN_TRANSIT,
    STATE_FIELDS,
    moments_in_transit,
    offloaded_moment_sizes,
    state_table,
)
from moefold.cost.unit_memory import (
    ITEM_BYTES,
    ShardSpec,
    StateBytes,
    Unit,
    caches_quantized_weights,
    cast_copy_bytes,
    dispatch_buffer_bytes,
    expert_buffer_bytes,
    has_experts,
    make_shard_spec,
    quantized_copy_bytes,
    rope_buffer_bytes,
    unit_weights,
)
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.memoised import all_arguments, memoised
from moefold.planner.model_spec import ModelSpec

STATE_PARTS = ("weights", "gathered", "gradients", "optimizer", "buffers")
"""Parts of `STATE_FIELDS`; gradients are the reduced ones or their unsharded sums, whichever are larger."""


class StateMemoryTable:
    """State memory of the units of one model.

    Args:
        model_spec: the model.
        workload: its dtypes of gradients and moments count, where they differ from the recipe's dtypes.
        cfg: the recipe; its mapping does not count.
        columns: columns of the model.
        on_cpu: True: the kernels are CPU kernels.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        workload: TrainingWorkload,
        cfg: Config,
        columns: MemoryColumns,
        *,
        on_cpu: bool = False,
    ) -> None:
        self.model_spec = model_spec
        self.workload = workload
        self.cfg = cfg
        self._columns = columns
        self._kernels_cache_weights = not on_cpu and not workload.is_megatron
        ends = ("embedding", "head", *(("mtp",) if model_spec.mtp_layers else ()))
        self._units: dict[int, str | int] = {kind: kind for kind in range(columns.num_kinds)}
        """Name of each unit by its column: kinds of layers, embedding and head, and MTP layers."""
        self._units |= {columns.state_column(name): name for name in ends}
        self._weights = {name: unit_weights(cfg.model, cfg.lora, self._unit(name)) for name in self._units.values()}

    def bytes_by_part(self, mapping: ParallelMapping) -> ByteTable:
        """Return the bytes of each state column, [parts, columns]."""
        return self._table(mapping, self._has_several_micro_batches(mapping))[0]

    def total_bytes(self, mapping: ParallelMapping) -> ByteTable:
        """Return the sum of `bytes_by_part` over parts, [columns]."""
        return self._table(mapping, self._has_several_micro_batches(mapping))[1]

    def _has_several_micro_batches(self, mapping: ParallelMapping) -> bool:
        return mapping.num_micro_batches(self.workload.global_batch_size) > 1

    def update_bytes(self, mapping: ParallelMapping, state_counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes of prefetched moments and of the weights that the optimizer copies, [snapshots].

        No moments are prefetched if none are offloaded, or if the host updates them.

        Args:
            mapping: the mapping.
            state_counts: state counts of the rank, [snapshots, `MemoryColumns.state_size`].
        """
        found = np.zeros(len(state_counts))
        if chosen_in(self.cfg.train, OptimizerPart).copies_weights:
            # As many bytes as the reduced gradients.
            table, _ = self._table(mapping, accumulates_gradients=False)
            found = state_counts @ table[STATE_PARTS.index("gradients")]
        # Megatron-Core updates on the host.
        if OFFLOADED_OPTIMIZER not in mapping.offload or self.workload.is_megatron:
            return found
        sizes = {column: self._largest_of_unit(name, mapping) for column, name in self._units.items()}
        if self.model_spec.config.last_stage_needs_embedding:
            embedding = self._columns.state_column("embedding")
            sizes[self._columns.state_column("second_embedding")] = sizes[embedding]
        return found + moments_in_transit(sizes, state_counts)

    @memoised(lambda self, name, m: (name, m.tp, m.ep, m.etp, *self._sharding_degrees(m)))
    def _largest_of_unit(self, name: str | int, mapping: ParallelMapping) -> list[int]:
        """Return the largest offloaded moments of one unit."""
        shard_spec = self._shard_spec(self._sharding_degrees(mapping), False)
        sizes = offloaded_moment_sizes(shard_spec, self._shards(name, mapping), self.cfg.train.offload_min_kib)
        return nlargest(PARAMS_IN_TRANSIT, sizes)

    def _table_key(self, m: ParallelMapping, accumulates: bool) -> tuple[object, ...]:
        degrees = m.tp, m.cp, m.ep, m.etp, *self._sharding_degrees(m)
        is_offloaded = OFFLOADED_OPTIMIZER in m.offload
        return (accumulates, *degrees, m.zero, m.world_size == 1, is_offloaded, self._exchange_bytes(m))

    @memoised(_table_key)
    def _table(self, mapping: ParallelMapping, accumulates_gradients: bool) -> tuple[ByteTable, ByteTable]:
        """Return `bytes_by_part` and `total_bytes`."""
        m = mapping
        is_single = m.world_size == 1
        is_offloaded = OFFLOADED_OPTIMIZER in m.offload
        sums = accumulates_gradients and m.zero < 2 and not is_single
        table = state_table(
            {column: self._unit_bytes(name, m, sums, is_offloaded) for column, name in self._units.items()},
            self._columns,
            has_second_embedding=self.model_spec.config.last_stage_needs_embedding,
            prefetched=self._prefetched_bytes(m) if m.zero == 3 and not is_single else None,
            rope_bytes=self._rope_bytes(m.cp),
            exchange_bytes=self._exchange_bytes(m),
        )[[STATE_FIELDS.index(part) for part in STATE_PARTS]]
        if is_offloaded and self.workload.is_megatron:
            # Megatron-Core updates on the host, and keeps the master weights there.
            table[STATE_PARTS.index("weights")] = table[STATE_PARTS.index("optimizer")] = 0
        num_reads = 2 if accumulates_gradients else 1
        if self._kernels_cache_weights and caches_quantized_weights(self.cfg.train, num_reads, m.zero):
            for column, name in self._units.items():
                table[STATE_PARTS.index("gathered"), column] += quantized_copy_bytes(self._shards(name, m))
        return table, table.sum(axis=0)

    def _sharding_degrees(self, mapping: ParallelMapping) -> tuple[int, int]:
        """Return the number of ranks that shard the states of dense weights and of experts."""
        if mapping.zero == 0 or mapping.world_size == 1:
            return 1, 1
        if self.workload.shards_over_dp_only:
            return mapping.dp, max(1, mapping.edp // mapping.cp)
        return mapping.dp * mapping.cp, mapping.edp

    def _prefetched_bytes(self, mapping: ParallelMapping) -> dict[int, int]:
        shard_spec = self._shard_spec(self._sharding_degrees(mapping), False)
        units = self._units.items()
        return {column: shard_spec.prefetched_bytes(self._shards(name, mapping)) for column, name in units}

    def _unit_bytes(
        self, name: str | int, mapping: ParallelMapping, accumulates_gradients: bool, is_offloaded: bool
    ) -> StateBytes:
        cfg = self.cfg
        unit = self._unit(name)
        dense, experts = (
            self._weight_bytes(name, mapping, accumulates_gradients, is_offloaded, is_expert)
            for is_expert in (False, True)
        )
        cast_copies = cast_copy_bytes(cfg.run, cfg.model, cfg.lora, [unit]) if mapping.world_size == 1 else 0
        return StateBytes(
            weights=dense.weights + experts.weights,
            gathered=dense.gathered + experts.gathered + cast_copies,
            gradients=dense.gradients + experts.gradients,
            optimizer=dense.optimizer + experts.optimizer,
            buffers=expert_buffer_bytes(cfg.model, cfg.moe) if has_experts(cfg.model, unit) else 0,
        )

    def _weight_key(
        self, name: str | int, m: ParallelMapping, sums: bool, is_offloaded: bool, is_expert: bool
    ) -> tuple[object, ...]:
        shards = (m.ep, m.etp) if is_expert else (m.tp,)
        degree = self._sharding_degrees(m)[is_expert]
        return (name, *shards, degree, sums, is_offloaded, is_expert, m.world_size == 1)

    @memoised(_weight_key)
    def _weight_bytes(
        self, name: str | int, mapping: ParallelMapping, accumulates: bool, is_offloaded: bool, is_expert: bool
    ) -> StateBytes:
        """Return the bytes of the experts of a unit, or of its other weights."""
        shard_spec = self._shard_spec(self._sharding_degrees(mapping), accumulates)
        weights = [weight for weight in self._shards(name, mapping) if weight.is_expert == is_expert]
        states = shard_spec.state_bytes(weights)
        min_kib = self.cfg.train.offload_min_kib
        return StateBytes(
            weights=states.weights,
            gathered=0 if mapping.world_size == 1 else shard_spec.gathered_bytes(weights),
            gradients=max(states.gradients, states.gradient_sums),
            optimizer=states.optimizer
            - (sum(offloaded_moment_sizes(shard_spec, weights, min_kib)) if is_offloaded else 0),
        )

    @memoised(all_arguments)
    def _shard_spec(self, degrees: tuple[int, int], accumulates_gradients: bool) -> ShardSpec:
        states = self.workload.state_bytes
        if states is None:
            return make_shard_spec(self.cfg, degrees, accumulates_gradients=accumulates_gradients)
        is_narrow = states.moment == ITEM_BYTES["bfloat16"]
        train = self.cfg.train
        optimizer = chosen_in(train, OptimizerPart).with_moment_dtype("bfloat16" if is_narrow else "float32")
        cfg = replace(self.cfg, train=replace(train, optimizer=optimizer))
        shard_spec = make_shard_spec(cfg, degrees, accumulates_gradients=accumulates_gradients)
        return replace(shard_spec, master_bytes=states.master, gradient_bytes=states.gradient)

    def _unit(self, name: str | int) -> Unit:
        return name if isinstance(name, str) else self.model_spec.kinds[name].kind

    @memoised(all_arguments)
    def _rope_bytes(self, cp: int) -> int:
        cfg = replace(self.cfg, parallel=replace(self.cfg.parallel, cp=cp))
        return rope_buffer_bytes(cfg.run, cfg.model, cfg.parallel, cfg.train)

    def _exchange_bytes(self, mapping: ParallelMapping) -> int:
        if not is_own(mapping.dispatcher, "reserved_bytes"):
            return 0
        axes = {name: getattr(mapping, name) for name in ("tp", "cp", "ep", "etp", "dispatcher")}
        train = replace(self.cfg.train, micro_batch_size=mapping.mbs)
        return dispatch_buffer_bytes(replace(self.cfg, parallel=replace(self.cfg.parallel, **axes), train=train))

    @memoised(lambda self, name, m: (name, m.tp, m.ep, m.etp))
    def _shards(self, name: str | int, mapping: ParallelMapping) -> tuple[ParamSpec, ...]:
        """Return the weights of a unit, a kind of layers or an end, on a rank of tensor and expert parallelism."""
        return tuple(weight.shard(mapping.tp, mapping.ep, mapping.etp) for weight in self._weights[name])
