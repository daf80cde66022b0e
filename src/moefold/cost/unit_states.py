"""State bytes of the units of a model under any mapping: of one recipe, and of all of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from heapq import nlargest
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from moefold.config.groups.layer_sizes import KernelProfile
from moefold.config.layers import Layer
from moefold.config.param_spec import ParamSpec
from moefold.config.schema import Config
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.memory_columns import ByteTable, Counts, columns_of
from moefold.cost.saved_tensors import CUDA_KERNELS
from moefold.cost.unit_memory import (
    ShardSpec,
    StateBytes,
    Unit,
    caches_quantized_weights,
    cast_copy_bytes,
    expert_buffer_bytes,
    has_experts,
    make_shard_spec,
    quantized_copy_bytes,
    rope_buffer_bytes,
    unit_weights,
)

STATE_FIELDS = tuple(field.name for field in fields(StateBytes))
"""Parts of a table of states."""
PARAMS_IN_TRANSIT = 3
"""Parameters whose offloaded moments are in memory at once: one being fetched, one in use, one being written back."""


class StateMapping(NamedTuple):
    """The degrees of a mapping that decide the state bytes of a rank."""

    tp: int
    cp: int
    ep: int
    etp: int
    degrees: tuple[int, int]
    """Number of ranks over which dense weights and experts are sharded."""
    zero: int
    is_single: bool
    """Whether there is one rank, without FSDP."""
    has_several_micro_batches: bool

    @property
    def accumulates_gradients(self) -> bool:
        """Return whether gradients are summed over micro-batches before they are reduced."""
        return self.has_several_micro_batches and self.zero < 2 and not self.is_single

    @property
    def shards_layers(self) -> bool:
        """Return whether the layers of a stage gather their weights one after another."""
        return self.zero == 3 and not self.is_single


def state_mapping(cfg: Config) -> StateMapping:
    """Return the mapping of a recipe that `check_config` passed."""
    p = cfg.parallel
    is_single = p.world_size == 1
    degrees = (1, 1) if is_single or p.zero == 0 else (p.dp * p.cp, p.edp)
    return StateMapping(p.tp, p.cp, p.ep, p.etp, degrees, p.zero, is_single, cfg.num_micro_batches > 1)


class UnitMemory:
    """State bytes of single units (a layer, the embedding, the head) under any mapping; each is computed once.

    Args:
        cfg: the recipe; its mapping does not count.
        kernels: kernel profile of the device.
        kinds: distinct layers of the model, in the order of `columns`; None: the recipe's.
        item_bytes: bytes of `ShardSpec` fields that differ from the recipe's types.
    """

    def __init__(
        self,
        cfg: Config,
        kernels: KernelProfile = CUDA_KERNELS,
        kinds: Sequence[Layer] | None = None,
        item_bytes: Mapping[str, Any] | None = None,
    ) -> None:
        self.cfg = cfg
        kinds = cfg.model.distinct_kinds if kinds is None else kinds
        self.columns = columns_of(kinds)
        ends: tuple[Unit, ...] = ("embedding", "head", "mtp") if cfg.model.mtp_layers else ("embedding", "head")
        self.units: dict[int, Unit] = dict(enumerate(kinds))
        """The units by their state column: kinds of layers, embedding and head, and MTP layers."""
        self.units |= {self.columns.state_column(str(name)): name for name in ends}
        self._weights = {column: unit_weights(cfg.model, cfg.lora, name) for column, name in self.units.items()}
        self._kernels = kernels
        self._item_bytes = item_bytes or {}

    def unit_bytes(self, name: Unit, mapping: StateMapping, *, with_optimizer: bool) -> int:
        """Return the state bytes of a unit in a step, on the first rank of a stage."""
        column = next(column for column, unit in self.units.items() if unit == name)
        states = self.unit_states(column, mapping)
        gathered = 0 if mapping.zero == 3 else states.gathered
        resting = states.weights + states.buffers + gathered + (states.optimizer if with_optimizer else 0)
        return resting + max(states.gradients, states.gradient_sums)

    def unit_states(self, column: int, mapping: StateMapping) -> StateBytes:
        """Return the state bytes of a unit, by its state column, with all of its weights gathered."""
        cfg = self.cfg
        name = self.units[column]
        dense, experts = (self._weight_states(column, mapping, is_expert) for is_expert in (False, True))
        copies = cast_copy_bytes(cfg.run, cfg.model, cfg.lora, [name]) if mapping.is_single else 0
        if self._kernels.caches_quantized_weights and caches_quantized_weights(
            cfg.train, 1 + mapping.has_several_micro_batches, mapping.zero
        ):
            copies += quantized_copy_bytes(self.shards(column, mapping))
        return StateBytes(
            weights=dense.weights + experts.weights,
            gathered=dense.gathered + experts.gathered + copies,
            gradients=dense.gradients + experts.gradients,
            gradient_sums=dense.gradient_sums + experts.gradient_sums,
            optimizer=dense.optimizer + experts.optimizer,
            buffers=expert_buffer_bytes(cfg.model, cfg.moe) if has_experts(cfg.model, name) else 0,
        )

    @memoised(
        lambda self, column, m, is_expert: (
            (column, is_expert, m.degrees[is_expert], m.accumulates_gradients, m.is_single),
            (m.ep, m.etp) if is_expert else m.tp,
        )
    )
    def _weight_states(self, column: int, mapping: StateMapping, is_expert: bool) -> StateBytes:
        """Return the state bytes of the experts of a unit, or of its other weights, without buffers."""
        spec = self.shard_spec(mapping)
        weights = [weight for weight in self.shards(column, mapping) if weight.is_expert == is_expert]
        gathered = 0 if mapping.is_single else spec.gathered_bytes(weights)
        return replace(spec.state_bytes(weights), gathered=gathered)

    def table(self, mapping: StateMapping, *, exchange_bytes: int, offloads_moments: bool = False) -> ByteTable:
        """Return the bytes of each state column, [`STATE_FIELDS`, columns].

        Args:
            mapping: the mapping.
            exchange_bytes: bytes of a rank's symmetric memory.
            offloads_moments: whether moments are in the host's memory between updates.
        """
        columns = self.columns
        table = np.zeros((len(STATE_FIELDS), columns.state_size))
        for column in self.units:
            states = self.unit_states(column, mapping)
            table[:, column] = [getattr(states, name) for name in STATE_FIELDS]
            if offloads_moments:
                table[STATE_FIELDS.index("optimizer"), column] -= sum(self.offloaded_unit(column, mapping))
        if self.cfg.model.last_stage_needs_embedding:
            for name in ("second_embedding", "following_embedding"):
                table[:, columns.state_column(name)] = table[:, columns.state_column("embedding")]
            # On the rank of the first stage the copy has no moments, and no separate gradient after the reduction.
            table[STATE_FIELDS.index("optimizer"), columns.state_column("following_embedding")] = 0
        table[STATE_FIELDS.index("buffers"), columns.state_column("stage")] = rope_buffer_bytes(
            self.cfg.run, self.cfg.model, self.cfg.train, mapping.cp
        )
        # A rank counts one set of kinds.
        table[STATE_FIELDS.index("buffers"), columns.first_kind_set :] = exchange_bytes
        if mapping.shards_layers:
            # The FSDP root's own weights stay gathered. A rank's largest layer counts, and its prefetched layer.
            prefetched = self.prefetched_bytes(mapping)
            gathered = table[STATE_FIELDS.index("gathered")]
            for kind_set in range(columns.several_layers):
                contained = [column for bit, column in enumerate(columns.layer_units) if kind_set >> bit & 1]
                at = columns.first_kind_set + kind_set
                gathered[at] = max(gathered[contained], default=0)
                next_layer = max((prefetched[column] for column in contained if column in prefetched), default=0)
                gathered[at + columns.several_layers] = gathered[at] + next_layer
            gathered[columns.layer_units] = 0
        return table

    def moments_in_transit(self, mapping: StateMapping, counts: Counts) -> Counts:
        """Return the most bytes of offloaded moments in memory during an update, [ranks].

        Args:
            mapping: the mapping.
            counts: state counts, [ranks, columns].
        """
        sizes = self.moment_sizes(mapping)
        rows, which = np.unique(counts[:, list(sizes)], axis=0, return_inverse=True)
        sums = []
        for row in rows:
            copies = (min(int(count), PARAMS_IN_TRANSIT) for count in row)
            moved = [unit[:PARAMS_IN_TRANSIT] * count for unit, count in zip(sizes.values(), copies, strict=True)]
            sums.append(sum(nlargest(PARAMS_IN_TRANSIT, chain.from_iterable(moved))))
        return np.array(sums, dtype=float)[which.reshape(-1)]

    def moment_sizes(self, mapping: StateMapping) -> dict[int, list[int]]:
        """Return the offloaded moments of each unit, largest first, by its state column.

        A copy of the embedding on the rank of the first stage has no moments; on another rank it has them.
        """
        sizes: dict[int, list[int]] = {column: self.offloaded_unit(column, mapping) for column in self.units}
        if self.cfg.model.last_stage_needs_embedding:
            embedding = self.columns.state_column("embedding")
            sizes[self.columns.state_column("second_embedding")] = sizes[embedding]
        return sizes

    def prefetched_bytes(self, mapping: StateMapping) -> dict[int, int]:
        """Return the bytes of each unit that are gathered while the layer before it computes, by its column."""
        spec = self.shard_spec(mapping)
        return {column: spec.prefetched_bytes(self.shards(column, mapping)) for column in self.units}

    @memoised(lambda self, column, m: (column, m.tp, m.ep, m.etp, m.degrees))
    def offloaded_unit(self, column: int, mapping: StateMapping) -> list[int]:
        """Return the moment bytes of each weight that is large enough for `optim/state_offload.py` to offload."""
        spec = self.shard_spec(mapping)
        found = (spec.offloaded_bytes(w, self.cfg.train.offload_min_kib) for w in self.shards(column, mapping))
        return sorted((size for size in found if size), reverse=True)

    def shard_spec(self, mapping: StateMapping) -> ShardSpec:
        """Return the sharding and the types of a mapping."""
        return self._shard_spec(mapping.degrees, mapping.accumulates_gradients)

    @memoised(all_arguments)
    def _shard_spec(self, degrees: tuple[int, int], accumulates_gradients: bool) -> ShardSpec:
        spec = make_shard_spec(self.cfg, degrees, accumulates_gradients=accumulates_gradients)
        return replace(spec, **self._item_bytes)

    @memoised(lambda self, column, m: (column, m.tp, m.ep, m.etp))
    def shards(self, column: int, mapping: StateMapping) -> tuple[ParamSpec, ...]:
        """Return the weights of a unit on a rank of tensor and expert parallelism."""
        return tuple(weight.shard(mapping.tp, mapping.ep, mapping.etp) for weight in self._weights[column])
