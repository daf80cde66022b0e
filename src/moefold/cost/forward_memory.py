"""Activation memory of a step of only forward passes. They save nothing, so the largest part decides."""

from collections.abc import Iterator, Sequence

from moefold.config.base.pipeline_actions import SlotRow
from moefold.config.layers import Layer
from moefold.config.sections.train import MAX_COPIED_LOGITS
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.memory_columns import ModelChunk
from moefold.cost.saved_tensors import BytesByPart
from moefold.topology.message_plan import forward_rows, live_messages, plan_messages

PHASES = (("attention", "core attention"), ("dense MLP",), ("experts", "dispatch buffers"), ("shared experts",))
"""Parts of a layer that are in memory at different times. All others are during the whole layer."""
MTP_INPUTS = 3
"""Hidden states of the main model that wait while an MTP layer runs: its two inputs, and the input of the head."""


def forward_activations(formula: ActivationMemory, chunks: Sequence[ModelChunk]) -> BytesByPart:
    """Return the bytes by part of the largest snapshot of a pass through the chunks of a rank, one after another.

    A part of a layer counts as if all that its backward pass would need were in memory at its end: up to a third too
    much.
    """
    snapshots = [snapshot for chunk in chunks for snapshot in _snapshots(formula, chunk)]
    return max(snapshots, key=BytesByPart.total)


def forward_messages(rows: Sequence[SlotRow], stages_by_rank: Sequence[Sequence[int]]) -> list[int]:
    """Return the most hidden states of a rank that wait between stages or are the input of one, in forward passes."""
    if len(rows) == 1:
        return [0]
    rank_of = {stage: rank for rank, stages in enumerate(stages_by_rank) for stage in stages}
    plans = plan_messages(forward_rows(rows), [rank_of[stage] for stage in sorted(rank_of)])
    return [max(live_messages(plan, len(rank_of), overlaps=False)) + 1 for plan in plans]


def _snapshots(formula: ActivationMemory, chunk: ModelChunk) -> Iterator[BytesByPart]:
    for kind in dict.fromkeys(chunk.kinds):
        yield from _layer_phases(formula, formula.model.distinct_kinds[kind])
    if chunk.has_loss:
        yield formula.head() + BytesByPart(logits=_loss_workspace(formula))
    if chunk.num_mtp_layers:
        waiting = BytesByPart({"residual stream": MTP_INPUTS * formula.hidden_bytes})
        for phase in _layer_phases(formula, formula.mtp_kind):
            yield phase + waiting
    if chunk.has_embedding:
        yield formula.embedding()


def _layer_phases(formula: ActivationMemory, kind: Layer) -> Iterator[BytesByPart]:
    layer = formula.saved_by_kind[kind] + formula.transient[kind]
    for own in PHASES:
        if not any(layer[part] for part in own):
            continue
        others = [part for phase in PHASES if phase != own for part in phase]
        found = BytesByPart({part: size for part, size in layer.items() if part not in others})
        if "experts" in own and layer["shared experts"]:
            # Its output waits for the output of the routed experts.
            found["shared experts"] = formula.hidden_bytes
        yield found


def _loss_workspace(formula: ActivationMemory) -> int:
    """Return the bytes of logits in addition to the bytes of `head`."""
    if formula.loss_chunk_tokens:
        return formula.transient_logits
    logits = formula.gathered_tokens * formula.vocab_rows
    return min(logits, MAX_COPIED_LOGITS[formula.kernels.device_type]) * formula.high_precision_bytes
