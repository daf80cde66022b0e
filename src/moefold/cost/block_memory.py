"""Saved tensors of the blocks of a layer, by the name of the block. Torch-free.

Each function lists the tensors that the operations of a block save, the norm before it included. To add a block, add
its entry to `ATTENTION_MEMORY` or `FEED_FORWARD_MEMORY`. Letters as in `activation_memory.py`.
"""

from moefold.config.chosen import chosen
from moefold.config.groups.router_score import RouterScorePart
from moefold.cost.block_sizes import BlockMemory, BlockSizes
from moefold.cost.linear_memory import LINEAR_ATTENTION_MEMORY
from moefold.cost.saved_tensors import INT_BYTES, BytesByPart
from moefold.topology.dispatchers import dispatcher_of

INDEX_BYTES = 4
"""Bytes of the number of a selected key, int32."""
MAX_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of the copies of keys of a block of queries by device type, as in ops/sparse_attention.py."""
WARMUP_SCORE_COPIES = 4.9, 4.3
"""Temporary tensors of the scores of a block of queries in the warm-up of indexers, in float32 and in bfloat16, as
measured (docs/log.md)."""
SELECTION_COPIES = 2.25
"""Temporary numbers of a block over the numbers of its copied keys and values, measured (docs/log.md); more in
bfloat16."""


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


def _sparse_mla_wgrad(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of latent attention in the space of the latents, which delays no gradient of `wkv_up`."""
    model = sizes.cfg.model
    heads = sizes.heads * (model.head_size + model.v_head_dim + model.attention_gate_size)
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
    score = chosen(sizes.cfg, RouterScorePart)
    saved["router"] += sizes.tokens * score.saved_bytes(
        model.top_k, model.num_router_choices, sizes.high_precision_bytes
    )
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


def _saved_by_sparse_gqa(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of grouped-query attention over selected keys, and of its indexer."""
    _, key_value = _gqa_widths(sizes)
    return _saved_by_gqa(sizes) + _saved_by_selection(sizes, key_value)


def _saved_by_shared_gqa(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of grouped-query attention over keys that an earlier layer selected."""
    _, key_value = _gqa_widths(sizes)
    return _saved_by_gqa(sizes) + _saved_by_shared_selection(sizes, key_value)


def _saved_by_sparse_mla(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the latents, of the queries and outputs in their space, and of the indexer."""
    width = sizes.cfg.model.kv_lora_rank + sizes.cfg.model.qk_rope_head_dim
    return _saved_in_latent_space(sizes) + _saved_by_selection(sizes, width)


def _saved_by_shared_mla(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of latent attention over keys that an earlier layer selected."""
    width = sizes.cfg.model.kv_lora_rank + sizes.cfg.model.qk_rope_head_dim
    return _saved_in_latent_space(sizes) + _saved_by_shared_selection(sizes, width)


def _saved_in_latent_space(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the latents, and of the queries and outputs in their space."""
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
    return saved + saved_by_core_attention(sizes, rank)


def _saved_by_selection(sizes: BlockSizes, key_width: int) -> BytesByPart:
    """Return the bytes of the selected keys' numbers, of the gathered keys under cp, and of the indexer."""
    return _saved_by_shared_selection(sizes, key_width) + selection_bytes(sizes)


def selection_bytes(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the selected keys' numbers, which layers that share a selection have once."""
    selected = min(sizes.cfg.model.index_topk, sizes.cfg.train.seq_len)
    return BytesByPart({"core attention": sizes.gathered_tokens * selected * INDEX_BYTES})


def _saved_by_shared_selection(sizes: BlockSizes, key_width: int) -> BytesByPart:
    """Return the bytes of the gathered keys under cp, and of the gradients that the indexer's loss keeps."""
    p = sizes.cfg.parallel
    saved = index_bytes(sizes)
    if p.cp > 1:
        saved["core attention"] += p.cp * sizes.gathered_bytes(key_width)
    return saved


def index_bytes(sizes: BlockSizes) -> BytesByPart:
    """Return the bytes of the queries, weights and keys of an indexer, or of their gradients."""
    model = sizes.cfg.model
    p = sizes.cfg.parallel
    own = model.index_heads * model.index_head_dim * sizes.item_bytes
    own += model.index_heads * sizes.high_precision_bytes + model.index_head_dim * sizes.item_bytes
    return BytesByPart(attention=sizes.tokens * own + p.cp * sizes.gathered_bytes(model.index_head_dim))


def saved_in_warmup(sizes: BlockSizes, *, has_indexer: bool) -> BytesByPart:
    """Return the bytes of a layer of sparse attention in the warm-up, in which only the indexers have gradients.

    Saved are the inputs of the indexer's projections and of its norm, and the gradients of its loss: the keys'
    gradients once for each block of queries.
    """
    model = sizes.cfg.model
    saved = index_bytes(sizes)
    # The loss keeps the gradients of the gathered keys, and nothing of this rank's own.
    saved["attention"] -= sizes.tokens * model.index_head_dim * sizes.item_bytes
    num_own = sizes.cfg.train.seq_len // (sizes.cfg.parallel.cp * sizes.cfg.parallel.tp)
    num_blocks = -(-num_own // _warmup_block_rows(sizes))
    saved["attention"] += (num_blocks - 1) * sizes.cfg.parallel.cp * sizes.gathered_bytes(model.index_head_dim)
    if has_indexer:
        query_rank = model.q_lora_rank if model.attention == "mla" else 0
        widths = model.hidden_size + query_rank + model.index_head_dim
        saved["attention"] += sizes.tokens * (widths * sizes.item_bytes + 2 * sizes.high_precision_bytes)
    return saved


def warmup_loss_bytes(sizes: BlockSizes) -> int:
    """Return the temporary bytes of the loss over all visible keys: of the scores of a block of queries."""
    train = sizes.cfg.train
    scores = _warmup_block_rows(sizes) * sizes.cfg.model.num_attention_heads * train.seq_len * train.micro_batch_size
    copies = WARMUP_SCORE_COPIES[sizes.item_bytes < sizes.high_precision_bytes]
    return round(copies * scores * sizes.high_precision_bytes)


def _warmup_block_rows(sizes: BlockSizes) -> int:
    """Return the queries of a block of this rank, as `LightningIndexer.dense_loss` divides them."""
    model = sizes.cfg.model
    train = sizes.cfg.train
    elements = max(model.num_attention_heads, model.index_heads) * train.seq_len * train.micro_batch_size
    num_own = train.seq_len // (sizes.cfg.parallel.cp * sizes.cfg.parallel.tp)
    return max(1, min(num_own, MAX_BLOCK_ELEMENTS[sizes.kernels.device_type] // elements))


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
    "sparse_mla": BlockMemory(
        saved=_saved_by_sparse_mla, delayed_wgrad=_sparse_mla_wgrad, transient=_transient_sparse_mla
    ),
    "shared_sparse_gqa": BlockMemory(
        saved=_saved_by_shared_gqa, delayed_wgrad=_gqa_wgrad, transient=_transient_sparse_gqa
    ),
    "shared_sparse_mla": BlockMemory(
        saved=_saved_by_shared_mla, delayed_wgrad=_sparse_mla_wgrad, transient=_transient_sparse_mla
    ),
    "gqa": BlockMemory(saved=_saved_by_gqa, delayed_wgrad=_gqa_wgrad),
    "mla": BlockMemory(saved=_saved_by_mla, delayed_wgrad=_mla_wgrad),
    **LINEAR_ATTENTION_MEMORY,
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
