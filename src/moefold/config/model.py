"""The [model] section of a recipe: sizes and kinds of a decoder-only transformer, and layer patterns such as "D3M2"."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from moefold.config.field import POSITIVE, SAME_TENSORS, SHARE, Bound, Judged, Most, ReadIf, at_least
from moefold.config.groups.attention import RecurrentCore
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.rope_scaling import RopeSettings
from moefold.config.layers import Layer, layers_of, rope_of, softmax_attention
from moefold.config.limits import MAX_SAMPLE_TOKENS, MAX_WIDTH
from moefold.config.part import KindOf, Part
from moefold.config.patterns import MAX_LAYERS


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and kinds of a decoder-only transformer. `preset` fills what the recipe leaves out."""

    preset: Annotated[str, SAME_TENSORS, Judged.SIZE] = ""
    """Named model shape (see `moefold train --keys`); keys of the recipe win over keys of the preset."""
    num_layers: Annotated[int, at_least(1), Most(MAX_LAYERS)] = 4
    """Transformer layers, L."""
    hidden_size: Annotated[int, at_least(1), Most(MAX_WIDTH), Judged.SIZE] = 256
    """Width of the residual stream, H."""
    num_attention_heads: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 8
    """Query heads, A."""
    num_query_groups: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 4
    """Key/value heads; equal to num_attention_heads for plain multi-head attention."""
    head_dim: Annotated[int, at_least(0, "0: hidden_size/num_attention_heads"), Most(MAX_WIDTH)] = 0
    """Width of one head, D; 0: hidden_size / num_attention_heads."""
    attention: Annotated[str | Part, KindOf("attention", ("gqa", "mla"), is_flat=True)] = "gqa"
    """gqa: groups of heads share keys and values. mla: multi-head latent attention, keys and values of all heads come
    from one latent (DeepSeek-V2)."""
    q_lora_rank: Annotated[int, at_least(0, "0: no latent"), Most(MAX_WIDTH)] = 0
    """Width of the query latent (mla); 0: queries are projected from the hidden state directly."""
    kv_lora_rank: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 64
    """Width of the key-value latent (mla)."""
    qk_nope_head_dim: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 32
    """Width of the part of a query and key head without RoPE (mla)."""
    qk_rope_head_dim: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 16
    """Width of the part of a query and key head with RoPE, whose key all heads share (mla)."""
    v_head_dim: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 32
    """Width of a value head (mla)."""
    mla_scale_latents: bool = False
    """Multiply the normalised latents by sqrt(hidden_size / rank): rank is q_lora_rank for the query latent and
    kv_lora_rank for the key-value latent (mla; LongCat-Flash)."""
    ffn_hidden_size: Annotated[int, at_least(1), Most(2**26), Judged.SIZE] = 1024
    """Inner width of the SwiGLU of dense layers."""
    vocab_size: Annotated[int, at_least(1), Most(2**31), Judged.SIZE] = 256
    """Rows of the embedding, V. If the recipe does not set it, a tokenizer.json (data.tokenizer) with more ids than the
    preset or the default does: their number, rounded up to a multiple of 64."""
    layer_pattern: Annotated[str, SAME_TENSORS] = "M"
    """D (dense) and M (mixture of experts), each with an optional count; repeats to num_layers: M, DM, D3M58."""
    mtp_layers: Annotated[int, at_least(0, "0: none"), Most(MAX_LAYERS)] = 0
    """Additional tokens that each position predicts in training (multi-token prediction, MTP, arXiv:2412.19437 sec.
    2.2), each through one more layer after the others, of the kind of the last one; 0: none."""
    num_experts: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 8
    """Experts of one MoE layer, E."""
    top_k: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 2
    """Experts chosen for each token, K."""
    zero_experts: Annotated[int, at_least(0, "0: none"), Most(MAX_WIDTH)] = 0
    """Zero-computation experts: further choices of the router, whose output is the layer's input times the routing
    weight, without weights and without dispatch (LongCat-Flash, arXiv:2509.01322); 0: none."""
    active_experts: Annotated[
        float, at_least(0, "0: as all choices"), SAME_TENSORS, ReadIf("model.zero_experts"), ReadIf("model.expert_bias")
    ] = 0.0
    """Mean number of the top_k choices that are experts with computation, to which the expert bias balances
    (zero_experts); 0: top_k * num_experts / (num_experts + zero_experts), as if all choices were equally frequent."""
    moe_ffn_hidden_size: Annotated[int, at_least(1), Most(2**26), Judged.SIZE] = 512
    """Inner width of one expert, F."""
    moe_hidden_size: Annotated[int, at_least(0, "0: none"), Most(MAX_WIDTH)] = 0
    """Width of the tokens that the routed experts compute and that are dispatched, between a projection of the hidden
    state and one back (latent experts, arXiv:2502.16927); router and shared expert keep the hidden size; 0: none."""
    router_softmax: Annotated[str | Part, KindOf("router_softmax", is_flat=True)] = "post"
    """pre: softmax over all experts, then top-k. post: top-k of the logits, then softmax over the chosen (sum 1).
    sparsemixer: each choice has a softmax of its own, over the experts that are not chosen yet and close to the best
    one; training samples from it (SparseMixer-v2, arXiv:2409.12136; Phi-3.5-MoE; see docs/routing.md)."""
    sparsemixer_jitter: Annotated[float, POSITIVE] = 0.01
    """Half the relative distance to the best logit up to which an expert takes part in a choice of sparsemixer."""
    router_score: Annotated[str | Part, KindOf("router_score", is_flat=True)] = "softmax"
    """Score function of the router's logits: softmax over the experts, or per expert (sigmoid: DeepSeek-V3)."""
    router_normalize: bool = True
    """Divide the scores of the chosen experts by their sum (sigmoid, sqrtsoftplus; with softmax, "post" normalises)."""
    router_scaling_factor: Annotated[float, POSITIVE] = 1.0
    """Factor of all routing weights (DeepSeek's routed_scaling_factor)."""
    num_groups: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 1
    """Number of groups of consecutive experts, for group-limited routing (DeepSeek-V2, V3); 1: no limit."""
    top_groups: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 1
    """Number of best-scoring groups from which a token's experts are chosen."""
    expert_bias: bool = False
    """Add a bias to each expert's score for the choice only, updated to balance the load (arXiv:2408.15664)."""
    shared_expert_ffn_hidden_size: Annotated[int, at_least(0, "0: none"), Most(2**26)] = 0
    """Inner width of the shared expert, which processes every token; 0: none."""
    moe_bias: bool = False
    """Biases on the gate, up and down projections of each routed expert (gpt-oss)."""
    moe_activation: Annotated[str | Part, KindOf("activation", is_flat=True)] = "swiglu"
    """Activation of the routed experts. clamped_swiglu: (min(max(up, -l), l) + 1) * g * sigmoid(a * g), g = min(gate,
    l)."""
    swiglu_alpha: Annotated[float, POSITIVE] = 1.702
    """Gain a of the sigmoid of clamped_swiglu; the default is gpt-oss's."""
    swiglu_limit: Annotated[float, POSITIVE] = 7.0
    """Limit l of clamped_swiglu; the default is gpt-oss's."""
    router_probs_on_input: bool = False
    """Multiply the input of a routed expert by the routing weight instead of its output (Llama 4)."""
    router_bias: bool = False
    """Learned bias on the router's logits (gpt-oss)."""
    moe_shortcut: bool = False
    """Add the output of the routed experts of a layer after the next layer, which is dense, instead of in it; the
    output of the shared expert is added in it (shortcut-connected MoE, arXiv:2404.05019; LongCat-Flash)."""
    shared_expert_gate: Annotated[bool, ReadIf("model.shared_expert_ffn_hidden_size")] = False
    """Scale the shared expert's output by a learned sigmoid gate (Qwen2-MoE)."""
    qk_norm: bool = False
    """RMSNorm over the queries and over the keys before RoPE (Qwen3)."""
    qk_norm_width: Literal["head", "all_heads"] = "head"
    """Width of the root mean square: each head separately, or all heads of a token together (OLMoE)."""
    qk_norm_after_rope: bool = False
    """Apply the norm of each query and key head after RoPE instead of before it (Hunyuan)."""
    qk_norm_weight: bool = True
    """Learned weights of the norms of queries and keys; false: they only divide by the root mean square (Llama 4)."""
    qk_norm_nope: bool = True
    """Apply the norms of queries and keys in layers without RoPE (model.rope_pattern) as well."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    """Bias on the output projection of attention (gpt-oss)."""
    attention_sinks: bool = False
    """Learned sink logit per head that takes part in the softmax and contributes no value (gpt-oss)."""
    attention_gate: bool = False
    """Multiply the output of each head by the sigmoid of a projection of the layer's input, before the output
    projection (arXiv:2505.06708)."""
    attention_gate_width: Literal["dim", "head"] = "dim"
    """Gate of attention_gate: one for each dim of a head, or one for the whole head (Ling 3)."""
    attention_scale: Annotated[float, at_least(0, "0: 1/sqrt(head_dim)")] = 0.0
    """Factor of the attention scores (gqa; Granite's attention_multiplier); 0: 1 / sqrt(head_dim)."""
    attention_pattern: Annotated[str, SAME_TENSORS] = "F"
    """F (full), W (within model.sliding_window), C (within chunks of model.attention_chunk_size) and L (linear
    attention, model.linear_attention), each with an optional count; repeats to num_layers: F, WF, W5F, C3F, L3F."""
    sliding_window: Annotated[int, at_least(0, "0: no layer of kind W"), SAME_TENSORS] = 0
    """Sliding window of a layer of kind W: each token attends to itself and the tokens right before it, this many in
    all; 0: no such layers."""
    attention_chunk_size: Annotated[int, at_least(0, "0: no layer of kind C"), SAME_TENSORS] = 0
    """Tokens of an attention chunk of a layer of kind C: a document is divided into chunks of this length from its
    start on, and each token attends to the tokens before it in its chunk (Llama 4); 0: no such layers."""
    linear_attention: Annotated[
        str | Part, KindOf("attention", ("gated_deltanet", "kda", "gla", "short_convolution"), is_flat=True)
    ] = "gated_deltanet"
    """Layers of kind L: delta rule with a decay for each head (gated_deltanet, arXiv:2412.06464) or for each key
    channel (kda: Kimi Delta Attention, arXiv:2510.26692); a decay for each key channel without delta rule (gla: gated
    linear attention, arXiv:2312.06635); or a convolution between two gates, as wide as the hidden state, instead of
    attention (short_convolution: LFM2, arXiv:2511.23404)."""
    linear_num_key_heads: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 4
    """Query and key heads of a layer of kind L; each serves the same number of value heads."""
    linear_num_value_heads: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 4
    """Value heads of a layer of kind L, each with a state of its own; a multiple of linear_num_key_heads."""
    linear_key_head_dim: Annotated[int, at_least(1), Most(MAX_WIDTH)] = 32
    """Width of a query and key head of a layer of kind L."""
    linear_value_head_dim: Annotated[int, at_least(1), Most(MAX_WIDTH), Judged.SIZE] = 32
    """Width of a value head of a layer of kind L."""
    linear_conv_kernel: Annotated[int, at_least(2), Most(MAX_WIDTH), Judged.SIZE] = 4
    """Tokens that the causal convolution of each channel combines (kind L), itself included."""
    linear_conv_bias: bool = False
    """Biases on the convolution and on the projections of a short_convolution (LFM2)."""
    linear_gate_rank: Annotated[int, at_least(1), Most(MAX_WIDTH), Judged.SIZE] = 16
    """Width between the two projections that lead to the decays (gla)."""
    linear_full_rank_gates: bool = False
    """Project the hidden state to decays and output gate directly (kda; Ling 3), not through linear_value_head_dim
    dimensions."""
    linear_decay_bound: Annotated[float, Bound("must be at most 0 (0: none)", lambda bound: bound <= 0)] = 0.0
    """Lower bound of the logarithm of a decay (kda; Ling 3: -5), bound * sigmoid(exp(a_log) * (a + dt_bias)); 0: none,
    and the logarithm is -exp(a_log) * softplus(a + dt_bias)."""
    index_topk: Annotated[int, at_least(0, "0: all keys"), Most(MAX_SAMPLE_TOKENS)] = 0
    """Most keys that a query of softmax attention attends to, selected by an indexer (sparse attention,
    arXiv:2512.02556); 0: all keys."""
    index_heads: Annotated[int, at_least(1), Most(MAX_WIDTH), ReadIf("model.index_topk")] = 4
    """Heads of the indexer of sparse attention, J."""
    index_head_dim: Annotated[int, at_least(1), Most(MAX_WIDTH), ReadIf("model.index_topk")] = 32
    """Width of a head of the indexer; its first dims have RoPE, as many as a head of attention has."""
    index_pattern: Annotated[str, SAME_TENSORS, ReadIf("model.index_topk")] = "F"
    """F (layers with an indexer of their own) and S (layers that attend to the keys which the nearest such layer before
    them selected, arXiv:2603.12201), each with an optional count; repeats to num_layers: F, FS3, F3S3. Layers of kind L
    have no indexer under either letter, MTP layers always have one."""
    index_rope_interleaved: Annotated[bool, ReadIf("model.index_topk")] = False
    """Pairing of the indexer's RoPE dims: 2i with 2i+1 (true, GLM-5), or i with i + half (false, DeepSeek-V3.2)."""
    norm: Annotated[str | Part, KindOf("norm", ("rmsnorm", "layernorm"), is_flat=True)] = "rmsnorm"
    """Norms of the residual stream, including the last one and MTP layers' norms: RMSNorm, or LayerNorm with a weight
    and a bias (arXiv:1607.06450). Norms of heads, of latents and inside linear attention are RMSNorm in any case."""
    norm_placement: Annotated[str | Part, KindOf("residual", is_flat=True)] = "pre"
    """Norms of attention and of the feed-forward network: of the input (pre: Llama), of the output before it is added
    to the residual stream (post: OLMo 2), or of both (both: sandwich norm)."""
    embedding_multiplier: Annotated[float, POSITIVE] = 1.0
    """Factor of the token embeddings (Granite)."""
    residual_multiplier: Annotated[float, POSITIVE] = 1.0
    """Factor of the outputs of attention and of the feed-forward network where they are added to the residual stream
    (Granite)."""
    logits_divisor: Annotated[float, POSITIVE] = 1.0
    """Divisor of the logits (Granite's logits_scaling)."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    head_bias: bool = False
    """Bias on the logits, one for each token of the vocabulary (Phi-3.5-MoE)."""
    zero_centered_norms: bool = False
    """Multiply the output of every RMSNorm by 1 + weight, rounded to run.dtype, with weights that start at 0 (Gemma,
    Qwen3-Next); the norm inside linear attention by its weight."""
    norm_eps: Annotated[float, POSITIVE] = 1e-6
    """Epsilon of every norm except the norms of latents (mla), where it is 1e-6."""
    rope_theta: Annotated[float, Bound("must be greater than 1", lambda base: base > 1)] = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: Annotated[float, SHARE] = 1.0
    """Fraction of each head's dims to which RoPE is applied, in (0, 1]."""
    rope_interleaved: bool = False
    """Pairing of RoPE dims: 2i with 2i+1 (true, DeepSeek), or i with i + half (false, Llama)."""
    rope_pattern: Annotated[str, SAME_TENSORS] = "R"
    """R (RoPE) and N (no position embedding, NoPE), each with an optional count; repeats to num_layers: R, R3N."""
    nope_temperature_scale: Annotated[float, at_least(0, "0: none")] = 0.0
    """Factor a of the attention temperature of layers without RoPE: queries at position p of their document are
    multiplied by 1 + a * ln(1 + floor((p + 1) / nope_temperature_tokens)) (arXiv:2501.19399; Llama 4); 0: none."""
    nope_temperature_tokens: Annotated[int, at_least(1), ReadIf("model.nope_temperature_scale")] = 8192
    """See nope_temperature_scale; positions below this number have temperature 1."""
    rope_scaling: Annotated[str | Part, KindOf("rope_scaling", is_flat=True)] = "none"
    """RoPE scaling for contexts longer than the original one. ntk: rope_theta is multiplied by
    rope_scaling_factor^(R/(R-2)), R rotated dims. longrope: each pair of dims has a divisor of its frequency, and
    another one in sequences longer than the original context (arXiv:2402.13753)."""
    rope_scaling_factor: Annotated[float, at_least(1)] = 1.0
    """RoPE scaling factor, at least 1."""
    rope_original_seq_len: Annotated[int, at_least(1)] = 8192
    """Context length before RoPE scaling (llama3, yarn, longrope)."""
    rope_short_factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one for each pair of rotated dims, where train.seq_len is at most
    rope_original_seq_len (longrope). Commands that only use a model compare the longest sequence instead."""
    rope_long_factors: tuple[float, ...] = ()
    """The same where it is longer."""
    rope_short_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys together with rope_short_factors; 0: sqrt(1 +
    ln(rope_scaling_factor) / ln(rope_original_seq_len))."""
    rope_long_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """The same together with rope_long_factors."""
    rope_low_freq_factor: Annotated[float, POSITIVE] = 1.0
    """Wavelengths above original/low are scaled in full (llama3)."""
    rope_high_freq_factor: Annotated[float, POSITIVE] = 4.0
    """Wavelengths below original/high are not scaled (llama3)."""
    rope_beta_fast: Annotated[float, POSITIVE] = 32.0
    """Pairs that rotate more often than this in the original context are not scaled (yarn, arXiv:2309.00071)."""
    rope_beta_slow: Annotated[float, POSITIVE] = 1.0
    """Pairs that rotate less often than this in the original context are scaled in full (yarn)."""
    rope_truncate: bool = True
    """Round the bounds of yarn's blended range outwards to whole pairs (gpt-oss does not)."""
    rope_attention_factor: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys (yarn); 0: m(rope_mscale) / m(rope_mscale_all_dim) where both are
    given, else m(1), with m(x) = 0.1 * x * ln(rope_scaling_factor) + 1."""
    rope_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """See rope_attention_factor; 0: not given."""
    rope_mscale_all_dim: Annotated[float, at_least(0, "0: not given")] = 0.0
    """See rope_attention_factor; 0: not given. With mla, m(rope_mscale_all_dim) squared scales the scores."""
    init_std: Annotated[float, POSITIVE, SAME_TENSORS, Judged.START] = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""

    upcycle_from: Annotated[str, SAME_TENSORS, Judged.START] = ""
    """Dense checkpoint or Hugging Face folder for upcycling: the experts are copies or slices of its feed-forward
    layers."""
    upcycle_router: Annotated[
        Literal["group", "expert", "zero"], SAME_TENSORS, ReadIf("model.upcycle_from"), Judged.START
    ] = "group"
    """Initial weights of the new routers: one random row per whole copy of the dense layer (group), one per expert, or
    zeros."""
    upcycle_scaling: Annotated[bool, SAME_TENSORS, ReadIf("model.upcycle_from"), Judged.START] = True
    """Scale the experts' weights so that a token's experts add up to the dense layer (arXiv:2410.07524)."""
    upcycle_noise: Annotated[
        float, at_least(0, "0: none"), SAME_TENSORS, ReadIf("model.upcycle_from"), Judged.START
    ] = 0.0
    """Add normal noise to each copied tensor, in units of its standard deviation; 0: none."""

    @cached_property
    def softmax_attention(self) -> Any:
        """Attention of the layers that are not recurrent, an `AttentionPart` without span and indexer."""
        return softmax_attention(self)

    @property
    def num_router_choices(self) -> int:
        """Number of choices of the router: the experts, then the zero-computation experts."""
        return self.num_experts + self.zero_experts

    @cached_property
    def rope(self) -> RopeSettings:
        """RoPE of the layers that have it."""
        return rope_of(self)

    @cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """`layers`, then the MTP (multi-token prediction) layers."""
        return layers_of(self)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Each layer in order, with its attention and its feed-forward network."""
        return self.all_layers[: self.num_layers]

    @cached_property
    def mtp_layer(self) -> Layer:
        """Layer of MTP (multi-token prediction): as the last one, with an indexer of its own."""
        return replace(self, mtp_layers=1).all_layers[-1]

    @property
    def has_linear_attention(self) -> bool:
        """Return whether some layers have linear attention or a convolution, with states of a fixed size."""
        return any(layer.attention.is_recurrent for layer in self.layers)

    @property
    def has_softmax_attention(self) -> bool:
        """Return whether some layers have softmax attention."""
        return not all(layer.attention.is_recurrent for layer in self.layers)

    @property
    def has_linear_convolution(self) -> bool:
        """Return whether some layers have a convolution over neighbouring tokens."""
        return any(isinstance(layer.core, RecurrentCore) and layer.core.conv_width > 0 for layer in self.layers)

    @cached_property
    def block_kinds(self) -> tuple[Layer, ...]:
        """Kind of each layer in order, see `Layer.kind`."""
        return tuple(layer.kind for layer in self.layers)

    @cached_property
    def all_block_kinds(self) -> tuple[Layer, ...]:
        """`block_kinds` followed by the kinds of the MTP (multi-token prediction) layers."""
        return tuple(layer.kind for layer in self.all_layers)

    @cached_property
    def distinct_kinds(self) -> tuple[Layer, ...]:
        """Kinds of layers that the model has, MTP layers included, in order."""
        return tuple(dict.fromkeys(self.all_block_kinds))

    @cached_property
    def routed(self) -> RoutedPart | None:
        """Feed-forward network of the MoE layers, which have the same one; None: there are none."""
        return next((layer.ffn for layer in self.all_layers if isinstance(layer.ffn, RoutedPart)), None)

    @property
    def experts(self) -> RoutedPart:
        """`routed` of a model with MoE layers."""
        assert self.routed is not None, "the model has no MoE layers"
        return self.routed

    @property
    def has_shortcut(self) -> bool:
        """Return whether the output of routed experts is added after the next layer."""
        return self.routed is not None and self.routed.is_shortcut

    @property
    def selected_keys(self) -> int:
        """Most keys that a query of sparse attention attends to; 0: no layer has sparse attention."""
        return next((layer.attention.selector.topk for layer in self.layers if layer.attention.selector), 0)

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the MoE layers, MTP layers included."""
        return tuple(i for i, layer in enumerate(self.all_layers) if layer.ffn.is_routed)

    @property
    def has_rope(self) -> bool:
        """Return whether a layer of softmax attention applies RoPE."""
        return any(layer.attention.has_rope and not layer.attention.is_recurrent for layer in self.layers)

    @property
    def last_stage_needs_embedding(self) -> bool:
        """Return whether the last pipeline stage also needs the embedding (tied embeddings or MTP)."""
        return self.tie_embeddings or self.mtp_layers > 0


def has_moe_layers(model: ModelConfig) -> bool:
    """Return whether any layer of a legal layer pattern is an MoE layer."""
    return any(layer.ffn.is_routed for layer in model.layers)


def has_dense_layers(model: ModelConfig) -> bool:
    """Return whether any layer of a legal layer pattern is dense (SwiGLU)."""
    return not all(layer.ffn.is_routed for layer in model.layers)
