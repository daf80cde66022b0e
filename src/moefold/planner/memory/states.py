"""State memory: bytes of weights, gradients and moments of each unit of a model, by the runtime's formula. Torch-free.

A unit is the embedding, a layer of a kind, the head, or an MTP layer. Its dense weights depend on tp and on the
data-parallel ranks that shard them, its experts on ep, etp and edp: each is computed once. `OptimizerPrefetch` counts
the offloaded moments that an update prefetches.
"""

from collections.abc import Sequence
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
        self.columns = columns
        self._kernels_cache_weights = not on_cpu and not workload.is_megatron
        self._unit_bytes_cache: dict[tuple[object, ...], StateBytes] = {}
        self._bytes_by_part: dict[tuple[object, ...], ByteTable] = {}
        self._shard_specs: dict[tuple[tuple[int, int], bool], ShardSpec] = {}
        self._rope_bytes_by_cp: dict[int, int] = {}
        self._total_bytes: dict[tuple[object, ...], ByteTable] = {}
        self._weights: dict[tuple[str | int, int], tuple[ParamSpec, ...]] = {}

    def bytes_by_part(self, mapping: ParallelMapping, *, accumulates_gradients: bool) -> ByteTable:
        """Return the bytes of each state column, [parts, columns].

        Args:
            mapping: the mapping.
            accumulates_gradients: whether it accumulates the gradients of several micro-batches.
        """
        key = self._cache_key(mapping, accumulates_gradients)
        if key not in self._bytes_by_part:
            table = self._build_table(mapping, self.sharding_degrees(mapping), key[0], "optimizer" in mapping.offload)
            if key[1]:
                for column, name in self.units():
                    weights = (w.shard(mapping.tp, mapping.ep, mapping.etp) for w in self.weights(name, mapping.tp))
                    table[STATE_PARTS.index("gathered"), column] += quantized_copy_bytes(weights)
            self._bytes_by_part[key] = table
        return self._bytes_by_part[key]

    def total_bytes(self, mapping: ParallelMapping, *, accumulates_gradients: bool) -> ByteTable:
        """Return the sum of `bytes_by_part` over parts, [columns]."""
        key = self._cache_key(mapping, accumulates_gradients)
        if key not in self._total_bytes:
            self._total_bytes[key] = self.bytes_by_part(mapping, accumulates_gradients=accumulates_gradients).sum(
                axis=0
            )
        return self._total_bytes[key]

    def units(self) -> list[tuple[int, str | int]]:
        """Return (column, name) of each unit: kinds of layers, embedding and head, and MTP layers."""
        kinds = range(self.columns.num_kinds)
        columns = self.columns
        names = ("embedding", "head", *(("mtp",) if self.model_spec.mtp_layers else ()))
        return [*((kind, kind) for kind in kinds), *((columns.state_column(name), name) for name in names)]

    def offloaded_sizes(self, name: str | int, mapping: ParallelMapping) -> list[int]:
        """Return the bytes of the offloadable moments of each weight of a unit."""
        degrees = self.sharding_degrees(mapping)
        weights = (weight.shard(mapping.tp, mapping.ep, mapping.etp) for weight in self.weights(name, mapping.tp))
        return list(
            offloaded_moment_sizes(
                self._shard_spec(degrees, accumulates_gradients=False), weights, self.cfg.train.offload_min_kib
            )
        )

    def _cache_key(
        self, mapping: ParallelMapping, accumulates_gradients: bool
    ) -> tuple[bool, bool, *tuple[object, ...]]:
        caches_weights = self._kernels_cache_weights and caches_quantized_weights(
            self.cfg.train, 2 if accumulates_gradients else 1, mapping.zero
        )
        accumulates_gradients = accumulates_gradients and mapping.zero < 2 and mapping.world_size > 1
        degrees = self.sharding_degrees(mapping)
        return (
            accumulates_gradients,
            caches_weights,
            mapping.tp,
            mapping.cp,
            mapping.ep,
            mapping.etp,
            *degrees,
            mapping.zero,
            mapping.world_size == 1,
            "optimizer" in mapping.offload,
            self._exchange_bytes(mapping),
        )

    def sharding_degrees(self, mapping: ParallelMapping) -> tuple[int, int]:
        """Return the number of ranks that shard the states of dense weights and of experts."""
        if mapping.zero == 0 or mapping.world_size == 1:
            return 1, 1
        if self.workload.shards_over_dp_only:
            return mapping.dp, max(1, mapping.edp // mapping.cp)
        return mapping.dp * mapping.cp, mapping.edp

    def _build_table(
        self, mapping: ParallelMapping, degrees: tuple[int, int], accumulates_gradients: bool, is_offloaded: bool
    ) -> ByteTable:
        units = {
            column: self._unit_bytes(
                name, mapping, degrees, accumulates_gradients=accumulates_gradients, is_offloaded=is_offloaded
            )
            for column, name in self.units()
        }
        gathers_by_layer = mapping.zero == 3 and mapping.world_size > 1
        table = state_table(
            units,
            self.columns,
            has_second_embedding=self.model_spec.config.last_stage_needs_embedding,
            prefetched=self._prefetched_bytes(mapping, degrees) if gathers_by_layer else None,
            rope_bytes=self._rope_bytes(mapping),
            exchange_bytes=self._exchange_bytes(mapping),
        )[[STATE_FIELDS.index(part) for part in STATE_PARTS]]
        if is_offloaded and self.workload.is_megatron:
            # Megatron-Core updates on the host, and keeps the master weights there.
            table[STATE_PARTS.index("weights")] = table[STATE_PARTS.index("optimizer")] = 0
        return table

    def _prefetched_bytes(self, mapping: ParallelMapping, degrees: tuple[int, int]) -> dict[int, int]:
        shard_spec = self._shard_spec(degrees, accumulates_gradients=False)
        return {
            column: shard_spec.prefetched_bytes(
                weight.shard(mapping.tp, mapping.ep, mapping.etp) for weight in self.weights(name, mapping.tp)
            )
            for column, name in self.units()
        }

    def _unit_bytes(
        self,
        name: str | int,
        mapping: ParallelMapping,
        degrees: tuple[int, int],
        *,
        accumulates_gradients: bool,
        is_offloaded: bool,
    ) -> StateBytes:
        if mapping.world_size == 1:
            return self._single_rank_bytes(name, is_offloaded=is_offloaded)
        shard_spec = self._shard_spec(degrees, accumulates_gradients)
        total = StateBytes(buffers=self._buffer_bytes(name))
        for is_expert, shard_degrees in (
            (False, (mapping.tp, degrees[0])),
            (True, (mapping.ep, mapping.etp, degrees[1])),
        ):
            key = (name, is_expert, *shard_degrees, accumulates_gradients, is_offloaded)
            if key not in self._unit_bytes_cache:
                weights = [
                    w.shard(mapping.tp, mapping.ep, mapping.etp)
                    for w in self.weights(name, mapping.tp)
                    if w.is_expert == is_expert
                ]
                self._unit_bytes_cache[key] = self._sharded_bytes(
                    shard_spec, weights, shard_spec.gathered_bytes(weights), is_offloaded=is_offloaded
                )
            total += self._unit_bytes_cache[key]
        return total

    def _single_rank_bytes(self, name: str | int, *, is_offloaded: bool) -> StateBytes:
        weights = self.weights(name, 1)
        gathered_bytes = cast_copy_bytes(self.cfg.run, self.cfg.model, self.cfg.lora, [self._unit(name)])
        counted = self._sharded_bytes(
            self._shard_spec((1, 1), accumulates_gradients=False), weights, gathered_bytes, is_offloaded=is_offloaded
        )
        return replace(counted, buffers=self._buffer_bytes(name))

    def _sharded_bytes(
        self, shard_spec: ShardSpec, weights: Sequence[ParamSpec], gathered_bytes: int, *, is_offloaded: bool
    ) -> StateBytes:
        states = shard_spec.state_bytes(weights)
        optimizer = states.optimizer
        if is_offloaded:
            optimizer -= sum(offloaded_moment_sizes(shard_spec, weights, self.cfg.train.offload_min_kib))
        gradients = max(states.gradients, states.gradient_sums)
        return StateBytes(weights=states.weights, gathered=gathered_bytes, gradients=gradients, optimizer=optimizer)

    def _shard_spec(self, degrees: tuple[int, int], accumulates_gradients: bool) -> ShardSpec:
        key = (degrees, accumulates_gradients)
        if key not in self._shard_specs:
            self._shard_specs[key] = self._make_shard_spec(degrees, accumulates_gradients=accumulates_gradients)
        return self._shard_specs[key]

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

    def _buffer_bytes(self, name: str | int) -> int:
        return expert_buffer_bytes(self.cfg.model, self.cfg.moe) if has_experts(self.cfg.model, self._unit(name)) else 0

    def _rope_bytes(self, mapping: ParallelMapping) -> int:
        if mapping.cp not in self._rope_bytes_by_cp:
            cfg = replace(self.cfg, parallel=replace(self.cfg.parallel, cp=mapping.cp))
            self._rope_bytes_by_cp[mapping.cp] = rope_buffer_bytes(cfg.run, cfg.model, cfg.parallel, cfg.train)
        return self._rope_bytes_by_cp[mapping.cp]

    def _exchange_bytes(self, mapping: ParallelMapping) -> int:
        if not is_own(mapping.dispatcher, "reserved_bytes"):
            return 0
        axes = {name: getattr(mapping, name) for name in ("tp", "cp", "ep", "etp", "dispatcher")}
        train = replace(self.cfg.train, micro_batch_size=mapping.mbs)
        return dispatch_buffer_bytes(replace(self.cfg, parallel=replace(self.cfg.parallel, **axes), train=train))

    def weights(self, name: str | int, tp: int) -> tuple[ParamSpec, ...]:
        """Return the unsharded weights of a unit: a kind of layers, or "embedding", "head", "mtp" (MTP)."""
        key = (name, tp)
        if key not in self._weights:
            cfg = replace(self.cfg, parallel=replace(self.cfg.parallel, tp=tp))
            self._weights[key] = unit_weights(cfg.model, cfg.lora, self._unit(name))
        return self._weights[key]


class OptimizerPrefetch:
    """Memory of an update: offloaded moments, of one parameter after another, and copies of the weights.

    Args:
        state_memory: state memory of the model.
    """

    def __init__(self, state_memory: StateMemoryTable) -> None:
        self._state_memory = state_memory
        self._largest: dict[tuple[object, ...], list[int]] = {}

    def extra_bytes(self, mapping: ParallelMapping, state_counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes of prefetched moments and of the weights that the optimizer copies, [snapshots].

        No moments are prefetched if none are offloaded, or if the host updates them.

        Args:
            mapping: the mapping.
            state_counts: state counts of the rank, [snapshots, `MemoryColumns.state_size`].
        """
        found = np.zeros(len(state_counts))
        if chosen_in(self._state_memory.cfg.train, OptimizerPart).copies_weights:
            # As many bytes as the reduced gradients.
            table = self._state_memory.bytes_by_part(mapping, accumulates_gradients=False)
            found = state_counts @ table[STATE_PARTS.index("gradients")]
        # Megatron-Core updates on the host.
        if OFFLOADED_OPTIMIZER not in mapping.offload or self._state_memory.workload.is_megatron:
            return found
        columns = self._state_memory.columns
        sizes = {column: self._largest_of_unit(name, mapping) for column, name in self._state_memory.units()}
        if self._state_memory.model_spec.config.last_stage_needs_embedding:
            sizes[columns.state_column("second_embedding")] = sizes[columns.state_column("embedding")]
        return found + moments_in_transit(sizes, state_counts)

    def _largest_of_unit(self, name: str | int, mapping: ParallelMapping) -> list[int]:
        """Return the largest offloaded moments of one unit."""
        key = (
            name,
            mapping.tp,
            mapping.ep,
            mapping.etp,
            *self._state_memory.sharding_degrees(mapping),
            mapping.world_size == 1,
        )
        if key not in self._largest:
            self._largest[key] = nlargest(PARAMS_IN_TRANSIT, self._state_memory.offloaded_sizes(name, mapping))
        return self._largest[key]
