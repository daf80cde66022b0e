"""Bytes of weights, gradients and moments of each unit (a layer, the embedding, the head) under any mapping.

One rank's sum is in `rank_state_memory.py` for a recipe, and in `planner/memory/states.py` for a search.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from heapq import nlargest
from itertools import chain
from typing import NamedTuple

import numpy as np

from moefold.config.base.param_spec import ParamSpec
from moefold.config.chosen import chosen_in
from moefold.config.groups.layer_sizes import KernelProfile
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.layers import Layer
from moefold.config.schema import Config
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.memory_columns import ByteTable, Counts, columns_of
from moefold.cost.saved_tensors import CUDA_KERNELS
from moefold.cost.state_bytes import (
    ITEM_BYTES,
    StateBytes,
    Unit,
    caches_quantized_weights,
    cast_copy_bytes,
    compute_dtype_bytes,
    expert_buffer_bytes,
    has_experts,
    master_dtype_bytes,
    quantized_copy_bytes,
    rope_buffer_bytes,
    trained_names,
    unit_weights,
)

STATE_FIELDS = tuple(field.name for field in fields(StateBytes))
"""Parts of a table of states."""
GATHERED = STATE_FIELDS.index("gathered")
BUFFERS = STATE_FIELDS.index("buffers")
PARAMS_IN_TRANSIT = 3
"""Parameters whose offloaded moments are in memory at once: one being fetched, one in use, one being written back."""


class StateMapping(NamedTuple):
    """The degrees of a mapping that decide the state bytes of a rank."""

    tp: int
    ep: int
    etp: int
    degrees: tuple[int, int]
    """Number of ranks over which dense weights and experts are sharded."""
    zero: int
    is_single: bool
    """True if there is one rank, without FSDP."""
    has_several_micro_batches: bool

    @property
    def accumulates_gradients(self) -> bool:
        """Return whether gradients are summed over micro-batches before they are reduced."""
        return self.has_several_micro_batches and self.zero < 2 and not self.is_single


def state_mapping(cfg: Config) -> StateMapping:
    """Return the mapping of a recipe that `check_config` passed."""
    p = cfg.parallel
    is_single = p.world_size == 1
    degrees = (1, 1) if is_single or p.zero == 0 else (p.dp * p.cp, p.edp)
    return StateMapping(p.tp, p.ep, p.etp, degrees, p.zero, is_single, cfg.num_micro_batches > 1)


class UnitStateMemory:
    """State bytes of single units (a layer, the embedding, the head) under any mapping. Each is computed once.

    Args:
        cfg: the recipe. Its mapping does not count.
        kinds: distinct layers of the model, in the order of `columns`. None: the recipe's.
        item_bytes: bytes of a number of the master weights, 0 if there are only weights in the compute type, and of the
            gradients. None: of the recipe's types.
    """

    def __init__(
        self,
        cfg: Config,
        kernels: KernelProfile = CUDA_KERNELS,
        kinds: Sequence[Layer] | None = None,
        item_bytes: tuple[int, int] | None = None,
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
        self._optimizer = chosen_in(cfg.train, OptimizerPart)
        master = master_dtype_bytes(cfg.run)
        own_types = master, master if self._optimizer.needs_gradients else 0
        self._master_bytes, self._gradient_bytes = item_bytes or own_types
        self._compute_bytes = compute_dtype_bytes(cfg.run)
        self._outer_bytes = master * cfg.sites.num_states
        self._residual_bytes = master * cfg.sites.has_residual
        self._trained_names = trained_names(cfg.model, cfg.train, cfg.lora)

    def unit_bytes(self, name: Unit, mapping: StateMapping, *, with_optimizer: bool) -> int:
        """Return the state bytes of a unit in a step, on the first rank of a stage."""
        column = next(column for column, unit in self.units.items() if unit == name)
        states = StateBytes(*self._unit_table(mapping)[:, column].astype(int).tolist())
        gathered = 0 if mapping.zero == 3 else states.gathered
        resting = states.weights + states.buffers + gathered + (states.optimizer if with_optimizer else 0)
        return resting + max(states.gradients, states.gradient_sums)

    def _unit_table(self, mapping: StateMapping, *, offloads_moments: bool = False) -> ByteTable:
        """Return the state bytes of each unit with all of its weights gathered, [`STATE_FIELDS`, columns]."""
        dense, experts = (self._weight_table(mapping, is_expert, offloads_moments) for is_expert in (False, True))
        table: ByteTable = dense + experts + self._fixed_table(mapping.is_single)
        return table

    @memoised(all_arguments)
    def _fixed_table(self, is_single: bool) -> ByteTable:
        """Return the bytes of each unit that no degree divides: buffers, and the cast copies of a single rank."""
        cfg = self.cfg
        table = np.zeros((len(STATE_FIELDS), self.columns.state_size))
        for column, name in self.units.items():
            if has_experts(cfg.model, name):
                table[BUFFERS, column] = expert_buffer_bytes(cfg.model, cfg.moe)
            if is_single:
                table[GATHERED, column] = cast_copy_bytes(cfg.run, cfg.model, cfg.lora, name)
        return table

    def _weight_key(self, m: StateMapping, is_expert: bool, offloads_moments: bool) -> tuple[object, ...]:
        shards = (m.ep, m.etp) if is_expert else m.tp
        cached = self._caches_quantized_weights(m)
        return is_expert, shards, m.degrees[is_expert], m.accumulates_gradients, m.is_single, cached, offloads_moments

    @memoised(_weight_key)
    def _weight_table(self, mapping: StateMapping, is_expert: bool, offloads_moments: bool) -> ByteTable:
        """Return the bytes of the experts of each unit, or of its other weights, [`STATE_FIELDS`, columns].

        These are the bytes of the first data-parallel rank, which holds most: later ranks get the remaining rows.
        """
        table = np.zeros((len(STATE_FIELDS), self.columns.state_size))
        for column in self.units:
            own = [weight for weight in self.shards(column, mapping) if weight.is_expert == is_expert]
            gathered = 0 if mapping.is_single else self._gathered_bytes(own, mapping)
            if self._caches_quantized_weights(mapping):
                gathered += quantized_copy_bytes(own)
            weights = gradients = sums = moments = 0
            for weight in own:
                shards = weight.dp_shards(mapping.degrees[is_expert])
                if self._trained_names not in weight.name:
                    # With adapters alone, frozen weights are in the compute type unless they are read in the master
                    # type.
                    is_narrow = self.cfg.trains_adapters_only and not weight.is_full_precision
                    weights += shards.padded_numel * (self._compute_bytes if is_narrow else self._master_bytes)
                    continue
                weights += shards.padded_numel * self._master_bytes
                gradients += shards.padded_numel * self._gradient_bytes
                if mapping.accumulates_gradients:
                    sums += shards.padded_numel * shards.degree * self._gradient_bytes
                moments += sum(size for size, _ in self._moments(weight, mapping))
            if offloads_moments:
                moments -= sum(self._offloaded_bytes(weight, mapping) for weight in own)
            table[:, column] = weights, gathered, gradients, sums, moments, 0
        return table

    def _caches_quantized_weights(self, mapping: StateMapping) -> bool:
        return self._kernels.caches_quantized_weights and caches_quantized_weights(
            self.cfg.train, 1 + mapping.has_several_micro_batches, mapping.zero
        )

    def _moments(self, weight: ParamSpec, mapping: StateMapping) -> Iterator[tuple[int, int]]:
        """Yield the bytes of each state of a weight, and the bytes that decide whether it is offloaded. 0: never.

        The states are of the optimizer, and of the outer optimizer of sites, which may divide the experts.
        """
        numel = weight.dp_shards(mapping.degrees[weight.is_expert]).numel(0)
        own_numel = numel // (self.cfg.sites.num_expert_owners if weight.is_expert else 1)
        for state in self._optimizer.states(weight):
            item_bytes = ITEM_BYTES[state.dtype] if state.dtype else self._master_bytes
            size = item_bytes * (1 if state.is_count else own_numel)
            yield size, 0 if state.is_count or state.is_kept else size
        yield own_numel * self._residual_bytes, own_numel * self._master_bytes
        yield numel * self._outer_bytes, numel * self._master_bytes

    def _gathered_bytes(self, weights: Iterable[ParamSpec], mapping: StateMapping) -> int:
        total = 0
        for weight in weights:
            shards = weight.dp_shards(mapping.degrees[weight.is_expert])
            item_bytes = max(self._compute_bytes, self._master_bytes * weight.is_full_precision)
            total += shards.padded_numel * shards.degree * item_bytes
        return total

    def table(self, mapping: StateMapping, *, offloads_moments: bool = False) -> ByteTable:
        """Return the bytes of each state column without `rank_buffers`, [`STATE_FIELDS`, columns].

        Args:
            offloads_moments: whether moments are in the host's memory between updates.
        """
        columns = self.columns
        table = self._unit_table(mapping, offloads_moments=offloads_moments)
        if self.cfg.model.last_stage_needs_embedding:
            for name in ("second_embedding", "following_embedding"):
                table[:, columns.state_column(name)] = table[:, columns.state_column("embedding")]
            # On the rank of the first stage the copy has no moments, and no separate gradient after the reduction.
            table[STATE_FIELDS.index("optimizer"), columns.state_column("following_embedding")] = 0
        if mapping.zero == 3 and not mapping.is_single:
            # Layers gather their weights one after another: the largest layer of a rank counts, and the weights of the
            # next one that are gathered meanwhile. The own weights of the FSDP root stay gathered.
            gathered = table[GATHERED]
            layers = columns.layer_units
            prefetched = sum(
                self._weight_table(mapping, is_expert, offloads_moments)[GATHERED, layers]
                for is_expert in (False, True)
                if mapping.degrees[is_expert] > 1
            )
            largest = (columns.kind_sets * gathered[layers]).max(axis=1)
            next_layer = (columns.kind_sets * prefetched).max(axis=1)
            gathered[columns.first_kind_set :] = np.concatenate([largest, largest + next_layer])
            gathered[layers] = 0
        return table

    def rank_buffers(self, cp: int, exchange_bytes: int) -> Counts:
        """Return the bytes of buffers that do not belong to a unit, [columns].

        Args:
            exchange_bytes: bytes of a rank's symmetric memory.
        """
        found = np.zeros(self.columns.state_size)
        cfg = self.cfg
        found[self.columns.state_column("stage")] = rope_buffer_bytes(cfg.run, cfg.model, cfg.train, cp)
        # A rank counts one set of kinds.
        found[self.columns.first_kind_set :] = exchange_bytes
        return found

    def moments_in_transit(self, mapping: StateMapping, counts: Counts) -> Counts:
        """Return the most bytes of offloaded moments in memory during an update, [ranks].

        Args:
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

        A copy of the embedding on the rank of the first stage has no moments. On another rank it has them.
        """
        sizes: dict[int, list[int]] = {column: self.offloaded_unit(column, mapping) for column in self.units}
        if self.cfg.model.last_stage_needs_embedding:
            embedding = self.columns.state_column("embedding")
            sizes[self.columns.state_column("second_embedding")] = sizes[embedding]
        return sizes

    @memoised(lambda self, column, m: (column, m.tp, m.ep, m.etp, m.degrees))
    def offloaded_unit(self, column: int, mapping: StateMapping) -> list[int]:
        """Return the offloaded moment bytes of each weight, largest first."""
        found = (self._offloaded_bytes(weight, mapping) for weight in self.shards(column, mapping))
        return sorted((size for size in found if size), reverse=True)

    def _offloaded_bytes(self, weight: ParamSpec, mapping: StateMapping) -> int:
        """Return the moment bytes of a weight that are large enough for `optim/state_offload.py` to offload."""
        least = max(self.cfg.train.offload_min_kib * 2**10, 1)
        return sum(size for size, deciding in self._moments(weight, mapping) if deciding >= least)

    @memoised(lambda self, column, m: (column, m.tp, m.ep, m.etp))
    def shards(self, column: int, mapping: StateMapping) -> tuple[ParamSpec, ...]:
        """Return the weights of a unit on a rank of tensor and expert parallelism."""
        return tuple(weight.shard(mapping.tp, mapping.ep, mapping.etp) for weight in self._weights[column])
