"""Bytes of activations by what is counted of them (`moments.Columns`), by the runtime's formula. Torch-free."""

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config, TrainConfig
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.overlap_memory import SNAPSHOT_POINTS, SPLIT_BACKWARD_POINTS, layer_snapshots, recomputes_comm
from moefold.cost.saved_tensors import CPU_KERNELS, CUDA_KERNELS, MEGATRON_KERNELS, BytesByPart, KernelProfile
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.columns import MemoryColumns
from moefold.planner.memory.states import layer_letter
from moefold.planner.model_spec import BF16_BYTES, FeedForward, ModelSpec
from moefold.topology.dispatchers import ALL_GATHER, ALL_TO_ALL, dispatcher_spec

ACTIVATION_PARTS = ("activations", "dispatch", "logits", "pipeline")
PART_GROUPS = {"dispatch buffers": "dispatch", "logits": "logits", "pipeline": "pipeline"}
"""Parts of the ledger that are shown by themselves; the others are activations."""

UNSUPPORTED_LAYER = "foreign"
"""What a layer keeps that the runtime does not know."""

OFFLOAD_RUNS_IN_TRANSIT = 2
"""Runs of an offloaded part that are in memory at most: one on its way out or back, and the next (docs/memory.md)."""

OFFLOADED_LABELS = {
    "norms": ("norms", "residual stream"),
    "core_attention": ("core attention", "attention"),
    "dense_mlp": ("dense MLP",),
    "expert_activation": ("experts", "dispatch buffers"),
    "shared_experts": ("shared experts",),
    "moe": ("router", "dispatch buffers", "experts", "shared experts"),
}
"""What of a layer leaves memory with each part of train.offload, in the ledger's parts; `layer`: everything."""

OFFLOADABLE_LABELS = (
    *dict.fromkeys(label for labels in OFFLOADED_LABELS.values() for label in labels),
    UNSUPPORTED_LAYER,
)

PARTS_NOT_IN_KIND = {"D": frozenset({"moe", "expert_activation", "shared_experts"}), "M": frozenset({"dense_mlp"})}
"""Parts that may run again and that a layer of a kind has not."""

ByteTable = NDArray[np.float64]
MemoryStrategy = tuple[tuple[str, ...], tuple[str, ...]]
"""Parts that run again, and parts whose activations leave memory."""


class MemoryStrategies(tuple[MemoryStrategy, ...]):
    """Thousands of savers that a search asks for again and again: what they share is found once, their hash too."""

    @cached_property
    def recompute_sets(self) -> tuple[tuple[str, ...], ...]:
        """The sets of parts that run again, each once: far fewer than savers."""
        return tuple(dict.fromkeys(recompute for recompute, _ in self))

    @cached_property
    def recompute_set_indices(self) -> NDArray[np.intp]:
        """Number of each one's set among `recompute_sets`, [savers]."""
        number = {recompute: i for i, recompute in enumerate(self.recompute_sets)}
        return np.array([number[recompute] for recompute, _ in self], dtype=np.intp)

    @cached_property
    def recomputes_comm(self) -> NDArray[np.intp]:
        """1 for each one with which exchanges of experts run again, else 0, [savers]."""
        return np.array([recomputes_comm(recompute) for recompute in self.recompute_sets])[
            self.recompute_set_indices
        ].astype(np.intp)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class ActivationMemoryTable:
    """What the layers of one model keep, under any mapping.

    Args:
        model_spec: the model.
        workload: the batch and the routing, whose imbalance the dispatch buffers follow.
        cfg: the recipe; of its mapping nothing counts.
        columns: for the kinds of the model.
        on_cpu: whether the kernels are those of a CPU.
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
        self.model_spec, self.workload, self.columns = model_spec, workload, columns
        moe = replace(cfg.moe, capacity_factor=workload.capacity_factor)
        self.cfg = replace(cfg, moe=moe, train=replace(cfg.train, seq_len=workload.seq_len))
        self.kernel_profile = MEGATRON_KERNELS if workload.is_megatron else CPU_KERNELS if on_cpu else CUDA_KERNELS
        self._recompute_tables: dict[tuple[Any, ...], _RecomputeTable] = {}
        self._layer_cache: dict[tuple[Any, ...], tuple[BytesByPart, dict[int, ByteTable]]] = {}
        self._per_sample_cache: dict[tuple[Any, ...], tuple[ByteTable, ByteTable]] = {}
        self._allgather_may_need_less: dict[tuple[Any, ...], bool] = {}

    def bytes_by_part(self, mapping: ParallelMapping) -> ByteTable:
        """Bytes of one of each column under a mapping, [parts, columns]."""
        recompute, offload = memory_strategy(mapping)
        base, scale = self._recompute_table(mapping, recompute), mapping.mbs / mapping.cp
        table = base.table * scale
        if offload:
            away = _offload_mask((offload,)) @ base.label_bytes.T
            for kind, leaving in enumerate(away[0] * scale):
                column = table[:, self.columns.saved + kind]
                column *= 1 - leaving / column.sum() if leaving else 1.0
            table[0, self.columns.end_column("in_transit")] = OFFLOAD_RUNS_IN_TRANSIT * away.max() * scale
        return self._with_head_columns(table, mapping, axis=1)

    def total_bytes(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> ByteTable:
        """The same without parts, for every saver, [savers, columns]."""
        totals = self._per_sample_tables(mapping, strategies)[0] * (mapping.mbs / mapping.cp)
        return self._with_head_columns(totals, mapping, axis=-1)

    def offloaded_bytes(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> ByteTable:
        """Bytes of one micro-batch that leave memory of one layer of each kind, [savers, kinds]."""
        # It is what rests, whatever runs beside it.
        away: ByteTable = self._per_sample_tables(replace(mapping, overlap=False), strategies)[1] * (
            mapping.mbs / mapping.cp
        )
        return away

    def _per_sample_tables(self, mapping: ParallelMapping, strategies: MemoryStrategies) -> tuple[ByteTable, ByteTable]:
        """Totals and what leaves, of micro-batches of one sample without cp: all of them are linear in the tokens."""
        key = (self.cache_key(mapping), strategies)
        if key not in self._per_sample_cache:
            columns = self.columns
            bases, which = (
                [self._recompute_table(mapping, recompute) for recompute in strategies.recompute_sets],
                strategies.recompute_set_indices,
            )
            totals = np.array([base.column_totals for base in bases])[which]
            masks = _offload_mask(tuple(offload for _, offload in strategies))
            away = np.einsum("sl,skl->sk", masks, np.array([base.label_bytes for base in bases])[which])
            totals[:, columns.saved : columns.saved + columns.num_kinds] -= away
            totals[:, columns.end_column("in_transit")] = OFFLOAD_RUNS_IN_TRANSIT * away.max(axis=1, initial=0.0)
            self._per_sample_cache[key] = totals, away
        return self._per_sample_cache[key]

    def cache_key(self, mapping: ParallelMapping) -> tuple[Any, ...]:
        """What all of it depends on, beside the tokens of a micro-batch."""
        gathers = dispatcher_spec(mapping.dispatcher).gathers_tokens
        # Else ep counts as rows travel over it or not, and by how many of them it can pile up on one rank.
        ep = mapping.ep if gathers or not self.kernel_profile.grouped_experts else min(mapping.ep, 2)
        return (
            mapping.tp,
            mapping.etp,
            ep,
            min(self.workload.effective_imbalance, mapping.ep),
            gathers,
            mapping.overlap,
        )

    def allgather_may_need_less(self, mapping: ParallelMapping) -> bool:
        """Whether tokens that are gathered may need less memory at some moment than rows that are sent."""
        if self.model_spec.config is None:
            return False
        key = (mapping.tp, mapping.ep, mapping.etp, mapping.overlap)
        if key not in self._allgather_may_need_less:
            gathered, sent = (
                _activation_memory(
                    self.cfg,
                    replace(mapping, cp=1, mbs=1, dispatcher=spec.name),
                    (),
                    self.kernel_profile,
                    self.workload.effective_imbalance,
                )
                for spec in (ALL_GATHER, ALL_TO_ALL)
            )
            sizes = [ExpertMemory.expert_outputs, ExpertMemory.combine_buffer]
            sizes += [ExpertMemory.dispatch_comm_buffers, ExpertMemory.combine_comm_buffers] if mapping.overlap else []
            self._allgather_may_need_less[key] = any(
                size(gathered.experts).total() < size(sent.experts).total() for size in sizes
            )
        return self._allgather_may_need_less[key]

    def _recompute_table(self, mapping: ParallelMapping, recompute: tuple[str, ...]) -> "_RecomputeTable":
        key = (*self.cache_key(mapping), recompute)
        if key not in self._recompute_tables:
            self._recompute_tables[key] = _RecomputeTable(
                *self._compute_table(replace(mapping, cp=1, mbs=1), recompute)
            )
        return self._recompute_tables[key]

    def _with_head_columns(self, table: ByteTable, mapping: ParallelMapping, axis: int) -> ByteTable:
        """The columns of the head for these tokens: chunks of the loss have a size of their own."""
        if self.cfg.train.loss_chunk == 0 or self.model_spec.config is None:
            return table
        formula = _activation_memory(self.cfg, mapping, (), self.kernel_profile, self.workload.effective_imbalance)
        for name, parts in self._end_parts(formula).items():
            if name in ("head", "further", "logits", "postponed_head"):
                found = group_parts(parts)
                table[:, self.columns.end_column(name)] = found if axis == 1 else found.sum()
        return table

    def _compute_table(
        self, mapping: ParallelMapping, recompute: tuple[str, ...]
    ) -> tuple[dict[int, BytesByPart], ByteTable]:
        columns = self.columns
        table = np.zeros((len(ACTIVATION_PARTS), columns.size))
        if self.model_spec.config is None:
            return self._unsupported_model_table(mapping, recompute, table)
        formula = _activation_memory(
            self.cfg, mapping, recompute, self.kernel_profile, self.workload.effective_imbalance
        )
        kept: dict[int, BytesByPart] = {}
        for kind in range(columns.num_kinds):
            kept[kind], found = self._layer_bytes(formula, layer_letter(self.model_spec, kind), mapping)
            for first, sizes in found.items():
                table[:, first + kind] = sizes
        for name, parts in self._end_parts(formula).items():
            table[:, columns.end_column(name)] = group_parts(parts)
        return kept, table

    def _layer_bytes(
        self, formula: ActivationMemory, letter: str, mapping: ParallelMapping
    ) -> tuple[BytesByPart, dict[int, ByteTable]]:
        """What a layer of kind "D" or "M" keeps, and its bytes by the first of their columns.

        Many mappings and sets of parts that run again differ in nothing that this kind has.
        """
        degrees = self.cache_key(mapping) if letter == "M" else (mapping.tp,)
        key = (letter, *degrees, formula.recompute - PARTS_NOT_IN_KIND[letter])
        if key not in self._layer_cache:
            columns, kept = self.columns, formula.layer_saved(letter)
            found = {
                columns.at_snapshot_point(moment): group_parts(parts)
                for moment, parts in layer_snapshots(formula, letter).items()
            }
            found[columns.saved] = group_parts(kept)
            found[columns.transient] = group_parts(formula.transient[letter])
            found[columns.recompute_peak] = group_parts(formula.recompute_peak[letter])
            found[columns.delayed_wgrad] = group_parts(formula.delayed_wgrad_layer(letter))
            self._layer_cache[key] = kept, found
        return self._layer_cache[key]

    def _end_parts(self, formula: ActivationMemory) -> dict[str, BytesByPart]:
        return {
            "embedding": formula.embedding(),
            "head": formula.head(),
            "further": formula.mtp_layer() if self.model_spec.mtp_layers else BytesByPart(),
            "logits": BytesByPart(logits=formula.transient_logits),
            "postponed_head": BytesByPart(logits=formula.delayed_wgrad_head),
            "postponed_further": formula.delayed_wgrad_mtp() if self.model_spec.mtp_layers else BytesByPart(),
            "hidden": BytesByPart(pipeline=formula.hidden_bytes),
        }

    def _unsupported_model_table(
        self, mapping: ParallelMapping, recompute: tuple[str, ...], table: ByteTable
    ) -> tuple[dict[int, BytesByPart], ByteTable]:
        """Layers that the runtime does not know: widths of what their mixers and experts keep, in the same columns."""
        tokens, columns = mapping.mbs * self.workload.seq_len / mapping.cp, self.columns
        kept = {}
        for kind in range(columns.num_kinds):
            size = _unsupported_layer_bytes(self.model_spec, kind, mapping, self.workload, recompute) * tokens
            kept[kind] = BytesByPart({UNSUPPORTED_LAYER: round(size)})
            table[0, columns.saved + kind] = kept[kind].total()
        copies = max(routed_tokens_per_token(kind.feed_forward, self.workload) for kind in self.model_spec.kinds)
        dispatch = 2 * tokens / mapping.tp * copies * self.model_spec.hidden_size * BF16_BYTES
        for kind in range(columns.num_kinds):
            table[1, columns.transient + kind] = dispatch
            for moment in SNAPSHOT_POINTS:
                if moment not in SPLIT_BACKWARD_POINTS:
                    table[0, columns.at_snapshot_point(moment) + kind] = table[0, columns.saved + kind]
                    table[1, columns.at_snapshot_point(moment) + kind] = dispatch
        table[2, columns.end_column("head")] = tokens * self.model_spec.vocab_size / mapping.tp * 4
        table[3, columns.end_column("hidden")] = tokens / mapping.tp * self.model_spec.hidden_size * BF16_BYTES
        return kept, table


class _RecomputeTable:
    """What layers keep with some parts that run again, and nothing offloaded."""

    def __init__(self, saved: dict[int, BytesByPart], table: ByteTable) -> None:
        self.table, self.column_totals = table, table.sum(axis=0)
        self.label_bytes = np.array(
            [[saved[kind].get(label, 0) for label in OFFLOADABLE_LABELS] for kind in sorted(saved)], dtype=float
        )


@lru_cache(maxsize=256)
def _offload_mask(offloads: tuple[tuple[str, ...], ...]) -> ByteTable:
    """Which of LABELS leave with each set of parts, [sets, labels]."""
    found = [
        [
            float("layer" in parts or any(label in OFFLOADED_LABELS[part] for part in parts))
            for label in OFFLOADABLE_LABELS
        ]
        for parts in offloads
    ]
    return np.array(found)


def memory_strategy(mapping: ParallelMapping) -> MemoryStrategy:
    """What a mapping does to save activations."""
    return mapping.recompute, tuple(part for part in mapping.offload if part != "optimizer")


def minimal_config(model_spec: ModelSpec, workload: TrainingWorkload) -> Config:
    """A recipe that says nothing but the model and the length of its samples."""
    cfg = Config(train=TrainConfig(seq_len=workload.seq_len))
    return replace(cfg, model=model_spec.config) if model_spec.config is not None else cfg


def group_parts(parts: BytesByPart) -> ByteTable:
    """Bytes by `ACTIVATION_PARTS`."""
    found = np.zeros(len(ACTIVATION_PARTS))
    for part, size in parts.items():
        found[ACTIVATION_PARTS.index(PART_GROUPS.get(part, "activations"))] += size
    return found


@lru_cache(maxsize=4096)
def _activation_memory(
    cfg: Config, mapping: ParallelMapping, recompute: tuple[str, ...], kernel_profile: KernelProfile, imbalance: float
) -> ActivationMemory:
    # What is moved where and when does not change how much of it stays.
    like = ALL_GATHER if dispatcher_spec(mapping.dispatcher).gathers_tokens else ALL_TO_ALL
    parallel = replace(
        cfg.parallel,
        world_size=mapping.tp * mapping.cp * mapping.ep * mapping.etp,
        tp=mapping.tp,
        cp=mapping.cp,
        pp=1,
        ep=mapping.ep,
        etp=mapping.etp,
        dispatcher=cast(Any, like.name),
    )
    train = replace(cfg.train, micro_batch_size=mapping.mbs)
    return ActivationMemory(replace(cfg, parallel=parallel, train=train), recompute, kernel_profile, imbalance)


def _unsupported_layer_bytes(
    model_spec: ModelSpec, kind: int, mapping: ParallelMapping, workload: TrainingWorkload, recompute: tuple[str, ...]
) -> float:
    """Bytes for each token of the rank's tp group."""
    layer, h = model_spec.kinds[kind], model_spec.hidden_size
    if "layer" in recompute:
        return h * BF16_BYTES / mapping.tp
    kept = 0.0
    norm = 0 if "norms" in recompute else h * BF16_BYTES
    if layer.mixer:
        core = 0 if "core_attention" in recompute else layer.mixer.output_width
        kept += (h * BF16_BYTES + norm) / mapping.tp + (layer.mixer.sharded_width + core) * BF16_BYTES / mapping.tp
    if layer.feed_forward:
        kept += (h * BF16_BYTES + norm) / mapping.tp
        kept += _unsupported_experts_bytes(layer.feed_forward, h, mapping, workload, recompute)
    return kept


def _unsupported_experts_bytes(
    layer: FeedForward, h: int, mapping: ParallelMapping, workload: TrainingWorkload, recompute: tuple[str, ...]
) -> float:
    if layer.kind == "dense":
        return 0.0 if "dense_mlp" in recompute else layer.num_matrices * layer.width * BF16_BYTES / mapping.tp
    shared = 0 if "shared_experts" in recompute else layer.num_matrices * layer.shared_width
    if "moe" in recompute:
        return shared * BF16_BYTES / mapping.tp
    rows = routed_tokens_per_token(layer, workload) * mapping.etp
    inner = (layer.num_matrices - ("expert_activation" in recompute)) * layer.width / mapping.etp
    return (shared + rows * (inner + (layer.expert_hidden_size or h))) * BF16_BYTES / mapping.tp


def routed_tokens_per_token(layer: FeedForward | None, workload: TrainingWorkload) -> float:
    """Copies for each token of a rank that its experts receive."""
    if layer is None or layer.kind != "moe":
        return 0.0
    factor = workload.capacity_factor
    return layer.top_k * workload.effective_imbalance * (min(1.0, factor) if factor else 1.0)
