"""Activation memory: bytes of each activation column, by the runtime's formula (numpy)."""

from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.config.chosen import default_part
from moefold.config.groups.dispatcher import DispatcherPart, overrides_any
from moefold.config.layers import Layer
from moefold.config.schema import Config
from moefold.config.sections.train import TrainConfig
from moefold.cost.activation_columns import (
    MAX_OFFLOADED_PARTS_IN_TRANSIT,
    activation_table,
    end_table,
    layer_table,
    offload_mask,
    recomputes_comm,
    without_offloaded,
)
from moefold.cost.activation_memory import ActivationMemory, activation_memory
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.memoised import memoised
from moefold.cost.memory_columns import END_COLUMNS, ByteTable, columns_of
from moefold.cost.recompute_parts import NETWORK_PARTS
from moefold.cost.saved_tensors import CPU_KERNELS, CUDA_KERNELS, MEGATRON_KERNELS, PARTS
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec

MemoryStrategy = tuple[tuple[str, ...], tuple[str, ...]]
"""Parts to recompute, and parts to offload."""


class MemoryStrategies(tuple[MemoryStrategy, ...]):
    """Thousands of memory strategies of a search, with their derived values and hash cached."""

    @cached_property
    def recompute_sets(self) -> tuple[tuple[str, ...], ...]:
        """The distinct sets of parts to recompute, far fewer than strategies."""
        return tuple(dict.fromkeys(recompute for recompute, _ in self))

    @cached_property
    def recompute_set_indices(self) -> NDArray[np.intp]:
        """Index of each strategy's set in `recompute_sets`, [strategies]."""
        number = {recompute: i for i, recompute in enumerate(self.recompute_sets)}
        return np.array([number[recompute] for recompute, _ in self], dtype=np.intp)

    @cached_property
    def offloads(self) -> bool:
        """True if any strategy offloads activations."""
        return any(offload for _, offload in self)

    @cached_property
    def offload_masks(self) -> NDArray[np.float64]:
        """Return which of `PARTS` each strategy offloads: 1 or 0, [strategies, `PARTS`]."""
        return np.array([offload_mask(offload) for _, offload in self], dtype=float)

    @cached_property
    def recomputes_comm(self) -> NDArray[np.intp]:
        """1 for each strategy that recomputes expert all-to-alls, else 0, [strategies]."""
        return np.array([recomputes_comm(recompute) for recompute in self.recompute_sets])[
            self.recompute_set_indices
        ].astype(np.intp)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class ActivationMemoryTable:
    """Activation memory of the layers of one model under any mapping.

    Args:
        workload: the batch and the routing, whose imbalance scales the dispatch buffers.
        cfg: the recipe. Its mapping does not count.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        workload: TrainingWorkload,
        cfg: Config,
        *,
        on_cpu: bool = False,
    ) -> None:
        self.model_spec = model_spec
        self.workload = workload
        self.columns = columns_of(model_spec.kinds)
        self._selects_keys = model_spec.config.selected_keys > 0
        moe = replace(cfg.moe, capacity_factor=workload.capacity_factor)
        self.cfg = replace(cfg, moe=moe, train=replace(cfg.train, seq_len=workload.seq_len))
        self.kernel_profile = CPU_KERNELS if on_cpu else CUDA_KERNELS
        if workload.is_megatron:
            self.kernel_profile = MEGATRON_KERNELS

    def bytes_by_part(self, mapping: ParallelMapping) -> ByteTable:
        """Return the bytes of each activation column under a mapping, [`PARTS`, columns]."""
        recompute, offload = memory_strategy(mapping)
        table = self._one_sample_table(mapping, recompute)
        table = without_offloaded(table, self.columns, offload) * self._samples(mapping)
        table[PARTS.index("logits")] += self._fixed_head_bytes(mapping)
        return table

    def total_bytes(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> ByteTable:
        """Return the sums over parts under every memory strategy, [strategies, columns]."""
        totals: ByteTable = self._per_sample_tables(mapping, strategies)[0] * self._samples(mapping)
        return totals + self._fixed_head_bytes(mapping)

    def offloaded_bytes(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> ByteTable:
        """Return the bytes that a layer of each kind offloads for one micro-batch, [strategies, kinds]."""
        _, offloaded = self._per_sample_tables(mapping, strategies)
        return offloaded * self._samples(mapping)

    def _samples(self, mapping: ParallelMapping) -> float:
        """Return the bytes of a mapping over bytes of the tables, of `_table_mbs` samples over `_table_cp` ranks."""
        return mapping.mbs * self._table_cp(mapping) / (self._table_mbs(mapping) * mapping.cp)

    def _table_mbs(self, mapping: ParallelMapping) -> int:
        """Return the samples of the tables: 1, or all where a block of selected keys is of one of them."""
        return mapping.mbs if self._selects_keys else 1

    def _table_cp(self, mapping: ParallelMapping) -> int:
        return min(mapping.cp, self._max_cp)

    @cached_property
    def _max_cp(self) -> int:
        """Context parallelism beyond which only the tokens of a rank decide its bytes.

        It is 1, or 2 if layers save more under any cp (latent attention pads its values, Ulysses saves outputs twice).
        Sparse attention gathers the keys of all ranks, so its bytes depend on each degree.
        """
        one, two, four = (
            list(self._formula(ParallelMapping(cp=cp, mbs=cp)).saved_by_kind.values()) for cp in (1, 2, 4)
        )
        if two == four:
            return 1 if one == two else 2
        return self.workload.seq_len

    @memoised(lambda self, m, strategies: (self.cache_key(m), strategies))
    def _per_sample_tables(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> tuple[ByteTable, ByteTable]:
        """Return the totals and the offloaded bytes of `_table_mbs` samples over `_table_cp` ranks."""
        columns = self.columns
        bases = [self._recompute_table(mapping, recompute) for recompute in strategies.recompute_sets]
        which = strategies.recompute_set_indices
        totals = np.array([sizes for sizes, _ in bases])[which]
        offloaded = np.einsum("sp,spk->sk", strategies.offload_masks, np.array([saved for _, saved in bases])[which])
        totals[:, columns.layer_slice("saved")] -= offloaded
        in_transit = MAX_OFFLOADED_PARTS_IN_TRANSIT * offloaded.max(axis=1, initial=0.0)
        totals[:, columns.end_column("in_transit")] = in_transit
        return totals, offloaded

    @memoised(lambda self, m: (m.tp, m.ep, m.etp, self._table_cp(m), self._table_mbs(m), m.dispatcher, m.overlap))
    def cache_key(self, mapping: ParallelMapping) -> tuple[Any, ...]:
        """Return the values that decide the tables of a mapping.

        Of ep these are the tokens of the experts and the bytes of their exchanges, which many ep and dispatchers share.
        """
        m = mapping
        key: tuple[Any, ...] = m.tp, self._table_cp(m), self._table_mbs(m), m.overlap
        formula = self._table_formula(m, ())
        for part in (kind.ffn.routed for kind in self.model_spec.kinds):
            if part is not None:
                experts = ExpertMemory(formula, part)
                # Experts that run one after another have a part of the tokens.
                ep = m.ep * m.etp > 1 if self.kernel_profile.grouped_experts else m.ep
                buffers = part.transient(formula).total(), experts.exchange_bytes if m.overlap else None
                key += (m.etp, ep, experts.dispatcher, experts.expert_tokens, *buffers)
        return key

    @memoised(lambda self, m: (m.tp, m.ep, m.etp, m.overlap, m.dispatcher))
    def may_need_less(self, mapping: ParallelMapping) -> bool:
        """Return whether the dispatcher of a mapping may need less memory than the default one at some snapshot."""
        if self.model_spec.config.routed is None:
            return False
        one_sample = replace(mapping, cp=1, mbs=1)
        own, default = (
            self._formula(replace(one_sample, dispatcher=part)).experts
            for part in (mapping.dispatcher, default_part(DispatcherPart))
        )
        sizes = [ExpertMemory.expert_outputs, ExpertMemory.combine_buffer]
        sizes += [ExpertMemory.dispatch_comm_buffers, ExpertMemory.combine_comm_buffers] if mapping.overlap else []
        return any(size(own).total() < size(default).total() for size in sizes)

    def _head_key(self, m: ParallelMapping) -> tuple[Any, ...]:
        return (*(self.cache_key(m) if self.model_spec.config.mtp_layers else (m.tp,)), m.cp, m.mbs)

    @memoised(_head_key)
    def _fixed_head_bytes(self, mapping: ParallelMapping) -> ByteTable:
        """Return the bytes of each column that are not proportional to the tokens: of chunks and tiles of the loss."""
        found = np.zeros(self.columns.size)
        sizes = end_table(self._formula(mapping)) - self._end_table(mapping, ()) * self._samples(mapping)
        # The recomputed parts of the layer of `mtp` change its size by a multiple of the tokens.
        for name in ("head", "mtp", "logits", "delayed_head"):
            found[self.columns.end_column(name)] = sizes[:, END_COLUMNS.index(name)].sum()
        return found

    def _end_key(self, m: ParallelMapping, recompute: tuple[str, ...]) -> tuple[Any, ...]:
        has_layers = self.model_spec.config.mtp_layers > 0
        return (*self.cache_key(m), recompute) if has_layers else (m.tp, self._table_cp(m), self._table_mbs(m))

    @memoised(_end_key)
    def _end_table(self, mapping: ParallelMapping, recompute: tuple[str, ...]) -> ByteTable:
        return end_table(self._table_formula(mapping, recompute))

    @memoised(lambda self, m, recompute: (*self.cache_key(m), recompute))
    def _recompute_table(self, mapping: ParallelMapping, recompute: tuple[str, ...]) -> tuple[ByteTable, ByteTable]:
        """Return the bytes of `_table_mbs` samples over `_table_cp` ranks, and nothing offloaded.

        Returns:
            The sums over parts, [columns].
            The saved bytes of layers, [`PARTS`, kinds].
        """
        table = self._one_sample_table(mapping, recompute)
        return table.sum(axis=0), table[:, self.columns.layer_slice("saved")]

    def _one_sample_table(self, mapping: ParallelMapping, recompute: tuple[str, ...]) -> ByteTable:
        """Return the bytes of `_table_mbs` samples over `_table_cp` ranks, nothing offloaded, [`PARTS`, columns]."""
        formula = self._table_formula(mapping, recompute)
        of_layers = [self._layer_table(formula, layer.kind, mapping) for layer in self.model_spec.kinds]
        return activation_table(of_layers, self._end_table(mapping, recompute))

    def _table_formula(self, mapping: ParallelMapping, recompute: tuple[str, ...]) -> ActivationMemory:
        return self._formula(replace(mapping, cp=self._table_cp(mapping), mbs=self._table_mbs(mapping)), recompute)

    def _layer_key(self, formula: ActivationMemory, layer: Layer, m: ParallelMapping) -> tuple[Any, ...]:
        """Return the parts of the mapping and of the recomputation that a kind of layers has."""
        degrees = self.cache_key(m) if layer.ffn.is_routed else (m.tp, self._table_cp(m), self._table_mbs(m), m.overlap)
        return (layer, *degrees, formula.recompute - (NETWORK_PARTS - layer.ffn.recompute_parts))

    @memoised(_layer_key)
    def _layer_table(self, formula: ActivationMemory, layer: Layer, mapping: ParallelMapping) -> ByteTable:
        return layer_table(formula, layer, overlaps=mapping.overlap)

    def _formula(self, mapping: ParallelMapping, recompute: tuple[str, ...] = ()) -> ActivationMemory:
        """Return the runtime's formula for a mapping, without pipeline stages."""
        imbalance = self.workload.max_over_mean(mapping.ep)
        return activation_memory(self._recipe(mapping), recompute, self.kernel_profile, imbalance)

    @memoised(lambda self, m: (m.tp, m.cp, m.ep, m.etp, m.mbs, m.dispatcher))
    def _recipe(self, mapping: ParallelMapping) -> Config:
        """Return the recipe with a mapping, without pipeline stages."""
        axes = {name: getattr(mapping, name) for name in ("tp", "cp", "ep", "etp")}
        parallel = replace(
            self.cfg.parallel,
            **axes,
            world_size=prod(axes.values()),
            pp=1,
            dispatcher=_like_in_memory(mapping.dispatcher),
        )
        return replace(self.cfg, parallel=parallel, train=replace(self.cfg.train, micro_batch_size=mapping.mbs))


def memory_strategy(mapping: ParallelMapping) -> MemoryStrategy:
    """Return the memory strategy of a mapping."""
    return mapping.recompute, tuple(part for part in mapping.offload if part != "optimizer")


def minimal_config(model_spec: ModelSpec, workload: TrainingWorkload) -> Config:
    """Return a recipe with only the model and the sequence length."""
    return Config(model=model_spec.config, train=TrainConfig(seq_len=workload.seq_len))


def has_own_memory(dispatcher: DispatcherPart) -> bool:
    """Return whether a dispatcher differs from the all-to-all in its saved tokens or in its exchange buffers."""
    return overrides_any(dispatcher, "gathers_tokens", "receive_capacity", "exchange_bytes")


def _like_in_memory(dispatcher: DispatcherPart) -> DispatcherPart:
    """Return the dispatcher whose activations a dispatcher has: itself, or the default one."""
    return dispatcher if has_own_memory(dispatcher) else default_part(DispatcherPart)
