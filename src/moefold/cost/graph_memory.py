"""Memory of CUDA graphs (`run.cuda_graphs`): the fixed addresses of their inputs and outputs."""

from collections.abc import Sequence

from moefold.config.layers import Layer
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.memory_columns import ModelChunk
from moefold.cost.saved_tensors import INT_BYTES


def graph_bytes(mode: str, sizes: ActivationMemory, chunks: Sequence[ModelChunk], in_flight: Sequence[int]) -> int:
    """Return the bytes at fixed addresses of a rank's graphs, without saved tensors, which count as activations.

    Each micro-batch between its passes has its own graphs. Not counted: temporaries of the captured passes, and the
    rounding of each memory pool to the allocator's segments. A graph of whole micro-batches has its gradients where
    they are counted anyway, and beyond that only a copy of a micro-batch's columns.

    Args:
        in_flight: micro-batches between their passes, for each stage.
    """
    if mode not in ("attention", "attention_router"):
        return 0
    total = 0
    for chunk, count in zip(chunks, in_flight, strict=True):
        for kind, layers in zip(sizes.model.distinct_kinds, chunk.kind_counts, strict=True):
            total += layers * _attention_bytes(sizes, kind, count)
            if mode == "attention_router" and kind.ffn.is_routed:
                total += layers * _router_bytes(sizes, kind, count)
    return total


def _attention_bytes(sizes: ActivationMemory, kind: Layer, in_flight: int) -> int:
    """Return the bytes of the output, both gradients, weight gradients, and gathered weights, of one layer."""
    weights = _num_weights(kind, "attention.")
    is_gathered = sizes.parallel.world_size > 1
    item = sizes.item_bytes if is_gathered else sizes.high_precision_bytes
    return in_flight * (3 * sizes.hidden_bytes + weights * item) + (weights * item if is_gathered else 0)


def _router_bytes(sizes: ActivationMemory, kind: Layer, in_flight: int) -> int:
    """Return the bytes of input, choices, probabilities, scores and logits with their gradients, and of the weights."""
    value = max(sizes.high_precision_bytes, 8 if sizes.moe.router_dtype == "float64" else 4)
    weights = _num_weights(kind, "ffn.router.") * sizes.high_precision_bytes
    routed = sizes.tokens * sizes.model.experts.top_k * (INT_BYTES + 2 * value)
    scores = 2 * 2 * sizes.tokens * sizes.model.experts.num_choices * value
    samples = sizes.train.micro_batch_size * INT_BYTES
    copies = weights if sizes.parallel.world_size > 1 else 0
    return in_flight * (2 * sizes.hidden_bytes + samples + routed + scores + weights) + copies


def _num_weights(kind: Layer, prefix: str) -> int:
    return sum(w.numel for w in kind.params if w.name.startswith(prefix))
