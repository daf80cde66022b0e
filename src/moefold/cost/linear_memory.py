"""Saved tensors of linear attention, by its name; see `block_memory.py`. Torch-free."""

from moefold.cost.block_sizes import BlockMemory, BlockSizes
from moefold.cost.saved_tensors import BytesByPart

LINEAR_CHUNK_SIZE = 64
"""Tokens of a chunk of linear attention, as `CHUNK_SIZE` of ops/linear_attention.py."""


def _saved_by_gated_deltanet(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the projections, from which the recurrence is recomputed, and of its output."""
    key, value, heads = _linear_widths(sizes)
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="attention")
    saved["attention"] += sizes.gathered_bytes(2 * key + 2 * value + 2 * heads)
    saved["core attention"] += sizes.gathered_bytes(value)
    return saved


_TORCH_RECURRENCE = {
    "gated_deltanet": ((3.15, 6.4, 5.0, 4.8, 2.15), (3.2, 3.4, 4.9, 3.8, 2.3)),
    "kda": ((1.7, 3.2, 34.4, 2.5, 0.0), (1.7, 0.1, 34.5, 2.5, 0.0)),
    "gla": ((0.75, 0.0, 29.6, 0.0, 0.0), (0.9, 0.0, 31.4, 0.5, 0.0)),
}
_C_RECURRENCE = {
    "gated_deltanet": ((1.0, 10.2, 3.0, 5.4, 1.0), (1.0, 7.2, 3.0, 4.4, 1.0)),
    "kda": ((2.0, 10.7, 3.5, 4.3, 1.0), (2.0, 7.6, 3.5, 3.3, 1.0)),
    "gla": ((1.0, 2.2, 2.8, 2.4, 1.0), (1.0, 1.7, 2.8, 2.9, 1.0)),
}
"""Numbers in float32 for each token that the recomputed recurrence holds at most, by torch operations and in C, in
float32 and in bfloat16: multiples of the products within a chunk, the keys of the key heads and of the value heads, the
values, and the states between chunks. They are fitted to measurements of ten shapes (docs/log.md); in C the first and
last ones, and three of keys (two without the delta rule), are counted."""


def _transient_gated_deltanet(sizes: BlockSizes) -> BytesByPart:
    key, value, heads = _linear_widths(sizes)
    return _transient_recurrence(sizes, "gated_deltanet", 2 * key + 2 * value + 2 * heads)


def _transient_kda(sizes: BlockSizes) -> BytesByPart:
    return _transient_recurrence(sizes, "kda", _kda_projections(sizes))


def _transient_gla(sizes: BlockSizes) -> BytesByPart:
    return _transient_recurrence(sizes, "gla", _gla_projections(sizes))


def _has_c_kernels(sizes: BlockSizes) -> bool:
    """Return whether linear attention is computed in C, given a compiler."""
    run = sizes.cfg.run
    is_supported = run.dtype != "float64" and sizes.cfg.train.precision == "dtype"
    return sizes.kernels.device_type == "cpu" and run.kernels in ("auto", "c") and is_supported


def _transient_short_convolution(sizes: BlockSizes) -> BytesByPart:
    """Return the temporary bytes of the convolution, which is recomputed in the backward pass (docs/log.md)."""
    width = sizes.cfg.model.hidden_size // sizes.cfg.parallel.tp
    factor = 3.0 if sizes.item_bytes < sizes.high_precision_bytes else 2.0
    numbers = round(sizes.gathered_tokens * factor * width)
    transient = BytesByPart({"core attention": numbers * sizes.high_precision_bytes})
    if "layer" in sizes.recompute:
        transient["attention"] += sizes.gathered_bytes(3 * width)
    return transient


def _transient_recurrence(sizes: BlockSizes, kind: str, projected_width: int) -> BytesByPart:
    """Return the temporary bytes of the recurrence, which is recomputed in the backward pass; within 10 %.

    Args:
        sizes: of the micro-batch.
        kind: of the recurrence.
        projected_width: numbers of a token from which the recurrence is computed.
    """
    model = sizes.cfg.model
    key, value, heads = _linear_widths(sizes)
    in_float32, in_bfloat16 = (_C_RECURRENCE if _has_c_kernels(sizes) else _TORCH_RECURRENCE)[kind]
    factors = in_bfloat16 if sizes.item_bytes < sizes.high_precision_bytes else in_float32
    widths = (
        heads * LINEAR_CHUNK_SIZE,
        key,
        heads * model.linear_key_head_dim,
        value,
        value * model.linear_key_head_dim / LINEAR_CHUNK_SIZE,
    )
    numbers = sum(factor * width for factor, width in zip(factors, widths, strict=True))
    transient = BytesByPart({"core attention": round(sizes.gathered_tokens * numbers * sizes.high_precision_bytes)})
    if "layer" in sizes.recompute:
        # The recomputed layer holds the projections three times, of which its own saved tensors count one (measured).
        transient["attention"] += 2 * sizes.gathered_bytes(projected_width)
    return transient


def _gated_deltanet_wgrad(sizes: BlockSizes) -> BytesByPart:
    key, value, heads = _linear_widths(sizes)
    width = 2 * sizes.cfg.model.hidden_size + 2 * key + 3 * value + 2 * heads
    return BytesByPart(attention=sizes.gathered_bytes(width))


def _saved_by_kda(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the projections, the low ranks of decays and gate among them, and of the output."""
    model = sizes.cfg.model
    num_ranks = 0 if model.linear_full_rank_gates else 2
    return _saved_by_channel_decays(sizes, _kda_projections(sizes), num_ranks * model.linear_value_head_dim)


def _saved_by_gla(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the projections, the low rank of the decays among them, and of the output."""
    return _saved_by_channel_decays(sizes, _gla_projections(sizes), sizes.cfg.model.linear_gate_rank)


def _saved_by_channel_decays(sizes: BlockSizes, projected_width: int, low_ranks: int) -> BytesByPart:
    """Return the bytes that a layer saves whose decays, and maybe gate, are projected through low ranks."""
    _, value, _ = _linear_widths(sizes)
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="attention")
    saved["attention"] += sizes.gathered_bytes(projected_width + low_ranks)
    if low_ranks and sizes.cfg.parallel.tp > 1:
        # The norm's output, for the projections of this rank's own tokens.
        saved["attention"] += sizes.hidden_bytes
    saved["core attention"] += sizes.gathered_bytes(value)
    return saved


def _kda_projections(sizes: BlockSizes) -> int:
    """Return the width of queries, keys, values, decays, gate and write strengths of this rank."""
    key, value, heads = _linear_widths(sizes)
    return 2 * key + 2 * value + heads * (sizes.cfg.model.linear_key_head_dim + 1)


def _gla_projections(sizes: BlockSizes) -> int:
    """Return the width of queries, keys, values, decays and gate of this rank."""
    key, value, heads = _linear_widths(sizes)
    return 2 * key + 2 * value + heads * sizes.cfg.model.linear_key_head_dim


def _kda_wgrad(sizes: BlockSizes) -> BytesByPart:
    model = sizes.cfg.model
    low_ranks = 0 if model.linear_full_rank_gates else 2 * model.linear_value_head_dim
    return _channel_decays_wgrad(sizes, _kda_projections(sizes), low_ranks)


def _gla_wgrad(sizes: BlockSizes) -> BytesByPart:
    return _channel_decays_wgrad(sizes, _gla_projections(sizes), sizes.cfg.model.linear_gate_rank)


def _channel_decays_wgrad(sizes: BlockSizes, projected_width: int, low_ranks: int) -> BytesByPart:
    _, value, _ = _linear_widths(sizes)
    inputs = 3 if low_ranks else 2
    return BytesByPart(
        attention=sizes.gathered_bytes(inputs * sizes.cfg.model.hidden_size + projected_width + value + 2 * low_ranks)
    )


def _saved_by_short_convolution(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the gates and values, from which the convolution is recomputed, and of its output."""
    width = sizes.cfg.model.hidden_size // sizes.cfg.parallel.tp
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="attention")
    saved["attention"] += sizes.gathered_bytes(3 * width)
    saved["core attention"] += sizes.gathered_bytes(width)
    return saved


def _short_convolution_wgrad(sizes: BlockSizes) -> BytesByPart:
    hidden = sizes.cfg.model.hidden_size
    return BytesByPart(attention=sizes.gathered_bytes(2 * hidden + 4 * hidden // sizes.cfg.parallel.tp))


def _linear_widths(sizes: BlockSizes) -> tuple[int, int, int]:
    """Return the widths of this rank's keys and values, and its value heads."""
    model = sizes.cfg.model
    tp = sizes.cfg.parallel.tp
    heads = model.linear_num_value_heads // tp
    return (
        model.linear_num_key_heads // tp * model.linear_key_head_dim,
        heads * model.linear_value_head_dim,
        heads,
    )


LINEAR_ATTENTION_MEMORY = {
    "kda": BlockMemory(saved=_saved_by_kda, delayed_wgrad=_kda_wgrad, transient=_transient_kda),
    "gla": BlockMemory(saved=_saved_by_gla, delayed_wgrad=_gla_wgrad, transient=_transient_gla),
    "short_convolution": BlockMemory(
        saved=_saved_by_short_convolution,
        delayed_wgrad=_short_convolution_wgrad,
        transient=_transient_short_convolution,
    ),
    "gated_deltanet": BlockMemory(
        saved=_saved_by_gated_deltanet, delayed_wgrad=_gated_deltanet_wgrad, transient=_transient_gated_deltanet
    ),
}
"""Memory of each kind of linear attention, by its name in `cost/layer_spec.py`."""
