"""Activation bytes of each memory column of a recipe: layers by kind, and the ends of the model."""

from collections.abc import Iterable, Sequence

import numpy as np

from moefold.config.layers import Layer
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.memory_columns import FORWARD_POINTS, RECOMPUTE_POINTS, ByteTable, columns_of
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
"""Labels of `PARTS` that each part of train.offload offloads; `layer` offloads everything."""


def activation_table(formula: ActivationMemory, layers: Sequence[Layer], offload: Iterable[str] = ()) -> ByteTable:
    """Return the bytes of each column by part, [`PARTS`, `MemoryColumns`].

    Args:
        formula: activation memory of the recipe, or of a mapping of it.
        layers: distinct layers of the model, in the order of the columns.
        offload: parts of `train.offload` whose saved tensors are offloaded between the passes, all of them in time.
    """
    columns = columns_of(layers)
    table = np.zeros((len(PARTS), columns.size))
    sizes = {columns.end_column(name): parts for name, parts in end_columns(formula).items()}
    largest = BytesByPart()
    for column, layer in enumerate(layers):
        found = layer_columns(formula, layer.kind)
        offloaded = offloaded_bytes(found["saved"], offload)
        found["saved"] = found["saved"] - offloaded
        largest = _larger(offloaded, largest)
        sizes |= {columns.layer_column(name) + column: parts for name, parts in found.items()}
    sizes[columns.end_column("in_transit")] = BytesByPart(
        {part: MAX_OFFLOADED_PARTS_IN_TRANSIT * size for part, size in largest.items()}
    )
    for column, parts in sizes.items():
        for part, size in parts.items():
            table[PARTS.index(part), column] = size
    return table


def offloaded_bytes(saved: BytesByPart, offload: Iterable[str]) -> BytesByPart:
    """Return which of the saved bytes of a layer leave its device with these parts of `train.offload`."""
    parts = tuple(offload)
    labels = {label for part in parts for label in OFFLOADED_LABELS.get(part, ())}
    return BytesByPart({label: size for label, size in saved.items() if "layer" in parts or label in labels})


def end_columns(formula: ActivationMemory) -> dict[str, BytesByPart]:
    """Return the bytes of `END_COLUMNS`, without bytes in transit."""
    has_mtp = formula.model.mtp_layers > 0
    return {
        "embedding": formula.embedding(),
        "head": formula.head(),
        "mtp": formula.mtp_layer() if has_mtp else BytesByPart(),
        "logits": BytesByPart(logits=formula.transient_loss),
        "delayed_head": BytesByPart(logits=formula.delayed_wgrad_head),
        "delayed_mtp": formula.delayed_wgrad_mtp() if has_mtp else BytesByPart(),
        "hidden": BytesByPart(pipeline=formula.hidden_bytes),
    }


def layer_columns(formula: ActivationMemory, kind: Layer) -> dict[str, BytesByPart]:
    """Return the bytes of `LAYER_COLUMNS` of a layer of a kind."""
    return {
        "saved": formula.saved_by_kind[kind],
        "transient": formula.transient[kind],
        "recompute_peak": formula.recompute_peak[kind],
        "delayed_wgrad": formula.delayed_wgrad_layer(kind),
        "concurrent_wgrad": formula.delayed_wgrad_concurrent(kind),
        **_snapshot_points(formula, kind),
    }


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
    return dict(
        zip(
            points,
            (
                _larger(before_dispatch, during_dispatch),
                during_dispatch,
                _larger(running_experts, during_combine),
                during_combine,
                summing,
            ),
            strict=True,
        )
    )


def _live_during_dispatch(formula: ActivationMemory, kind: Layer) -> BytesByPart:
    """Return the unsaved live memory of an MoE layer that is recomputed during its dispatch.

    It has the norm's output, the routing and the permutation indices; if the whole layer is recomputed, the residual
    stream too.
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
