"""Columns of the memory tables: the tensors in memory during a step, counted in units of known size.

A snapshot of a step is a row of counts, which depends on the schedule and the layers of the stages only. Its bytes are
the product with a row of sizes, which depends on the mapping only: for one recipe in `peak_memory.py`, for all mappings
of a search in `planner/memory/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.topology.pipeline_layout import StageParts

Counts = NDArray[np.float64]
"""Counts of the columns, [..., columns]."""
ByteTable = NDArray[np.float64]
"""Bytes of the columns by part, [parts, columns]."""

FORWARD_POINTS = ("before_dispatch", "dispatch", "experts", "combine", "sum")
"""Snapshot points of an MoE layer's forward pass: before and during the dispatch, the experts, during the combine, and
the weighted sum after it. A point counts the memory of this layer only."""
RECOMPUTE_POINTS = ("before_dispatch_recompute", "dispatch_recompute", "experts_recompute", "combine_recompute")
"""The same points while the layer is recomputed. The sum is part of `gradients`."""
BACKWARD_POINTS = ("gradients", "combine_backward", "experts_backward", "dispatch_backward")
"""Snapshot points of the backward pass: before and during the all-to-all of the output gradients, the experts'
backward, and during the all-to-all of their input gradients. A dense layer has `before_dispatch` and `gradients`
only."""
WGRAD_POINTS = ("concurrent_wgrad", "experts_wgrad")
"""Memory that a split backward pass adds to `experts_backward` and to `dispatch_backward`."""
SNAPSHOT_POINTS = (*FORWARD_POINTS, *RECOMPUTE_POINTS, *BACKWARD_POINTS, *WGRAD_POINTS)
"""All snapshot points of a layer in an overlapped pass. The peak before a collective is at least the memory during it,
except `experts_backward` with a split backward pass."""

LAYER_COLUMNS = ("saved", "transient", "recompute_peak", "delayed_wgrad", *SNAPSHOT_POINTS)
"""Activations of layers: saved for backward, temporary while the layer runs, additional while it is recomputed, and
held until the weight-gradient pass. Each has a column for every kind of layers."""
END_COLUMNS = ("embedding", "head", "mtp", "logits", "delayed_head", "delayed_mtp", "hidden", "in_transit")
"""Activations of the embedding, the head and MTP layers, hidden states that are sent or awaited, and offloaded parts
that are copied."""
STATE_COLUMNS = ("embedding", "head", "mtp", "second_embedding", "following_embedding", "stage")
"""States of the ends of the model. The last stage's embedding is "following" on the rank of the first stage."""

COMPARE_BLOCK_ROWS = 32
"""Rows that `drop_dominated` compares with at a time."""


@dataclass(frozen=True)
class MemoryColumns:
    """Column layout for a model with `num_kinds` kinds of layers."""

    num_kinds: int
    moe_kinds: tuple[int, ...] = ()
    """Kinds with experts."""

    def layer_column(self, name: str) -> int:
        """Return the first column of one of `LAYER_COLUMNS`. The others follow by kind."""
        return LAYER_COLUMNS.index(name) * self.num_kinds

    def layer_slice(self, name: str) -> slice:
        """Return the columns of one of `LAYER_COLUMNS`, by kind."""
        first = self.layer_column(name)
        return slice(first, first + self.num_kinds)

    def end_column(self, name: str) -> int:
        """Return the column of one of `END_COLUMNS`."""
        return len(LAYER_COLUMNS) * self.num_kinds + END_COLUMNS.index(name)

    @property
    def size(self) -> int:
        """Number of activation columns."""
        return len(LAYER_COLUMNS) * self.num_kinds + len(END_COLUMNS)

    @property
    def state_size(self) -> int:
        """Number of state columns: layers by kind, `STATE_COLUMNS`, and ranks by the set of their layer kinds."""
        return self.first_kind_set + 2 * self.several_layers

    def state_column(self, name: str) -> int:
        """Return the column of one of `STATE_COLUMNS`."""
        return self.num_kinds + STATE_COLUMNS.index(name)

    @property
    def first_kind_set(self) -> int:
        """First column of ranks by a bit set: the kinds of their layers, MTP layers, and `several_layers`."""
        return self.num_kinds + len(STATE_COLUMNS)

    @property
    def several_layers(self) -> int:
        """Bit of ranks with a stage of more than one layer."""
        return 2 << self.num_kinds

    @property
    def layer_units(self) -> list[int]:
        """State columns of the kinds of layers and of MTP layers, in the order of the bits of a set."""
        return [*range(self.num_kinds), self.state_column("mtp")]

    @cached_property
    def kind_sets(self) -> NDArray[np.int64]:
        """1 where a set without `several_layers` has one of `layer_units`, else 0, [sets, units]."""
        return np.arange(self.several_layers)[:, None] >> np.arange(self.num_kinds + 1) & 1


def columns_of(kinds: Sequence[Layer]) -> MemoryColumns:
    """Return the columns of a model with these distinct kinds of layers."""
    return MemoryColumns(len(kinds), tuple(i for i, kind in enumerate(kinds) if kind.ffn.is_routed))


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Layers of one model chunk."""

    kind_counts: tuple[int, ...]
    """Layers of each kind, MTP layers included."""
    has_embedding: bool
    has_loss: bool
    kinds: tuple[int, ...] = ()
    """Kind of each layer in order, without MTP layers."""
    num_mtp_layers: int = 0
    """MTP layers."""

    @property
    def mtp_layer_kind(self) -> int:
        """Kind of the MTP layers, if there are any."""
        return next(kind for kind, count in enumerate(self.kind_counts) if count > self.kinds.count(kind))


def recipe_chunk(model: ModelConfig, parts: StageParts) -> ModelChunk:
    """Return the layers of a stage, with `ModelConfig.distinct_kinds` as kinds."""
    return chunk_of([model.distinct_kinds.index(kind) for kind in model.all_block_kinds], parts)


def chunk_of(layers: Sequence[int], parts: StageParts) -> ModelChunk:
    """Return the layers of a stage, given the kind of every layer of the model, MTP layers last."""
    kinds = tuple(layers[i] for i in parts.layers)
    own = (*kinds, *layers[len(layers) - parts.num_mtp_layers :])
    counts = tuple(own.count(kind) for kind in range(max(layers) + 1))
    return ModelChunk(counts, parts.has_embedding, parts.has_loss, kinds, parts.num_mtp_layers)


def state_counts(chunks: Sequence[ModelChunk], stages: Sequence[int], columns: MemoryColumns) -> Counts:
    """Return the state counts of a rank, [`MemoryColumns.state_size`]."""
    row = np.zeros(columns.state_size)
    own = [chunks[stage] for stage in stages]
    row[columns.state_column("stage")] = len(own)
    for chunk in own:
        row[columns.state_column("embedding")] += chunk.has_embedding
        row[columns.state_column("head")] += chunk.has_loss
        row[columns.state_column("mtp")] += chunk.num_mtp_layers
        for kind in chunk.kinds:
            row[kind] += 1
    # One stage of the rank runs at a time.
    kinds = {kind for chunk in own for kind in chunk.kinds}
    kind_set = sum(1 << kind for kind in kinds) | any(chunk.num_mtp_layers for chunk in own) << columns.num_kinds
    if max((len(chunk.kinds) + chunk.num_mtp_layers for chunk in own), default=0) > 1:
        kind_set |= columns.several_layers
    row[columns.first_kind_set + kind_set] = 1
    if own and own[-1].has_loss and not own[-1].has_embedding:
        # The last stage's copy of the embedding, if the model needs one; "following" if the rank has the first as well.
        name = "following_embedding" if own[0].has_embedding else "second_embedding"
        row[columns.state_column(name)] += 1
    return row


def drop_dominated(rows: Counts) -> Counts:
    """Drop the rows that are nowhere larger than another row, [rows, columns]."""
    # Sorted by descending sum: only an earlier row can dominate a row. Constant columns are ignored.
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    left = rows.T[(rows != rows[0]).any(axis=0)]
    at = np.arange(len(rows))
    start = 0
    while start < len(at):
        block = left[:, start : start + COMPARE_BLOCK_ROWS]
        rest = left[:, start:]
        is_before = np.arange(rest.shape[1])[:, None] > np.arange(block.shape[1])
        stays = ~((rest[:, :, None] <= block[:, None, :]).all(axis=0) & is_before).any(axis=1)
        left = np.concatenate([left[:, :start], rest[:, stays]], axis=1)
        at = np.concatenate([at[:start], at[start:][stays]])
        start += int(stays[: block.shape[1]].sum())
    return rows[at]
