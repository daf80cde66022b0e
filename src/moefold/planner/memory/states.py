"""State memory: bytes of weights, gradients and moments of each unit of a model, by the runtime's formula. Torch-free.

A unit is the embedding, a layer of a kind, the head, or an MTP layer. Its dense weights depend on tp and on the
data-parallel ranks that shard them, its experts on ep, etp and edp: each is computed once.
"""

from dataclasses import replace
from functools import cache
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
        self._tables: dict[tuple[object, ...], tuple[ByteTable, ByteTable]] = {}
        self._unit_bytes_cache: dict[tuple[object, ...], StateBytes] = {}
        self._shard_spec = cache(self._make_shard_spec)
        self._sharded = cache(self._shard)
        self._weights = {name: unit_weights(cfg.model, cfg.lora, self._unit(name)) for name in self._units.values()}
        self._rope_bytes = cache(self._count_rope_bytes)
        self._largest_moments: dict[tuple[object, ...], list[int]] = {}

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

    def _largest_of_unit(self, name: str | int, mapping: ParallelMapping) -> list[int]:
        """Return the largest offloaded moments of one unit."""
        degrees = self._sharding_degrees(mapping)
        key = (name, mapping.tp, mapping.ep, mapping.etp, *degrees)
        if key not in self._largest_moments:
            shard_spec = self._shard_spec(degrees, accumulates_gradients=False)
            sizes = offloaded_moment_sizes(shard_spec, self._shards(name, mapping), self.cfg.train.offload_min_kib)
            self._largest_moments[key] = nlargest(PARAMS_IN_TRANSIT, sizes)
        return self._largest_moments[key]

    def _table(self, mapping: ParallelMapping, accumulates_gradients: bool) -> tuple[ByteTable, ByteTable]:
        """Return `bytes_by_part` and `total_bytes`."""
        m = mapping
        caches_weights = self._kernels_cache_weights and caches_quantized_weights(
            self.cfg.train, 2 if accumulates_gradients else 1, m.zero
        )
        is_single = m.world_size == 1
        accumulates_gradients = accumulates_gradients and m.zero < 2 and not is_single
        is_offloaded = OFFLOADED_OPTIMIZER in m.offload
        exchange_bytes = self._exchange_bytes(m)
        key = (
            *(accumulates_gradients, caches_weights, m.tp, m.cp, m.ep, m.etp, *self._sharding_degrees(m), m.zero),
            *(is_single, is_offloaded, exchange_bytes),
        )
        if key not in self._tables:
            table = state_table(
                {
                    column: self._unit_bytes(name, m, accumulates_gradients, is_offloaded)
                    for column, name in self._units.items()
                },
                self._columns,
                has_second_embedding=self.model_spec.config.last_stage_needs_embedding,
                prefetched=self._prefetched_bytes(m) if m.zero == 3 and not is_single else None,
                rope_bytes=self._rope_bytes(m.cp),
                exchange_bytes=exchange_bytes,
            )[[STATE_FIELDS.index(part) for part in STATE_PARTS]]
            if is_offloaded and self.workload.is_megatron:
                # Megatron-Core updates on the host, and keeps the master weights there.
                table[STATE_PARTS.index("weights")] = table[STATE_PARTS.index("optimizer")] = 0
            for column, name in self._units.items() if caches_weights else ():
                table[STATE_PARTS.index("gathered"), column] += quantized_copy_bytes(self._shards(name, m))
            self._tables[key] = table, table.sum(axis=0)
        return self._tables[key]

    def _sharding_degrees(self, mapping: ParallelMapping) -> tuple[int, int]:
        """Return the number of ranks that shard the states of dense weights and of experts."""
        if mapping.zero == 0 or mapping.world_size == 1:
            return 1, 1
        if self.workload.shards_over_dp_only:
            return mapping.dp, max(1, mapping.edp // mapping.cp)
        return mapping.dp * mapping.cp, mapping.edp

    def _prefetched_bytes(self, mapping: ParallelMapping) -> dict[int, int]:
        shard_spec = self._shard_spec(self._sharding_degrees(mapping), accumulates_gradients=False)
        units = self._units.items()
        return {column: shard_spec.prefetched_bytes(self._shards(name, mapping)) for column, name in units}

    def _unit_bytes(
        self, name: str | int, mapping: ParallelMapping, accumulates_gradients: bool, is_offloaded: bool
    ) -> StateBytes:
        is_single = mapping.world_size == 1
        degrees = self._sharding_degrees(mapping)
        shard_spec = self._shard_spec(degrees, accumulates_gradients=accumulates_gradients)
        cfg = self.cfg
        unit = self._unit(name)
        total = StateBytes(
            buffers=expert_buffer_bytes(cfg.model, cfg.moe) if has_experts(cfg.model, unit) else 0,
            gathered=cast_copy_bytes(cfg.run, cfg.model, cfg.lora, [unit]) if is_single else 0,
        )
        for is_expert, shard_degrees in (
            (False, (mapping.tp, degrees[0])),
            (True, (mapping.ep, mapping.etp, degrees[1])),
        ):
            key = (name, is_expert, *shard_degrees, accumulates_gradients, is_offloaded, is_single)
            if key not in self._unit_bytes_cache:
                weights = [weight for weight in self._shards(name, mapping) if weight.is_expert == is_expert]
                states = shard_spec.state_bytes(weights)
                leaving = offloaded_moment_sizes(shard_spec, weights, cfg.train.offload_min_kib) if is_offloaded else ()
                self._unit_bytes_cache[key] = StateBytes(
                    weights=states.weights,
                    gathered=0 if is_single else shard_spec.gathered_bytes(weights),
                    gradients=max(states.gradients, states.gradient_sums),
                    optimizer=states.optimizer - sum(leaving),
                )
            total += self._unit_bytes_cache[key]
        return total

    def _make_shard_spec(self, degrees: tuple[int, int], *, accumulates_gradients: bool) -> ShardSpec:
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

    def _count_rope_bytes(self, cp: int) -> int:
        cfg = replace(self.cfg, parallel=replace(self.cfg.parallel, cp=cp))
        return rope_buffer_bytes(cfg.run, cfg.model, cfg.parallel, cfg.train)

    def _exchange_bytes(self, mapping: ParallelMapping) -> int:
        if not is_own(mapping.dispatcher, "reserved_bytes"):
            return 0
        axes = {name: getattr(mapping, name) for name in ("tp", "cp", "ep", "etp", "dispatcher")}
        train = replace(self.cfg.train, micro_batch_size=mapping.mbs)
        return dispatch_buffer_bytes(replace(self.cfg, parallel=replace(self.cfg.parallel, **axes), train=train))

    def _shards(self, name: str | int, mapping: ParallelMapping) -> tuple[ParamSpec, ...]:
        """Return the weights of a unit, a kind of layers or an end, on a rank of tensor and expert parallelism."""
        return self._sharded(name, mapping.tp, mapping.ep, mapping.etp)

    def _shard(self, name: str | int, tp: int, ep: int, etp: int) -> tuple[ParamSpec, ...]:
        return tuple(weight.shard(tp, ep, etp) for weight in self._weights[name])
