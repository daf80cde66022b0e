"""Saved tensors of the blocks of a layer, by the name of the block. Torch-free.

Each function lists the tensors that the operations of a block save, the norm before it included. To add a block, add
its entry to `ATTENTION_MEMORY` or `FEED_FORWARD_MEMORY`. Letters as in `activation_memory.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.schema import Config
from moefold.cost.expert_memory import ExpertMemory
from moefold.cost.saved_tensors import INT_BYTES, BytesByPart, KernelProfile
from moefold.cost.unit_memory import compute_dtype_bytes
from moefold.topology.dispatchers import dispatcher_of

INDEX_BYTES = 4
"""Bytes of the number of a selected key, int32."""
MAX_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of the copies of keys of a block of queries by device type, as in ops/sparse_attention.py."""
SELECTION_COPIES = 2.25
"""Temporary numbers of a block over those of its copied keys and values, measured (docs/log.md); more in bfloat16."""
LINEAR_CHUNK_SIZE = 64
"""Tokens of a chunk of linear attention, as `CHUNK_SIZE` of ops/linear_attention.py."""


class BlockSizes:
    """Sizes of one micro-batch on one rank, on which the saved tensors of a block depend.

    Args:
        cfg: a recipe that `check_config` passed.
        recompute: parts that are recomputed.
        kernels: kernel profile of the device.
        imbalance: routed tokens of the busiest rank over the mean of all ranks.
    """

    def __init__(self, cfg: Config, recompute: frozenset[str], kernels: KernelProfile, imbalance: float) -> None:
        p = cfg.parallel
        train = cfg.train
        self.cfg = cfg
        self.recompute = recompute
        self.kernels = kernels
        self.imbalance = imbalance
        self.item_bytes = compute_dtype_bytes(cfg)
        self.high_precision_bytes = max(4, self.item_bytes)
        self.gathered_tokens = train.seq_len // p.cp * train.micro_batch_size
        self.tokens = self.gathered_tokens // p.tp
        self.experts = ExpertMemory(cfg, recompute, kernels, imbalance)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state of every token between the sub-layers."""
        return self.tokens * self.cfg.model.hidden_size * self.item_bytes

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.cfg.model.num_attention_heads // self.cfg.parallel.tp

    def gathered_bytes(self, width: int) -> int:
        """Return the bytes of values of a width for every token inside the sub-layers."""
        return self.gathered_tokens * self.item_bytes * width

    def norm(self, tokens: int, width: int, *, full_width: bool = False) -> int:
        """Return the bytes that a norm saves besides its input and output: one number per token.

        A norm over all heads together consists of single operations: it also saves the normalised values, and in
        bfloat16 these and its input in float32.
        """
        if not full_width:
            return tokens * self.high_precision_bytes
        return tokens * (
            width * self.high_precision_bytes * (1 if self.item_bytes == self.high_precision_bytes else 2)
            + self.high_precision_bytes
        )

    def hidden_norm(self) -> int:
        """Return the bytes that a norm of the residual stream saves besides its input and output.

        LayerNorm saves two numbers per token.
        """
        return self.norm(self.tokens, self.cfg.model.hidden_size) * (2 if self.cfg.model.norm == "layernorm" else 1)

    def norm_with_output(self, *, saves_output: bool, part: str = "") -> BytesByPart:
        """Return the bytes of a norm of the residual stream with its output, or with the output gathered over tp.

        A norm of the block's output saves its input, which nothing else saves.
        """
        saved = BytesByPart()
        hidden = self.cfg.model.hidden_size
        placement = self.cfg.model.norm_placement
        if placement != "pre":
            saved["norms"] += self.hidden_norm() + self.hidden_bytes
        if "norms" not in self.recompute and placement != "post":
            saved["norms"] += self.hidden_norm()
            saved["norms"] += self.hidden_bytes if saves_output else 0
        if self.cfg.parallel.tp > 1 and part:
            saved[part] += self.gathered_bytes(hidden)
        return saved

    def swiglu(self, width: int) -> int:
        """Return the bytes that a SwiGLU saves: gate, its SiLU, up and their product."""
        num_saved = 3 if self.kernels.fused_swiglu else 4
        return num_saved * self.gathered_bytes(width) // self.cfg.parallel.tp

    def swiglu_wgrad(self, width: int) -> int:
        """Return the bytes of the GEMM inputs and output gradients of a SwiGLU."""
        return self.gathered_bytes(2 * self.cfg.model.hidden_size + 3 * width // self.cfg.parallel.tp)


def _nothing(sizes: BlockSizes) -> BytesByPart:
    return BytesByPart()


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Activation bytes of one kind of attention, or of feed-forward network."""

    saved: Callable[[BlockSizes], BytesByPart]
    """Saved for backward, without the input."""
    delayed_wgrad: Callable[[BlockSizes], BytesByPart]
    """GEMM inputs and output gradients, which a split backward pass holds."""
    concurrent_wgrad: Callable[[BlockSizes], BytesByPart] = _nothing
    """Delayed weight-gradient bytes that exist while the saved tensors do."""
    transient: Callable[[BlockSizes], BytesByPart] = _nothing
    """Peak of temporary bytes while the block runs or is recomputed."""
    saved_if_recomputed: Callable[[BlockSizes], BytesByPart] = _nothing
    """Saved even if the whole layer is recomputed."""


def _saved_by_gqa(sizes: BlockSizes) -> BytesByPart:
    model = sizes.cfg.model
    query, key_value = _gqa_widths(sizes)
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="attention")
    saved["attention"] += sizes.gathered_bytes(query + key_value)
    if model.qk_norm:
        width = query + key_value // 2
        over_heads = model.qk_norm_width == "all_heads"
        saved["norms"] += sizes.norm(sizes.gathered_tokens, width, full_width=over_heads) + sizes.gathered_bytes(width)
    saved["attention"] += _saved_by_gate(sizes)
    return saved + saved_by_core_attention(sizes, model.head_size)


def _saved_by_gate(sizes: BlockSizes) -> int:
    """Return the bytes of the sigmoid of the output gate, and of its product with the heads."""
    model = sizes.cfg.model
    width = (model.attention_gate_size + model.value_head_size) if model.attention_gate else 0
    return sizes.gathered_bytes(sizes.heads * width)


def _gqa_wgrad(sizes: BlockSizes) -> BytesByPart:
    query, key_value = _gqa_widths(sizes)
    projected = 2 * query + sizes.heads * sizes.cfg.model.attention_gate_size + key_value
    return BytesByPart(attention=sizes.gathered_bytes(2 * sizes.cfg.model.hidden_size + projected))


def _gqa_widths(sizes: BlockSizes) -> tuple[int, int]:
    """Return the widths of this rank's queries, and of its keys and values together."""
    model = sizes.cfg.model
    groups = max(1, model.num_query_groups // sizes.cfg.parallel.tp)
    return sizes.heads * model.head_size, 2 * groups * model.head_size


def _saved_by_mla(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the latents, and of the heads projected from them."""
    model = sizes.cfg.model
    rank = model.kv_lora_rank
    rope = model.qk_rope_head_dim
    query_rank = model.q_lora_rank
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="attention")
    saved["attention"] += sizes.gathered_bytes((query_rank or model.hidden_size) + rank + rope)
    saved["attention"] += sizes.tokens * sizes.item_bytes * (query_rank + rank + rope)
    saved["norms"] += sizes.norm(sizes.tokens, query_rank + rank)
    saved["attention"] += _saved_by_latent_gate(sizes)
    if "mla_up" not in sizes.recompute:
        saved["attention"] += sizes.gathered_bytes(sizes.heads * _mla_head_widths(sizes))
    return saved + saved_by_core_attention(sizes, model.v_head_dim)


def _saved_by_latent_gate(sizes: BlockSizes) -> int:
    """Return the bytes of the output gate of latent attention."""
    model = sizes.cfg.model
    saved = _saved_by_gate(sizes)
    if model.attention_gate and model.q_lora_rank and sizes.cfg.parallel.tp > 1:
        # The norm's output, of which the gate's projection has its own all-gather.
        saved += sizes.hidden_bytes
    return saved


def _mla_head_widths(sizes: BlockSizes) -> int:
    """Return the saved numbers of a head for each token: of its query, its key and its value."""
    model = sizes.cfg.model
    p = sizes.cfg.parallel
    shares_work = p.context == "planned" and "balanced" in (p.attention_hosts, p.placement)
    attends_in_blocks = shares_work or (p.cp > 1 and p.context != "ulysses")
    has_windows = any(model.layer_windows)
    if (
        sizes.kernels.narrow_values
        and not attends_in_blocks
        and not has_windows
        and model.v_head_dim <= model.head_size
    ):
        return 2 * model.head_size + model.v_head_dim
    width = max(model.head_size, model.v_head_dim)
    # Values without padding are saved with the non-rotated keys, of which they are a view.
    values = width if width > model.v_head_dim else model.qk_nope_head_dim + model.v_head_dim
    return 2 * width + values


def _mla_wgrad(sizes: BlockSizes) -> BytesByPart:
    model = sizes.cfg.model
    heads = sizes.heads * (3 * model.head_size + model.v_head_dim + model.attention_gate_size)
    return BytesByPart(attention=sizes.gathered_bytes(2 * model.hidden_size + heads))


def saved_by_core_attention(sizes: BlockSizes, value_head_size: int) -> BytesByPart:
    """Return the bytes of the output of the heads, and of the logarithms of their softmax sums."""
    p = sizes.cfg.parallel
    # Ulysses saves the output twice: all tokens of some heads, and some tokens of all heads.
    copies = 2 if p.cp > 1 and p.context == "ulysses" else 1
    output = sizes.gathered_bytes(sizes.heads * value_head_size) * copies
    is_recomputed = "core_attention" in sizes.recompute
    log_sum = 0 if is_recomputed else sizes.gathered_tokens * sizes.heads * sizes.high_precision_bytes
    return BytesByPart({"core attention": output + log_sum})


def _saved_by_dense(sizes: BlockSizes) -> BytesByPart:
    if "dense_mlp" in sizes.recompute:
        return sizes.norm_with_output(saves_output=True)
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="dense MLP")
    saved["dense MLP"] += sizes.swiglu(sizes.cfg.model.ffn_hidden_size)
    return saved


def _dense_wgrad(sizes: BlockSizes) -> BytesByPart:
    return BytesByPart({"dense MLP": sizes.swiglu_wgrad(sizes.cfg.model.ffn_hidden_size)})


def _saved_by_moe(sizes: BlockSizes) -> BytesByPart:
    model = sizes.cfg.model
    p = sizes.cfg.parallel
    if "moe" in sizes.recompute:
        return sizes.norm_with_output(saves_output=True) + sizes.experts.permute_indices()
    has_shared = model.shared_expert_ffn_hidden_size > 0
    # The router saves its input in the compute type, whoever else does.
    saved = sizes.norm_with_output(saves_output=True)
    if has_shared and "shared_experts" not in sizes.recompute:
        saved["shared experts"] += sizes.swiglu(model.shared_expert_ffn_hidden_size)
        saved["shared experts"] += sizes.gathered_bytes(model.hidden_size) if p.tp > 1 else 0
    if model.moe_hidden_size:
        # The input of the projection back.
        saved["shared experts"] += sizes.tokens * model.moe_hidden_size * sizes.item_bytes
    routing_bytes = 2 * model.num_router_choices * sizes.high_precision_bytes + model.top_k * (
        sizes.high_precision_bytes + INT_BYTES
    )
    saved["router"] += sizes.tokens * routing_bytes
    if model.router_softmax == "sparsemixer":
        # For each choice a softmax and two masks.
        saved["router"] += sizes.tokens * model.top_k * model.num_router_choices * (sizes.high_precision_bytes + 2)
    if sizes.cfg.moe.input_jitter:
        # The noise and the product with it, in the type of the logits.
        saved["router"] += 2 * sizes.tokens * model.hidden_size * sizes.high_precision_bytes
    return saved + sizes.experts.saved()


def _moe_wgrad(sizes: BlockSizes) -> BytesByPart:
    model = sizes.cfg.model
    delayed = BytesByPart()
    if not dispatcher_of(sizes.cfg).moves_experts:
        width = 2 * model.expert_hidden_size + 3 * model.moe_ffn_hidden_size // sizes.cfg.parallel.etp
        delayed["experts"] = sizes.experts.expert_tokens * sizes.item_bytes * width
    if model.shared_expert_ffn_hidden_size:
        delayed["shared experts"] = sizes.swiglu_wgrad(model.shared_expert_ffn_hidden_size)
    if model.moe_hidden_size:
        widths = 2 * (model.hidden_size + model.moe_hidden_size)
        delayed["shared experts"] += sizes.tokens * sizes.item_bytes * widths
    return delayed


def _concurrent_moe_wgrad(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the hidden values and inner gradients of looped experts.

    Experts that run one after another free their inner projections when the last expert is done.
    """
    model = sizes.cfg.model
    if sizes.kernels.grouped_experts or dispatcher_of(sizes.cfg).moves_experts:
        return BytesByPart()
    # The output gradient replaces the output where that is saved.
    inner = 3 * model.moe_ffn_hidden_size // sizes.cfg.parallel.etp
    width = inner + model.expert_hidden_size * sizes.experts.applies_probs
    return BytesByPart(experts=sizes.experts.expert_tokens * sizes.item_bytes * width)


def _transient_moe(sizes: BlockSizes) -> BytesByPart:
    """Return the peak of temporary bytes of the routed experts: one expert at work, or the combine."""
    p = sizes.cfg.parallel
    experts = sizes.experts
    combine_bytes = experts.combine_buffer()
    if p.ep * p.etp > 1:
        # Outputs in expert order and in sender order; before that, the partial sums of all etp ranks are added.
        outputs = experts.expert_tokens * experts.token_bytes
        reduce_bytes = outputs if p.etp > 1 else 0
        combine_bytes = BytesByPart({"dispatch buffers": 2 * outputs + max(combine_bytes.total(), reduce_bytes)})
        combine_bytes = max(combine_bytes, experts.allgather_combine_buffer(), key=BytesByPart.total)
    return max(experts.expert_transient(), combine_bytes, key=BytesByPart.total)


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


def _saved_by_sparse_gqa(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of grouped-query attention over selected keys, and of its indexer."""
    _, key_value = _gqa_widths(sizes)
    return _saved_by_gqa(sizes) + _saved_by_selection(sizes, key_value)


def _saved_by_sparse_mla(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the latents, of the queries and outputs in their space, and of the indexer."""
    model = sizes.cfg.model
    rank = model.kv_lora_rank
    key = rank + model.qk_rope_head_dim
    query_rank = model.q_lora_rank
    saved = sizes.norm_with_output(saves_output=sizes.cfg.parallel.tp == 1, part="attention")
    saved["attention"] += sizes.gathered_bytes((query_rank or model.hidden_size) + rank + model.qk_rope_head_dim)
    saved["attention"] += sizes.tokens * sizes.item_bytes * (query_rank + key)
    saved["norms"] += sizes.norm(sizes.tokens, query_rank + rank)
    saved["attention"] += _saved_by_latent_gate(sizes)
    # Queries of the heads without RoPE, queries in the space of the latents, and values of the heads.
    saved["attention"] += sizes.gathered_bytes(sizes.heads * (model.head_size + key + model.v_head_dim) + key)
    return saved + saved_by_core_attention(sizes, rank) + _saved_by_selection(sizes, key)


def _saved_by_selection(sizes: BlockSizes, key_width: int) -> BytesByPart:
    """Return the bytes of the selected keys' numbers, of the gathered keys under cp, and of the indexer.

    The indexer saves its queries, weights and keys as the gradients of its loss.
    """
    model = sizes.cfg.model
    p = sizes.cfg.parallel
    selected = min(model.index_topk, sizes.cfg.train.seq_len)
    saved = BytesByPart({"core attention": sizes.gathered_tokens * selected * INDEX_BYTES})
    if p.cp > 1:
        saved["core attention"] += p.cp * sizes.gathered_bytes(key_width)
    own = model.index_heads * model.index_head_dim * sizes.item_bytes
    own += model.index_heads * sizes.high_precision_bytes + model.index_head_dim * sizes.item_bytes
    saved["attention"] += sizes.tokens * own + p.cp * sizes.gathered_bytes(model.index_head_dim)
    return saved


def _transient_sparse_gqa(sizes: BlockSizes) -> BytesByPart:
    key_value = _gqa_widths(sizes)[1]
    return _transient_selection(sizes, key_value, key_value // 2, (SELECTION_COPIES, 2.65))


def _transient_sparse_mla(sizes: BlockSizes) -> BytesByPart:
    width = sizes.cfg.model.kv_lora_rank + sizes.cfg.model.qk_rope_head_dim
    return _transient_selection(sizes, width, width, (SELECTION_COPIES, 3.0))


def _transient_selection(
    sizes: BlockSizes, copied_width: int, key_width: int, copies: tuple[float, float]
) -> BytesByPart:
    """Return the temporary bytes of a block of queries in the backward pass: copies of its keys and their gradients."""
    model = sizes.cfg.model
    train = sizes.cfg.train
    selected = min(model.index_topk, train.seq_len)
    rows_of_block = MAX_BLOCK_ELEMENTS[sizes.kernels.device_type] // (selected * max(key_width, sizes.heads))
    rows = max(1, min(train.seq_len // sizes.cfg.parallel.cp, rows_of_block))
    is_low_precision = sizes.item_bytes < sizes.high_precision_bytes
    numbers = copies[is_low_precision] * rows * selected * copied_width
    return BytesByPart({"core attention": round(numbers * sizes.high_precision_bytes)})


ATTENTION_MEMORY = {
    "sparse_gqa": BlockMemory(saved=_saved_by_sparse_gqa, delayed_wgrad=_gqa_wgrad, transient=_transient_sparse_gqa),
    "sparse_mla": BlockMemory(saved=_saved_by_sparse_mla, delayed_wgrad=_mla_wgrad, transient=_transient_sparse_mla),
    "gqa": BlockMemory(saved=_saved_by_gqa, delayed_wgrad=_gqa_wgrad),
    "mla": BlockMemory(saved=_saved_by_mla, delayed_wgrad=_mla_wgrad),
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
"""Memory of each attention, by its name in `cost/layer_spec.py`."""

FEED_FORWARD_MEMORY = {
    "D": BlockMemory(saved=_saved_by_dense, delayed_wgrad=_dense_wgrad),
    "M": BlockMemory(
        saved=_saved_by_moe,
        delayed_wgrad=_moe_wgrad,
        concurrent_wgrad=_concurrent_moe_wgrad,
        transient=_transient_moe,
        saved_if_recomputed=lambda sizes: sizes.experts.permute_indices(),
    ),
}
"""Memory of each feed-forward network, by its letter in `model.layer_pattern`."""
