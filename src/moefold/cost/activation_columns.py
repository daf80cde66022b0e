"""Activation bytes of each memory column of a recipe: layers by kind, and the ends of the model."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moefold.config.layers import Layer
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.memory_columns import (
    END_COLUMNS,
    FORWARD_POINTS,
    LAYER_COLUMNS,
    RECOMPUTE_POINTS,
    ByteTable,
    MemoryColumns,
)
from moefold.cost.saved_tensors import PARTS, BytesByPart
from moefold.topology.collective_order import RECOMPUTED_WITH_COMM

MAX_OFFLOADED_PARTS_IN_TRANSIT = 2
"""Maximum number of offloaded parts in memory: one being copied, and the next (docs/memory.md)."""

OFFLOADED_LABELS = {
    "norms": ("norms", "residual stream"),
    "core_attention": ("core attention", "attention"),
    "dense_mlp": ("dense MLP",),
    "expert_activation": ("experts", "dispatch buffers"),
    "shared_experts": ("shared experts",),
    "moe": ("router", "dispatch buffers", "experts", "shared experts"),
}
"""Labels of `PARTS` that each part of train.offload offloads. `layer` offloads everything."""


def activation_table(of_layers: Sequence[ByteTable], of_ends: ByteTable) -> ByteTable:
    """Return the bytes of each column by part with nothing offloaded, [`PARTS`, `MemoryColumns`].

    Args:
        of_layers: the `layer_table` of each distinct layer of the model, in the order of the columns.
        of_ends: their `end_table`.
    """
    return np.hstack([np.stack(of_layers, axis=-1).reshape(len(PARTS), -1), of_ends])


def layer_table(formula: ActivationMemory, kind: Layer, *, overlaps: bool = True) -> ByteTable:
    """Return the bytes of a layer of a kind by part, [`PARTS`, `LAYER_COLUMNS`].

    Args:
        overlaps: whether two micro-batches may be computed at a time. Otherwise their snapshots have no bytes.
    """
    found = {
        "saved": formula.saved_by_kind[kind],
        "transient": formula.transient[kind],
        "recompute_peak": formula.recompute_peak[kind],
        "delayed_wgrad": formula.delayed_wgrad_layer(kind),
        "concurrent_wgrad": formula.delayed_wgrad_concurrent(kind),
        **(_snapshot_points(formula, kind) if overlaps else {}),
    }
    return _by_part(found, LAYER_COLUMNS)


def _by_part(sizes: Mapping[str, BytesByPart], columns: Sequence[str]) -> ByteTable:
    """Return the sizes of columns, 0 for columns without a size, [`PARTS`, columns]."""
    table = np.zeros((len(PARTS), len(columns)))
    for name, of_parts in sizes.items():
        table[:, columns.index(name)] = [of_parts.get(part, 0) for part in PARTS]
    return table


def without_offloaded(table: ByteTable, columns: MemoryColumns, offload: Iterable[str]) -> ByteTable:
    """Return a table if these parts of `train.offload` are offloaded between the passes, all of them in time."""
    left: ByteTable = table.copy()
    offloaded = table[:, columns.layer_slice("saved")] * offload_mask(offload)[:, None]
    left[:, columns.layer_slice("saved")] -= offloaded
    largest = offloaded[:, offloaded.sum(axis=0).argmax()]
    left[:, columns.end_column("in_transit")] = MAX_OFFLOADED_PARTS_IN_TRANSIT * largest
    return left


def offload_mask(offload: Iterable[str]) -> NDArray[np.bool_]:
    """Return which of `PARTS` these parts of `train.offload` offload."""
    parts = tuple(offload)
    labels = {label for part in parts for label in OFFLOADED_LABELS.get(part, ())}
    return np.array(["layer" in parts or label in labels for label in PARTS])


def end_table(formula: ActivationMemory) -> ByteTable:
    """Return the bytes of `END_COLUMNS` by part, [`PARTS`, columns]. Nothing is in transit."""
    found = {
        "embedding": formula.embedding(),
        "head": formula.head(),
        "logits": BytesByPart(logits=formula.transient_loss),
        "delayed_head": BytesByPart(logits=formula.delayed_wgrad_head),
        "hidden": BytesByPart(pipeline=formula.hidden_bytes),
    }
    if formula.model.mtp_layers:
        found |= {"mtp": formula.mtp_layer(), "delayed_mtp": formula.delayed_wgrad_mtp()}
    return _by_part(found, END_COLUMNS)


def recomputes_comm(recompute: Iterable[str]) -> bool:
    """Return whether these recomputed parts repeat expert collectives before the gradients."""
    return not set(RECOMPUTED_WITH_COMM).isdisjoint(recompute)


def _snapshot_points(formula: ActivationMemory, kind: Layer) -> dict[str, BytesByPart]:
    """Return the live memory of a layer at each of `SNAPSHOT_POINTS` that it has."""
    without_recompute = formula.without_recompute
    running = without_recompute.saved_by_kind[kind] + formula.transient_norm
    if not kind.ffn.is_routed:
        return {"before_dispatch": running, "gradients": running}
    snapshots = _forward_snapshots(formula, kind, FORWARD_POINTS)
    saved_memory = formula
    gradients = running
    if recomputes_comm(formula.recompute):
        saved_memory = without_recompute
        recompute_snapshots = _forward_snapshots(without_recompute, kind, (*RECOMPUTE_POINTS, "sum"))
        gradients = _larger(recompute_snapshots.pop("sum"), running)
        snapshots |= recompute_snapshots
    all_saved = (
        saved_memory.saved_by_kind[kind]
        - saved_memory.experts.expert_outputs()
        - BytesByPart({"residual stream": formula.hidden_bytes})
    )
    return snapshots | {
        "gradients": _larger(gradients, all_saved),
        "combine_backward": all_saved,
        "experts_backward": all_saved + (without_recompute.experts.fc1_outputs() - saved_memory.experts.fc1_outputs()),
        "dispatch_backward": all_saved - saved_memory.experts.saved_by_experts(),
        "experts_wgrad": BytesByPart(experts=formula.delayed_wgrad_layer(kind)["experts"]),
    }


def _forward_snapshots(formula: ActivationMemory, kind: Layer, points: tuple[str, ...]) -> dict[str, BytesByPart]:
    """Return the live memory of an MoE layer's forward pass, or of its recomputation."""
    without_recompute = formula.without_recompute
    experts = formula.experts
    output = BytesByPart({"residual stream": formula.hidden_bytes})
    indices = experts.permute_indices()
    comm_buffers = experts.dispatch_comm_buffers()
    # The shared expert runs during the dispatch.
    before_dispatch = (
        without_recompute.saved_by_kind[kind]
        - output
        - without_recompute.experts.saved()
        + indices
        + comm_buffers
        + formula.transient_norm
    )
    saves = not recomputes_comm(formula.recompute)
    live = (
        formula.saved_by_kind[kind] - output - experts.saved() + indices
        if saves
        else _live_during_dispatch(formula, kind)
    )
    live["shared experts"] += formula.hidden_bytes if without_recompute.saved_by_kind[kind]["shared experts"] else 0
    all_outputs = BytesByPart(experts=experts.expert_tokens * experts.token_bytes)
    saved_by_experts = experts.saved_by_experts() - indices if saves else BytesByPart()
    during_dispatch = live + comm_buffers
    during_combine = live + saved_by_experts + experts.combine_comm_buffers()
    running_experts = (
        live + without_recompute.experts.saved_by_experts() - indices + all_outputs + experts.expert_transient()
    )
    summing = live + saved_by_experts + experts.expert_outputs() + experts.combine_buffer()
    before_dispatch = _larger(before_dispatch, during_dispatch)
    running_experts = _larger(running_experts, during_combine)
    live_at = (before_dispatch, during_dispatch, running_experts, during_combine, summing)
    return dict(zip(points, live_at, strict=True))


def _live_during_dispatch(formula: ActivationMemory, kind: Layer) -> BytesByPart:
    """Return the unsaved live memory of an MoE layer that is recomputed during its dispatch.

    It has the norm's output, the routing and the permutation indices. If the whole layer is recomputed, it also has the
    residual stream.
    """
    live = BytesByPart(router=formula.without_recompute.saved_by_kind[kind]["router"])
    if "layer" in formula.recompute:
        return (
            live
            + formula.experts.permute_indices()
            + BytesByPart({"norms": formula.hidden_bytes, "residual stream": formula.hidden_bytes})
        )
    return live + formula.saved_by_kind[kind] - BytesByPart({"residual stream": formula.hidden_bytes})


def _larger(one: BytesByPart, other: BytesByPart) -> BytesByPart:
    return one if one.total() >= other.total() else other
