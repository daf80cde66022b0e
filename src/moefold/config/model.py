"""The [model] section of a recipe: sizes and kinds of a decoder-only transformer. See `config/schema.py`."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from moefold.config.layer_pattern import expand_layer_pattern, layer_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and kinds of a decoder-only transformer. `preset` fills what the recipe leaves out."""

    preset: str = ""
    """A named shape (see `moefold train --keys`); every key given beside it wins over the preset."""
    num_layers: int = 4
    """Transformer layers, L."""
    hidden_size: int = 256
    """Width of the residual stream, H."""
    num_attention_heads: int = 8
    """Query heads, A."""
    num_query_groups: int = 4
    """Key/value heads; equal to num_attention_heads for plain multi-head attention."""
    head_dim: int = 0
    """Width of one head, D; 0 means hidden_size / num_attention_heads."""
    attention: Literal["gqa", "mla"] = "gqa"
    """gqa: groups of heads share keys and values. mla: one latent makes those of all heads (DeepSeek-V2)."""
    q_lora_rank: int = 0
    """Width of the latent from which queries come (mla); 0: straight from the hidden state."""
    kv_lora_rank: int = 64
    """Width of the latent from which keys and values come (mla)."""
    qk_nope_head_dim: int = 32
    """Width of the part of a query and key head that RoPE leaves alone (mla)."""
    qk_rope_head_dim: int = 16
    """Width of the rotated part, whose key all heads share (mla)."""
    v_head_dim: int = 32
    """Width of a value head (mla)."""
    ffn_hidden_size: int = 1024
    """Inner width of the SwiGLU of dense layers."""
    vocab_size: int = 256
    """Rows of the embedding, V. Where neither the recipe nor a preset gives it, a tokenizer.json (data.tokenizer) with
    more ids does: as many as it has, rounded up to a multiple of 64 and of parallel.tp."""
    layer_pattern: str = "M"
    """D (dense) and M (mixture of experts), each with an optional count; repeats to num_layers: M, DM, D3M58."""
    mtp_layers: int = 0
    """Further tokens that each position predicts at training, each through a layer of its own behind the others, of
    the kind of the last one (multi-token prediction, arXiv:2412.19437 sec. 2.2); 0: none."""
    num_experts: int = 8
    """Experts of one MoE layer, E."""
    top_k: int = 2
    """Experts chosen for each token, K."""
    moe_ffn_hidden_size: int = 512
    """Inner width of one expert, F."""
    router_softmax: Literal["pre", "post"] = "post"
    """pre: softmax over all experts, then top-k. post: top-k of the logits, then softmax over the chosen (sum 1)."""
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """What makes a score of a logit: softmax over the experts, or each by itself (sigmoid: DeepSeek-V3)."""
    router_normalize: bool = True
    """Divide the scores of the chosen experts by their sum (sigmoid, sqrtsoftplus; of softmax, "post" does it)."""
    router_scaling_factor: float = 1.0
    """Factor of all routing weights (DeepSeek's routed_scaling_factor)."""
    num_groups: int = 1
    """Groups of neighbouring experts, for group-limited routing (DeepSeek-V2, V3); 1 means no limit."""
    top_groups: int = 1
    """Groups whose experts a token may choose from: those with the best scores."""
    expert_bias: bool = False
    """Add a bias to the scores of each expert for the choice alone, kept in balance (arXiv:2408.15664)."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner width of the expert that sees every token; 0 means none."""
    moe_bias: bool = False
    """Biases on the gate, up and down projections of each routed expert (gpt-oss)."""
    moe_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Of the routed experts. clamped_swiglu: (min(max(up, -l), l) + 1) * g * sigmoid(a * g), g = min(gate, l)."""
    swiglu_alpha: float = 1.702
    """Gain a of the sigmoid of clamped_swiglu; the default is that of gpt-oss."""
    swiglu_limit: float = 7.0
    """Limit l of clamped_swiglu; the default is that of gpt-oss."""
    router_bias: bool = False
    """A learned bias on the router's logits (gpt-oss)."""
    shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate (Qwen2-MoE)."""
    qk_norm: bool = False
    """RMSNorm over the queries and over the keys before RoPE (Qwen3)."""
    qk_norm_width: Literal["head", "all_heads"] = "head"
    """What one root mean square is of: each head by itself, or all heads of a token together (OLMoE)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    """A bias on the output projection of attention (gpt-oss)."""
    attention_sinks: bool = False
    """A learned logit for each head that takes its share of the softmax and gives nothing (gpt-oss)."""
    attention_pattern: str = "F"
    """F (full) and W (within model.sliding_window), each with an optional count; repeats to num_layers: F, WF, W5F."""
    sliding_window: int = 0
    """Tokens that a token sees in a layer of kind W, itself and those right before it; 0 means no such layers."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm but those of latents (mla), which is 1e-6."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Part of each head that is rotated, in (0, 1]."""
    rope_interleaved: bool = False
    """Which dims make a pair: neighbours, 2i and 2i+1 (DeepSeek), or, if false, i and i + half (Llama)."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Stretch of the rotary frequencies for contexts longer than the original one."""
    rope_scaling_factor: float = 1.0
    """Factor of the stretch, at least 1."""
    rope_original_seq_len: int = 8192
    """Context length before the stretch (llama3, yarn)."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above original/low are stretched in full (llama3)."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below original/high are left alone (llama3)."""
    rope_beta_fast: float = 32.0
    """Pairs that turn more often than this in the original context are left alone (yarn, arXiv:2309.00071)."""
    rope_beta_slow: float = 1.0
    """Pairs that turn less often than this in the original context are stretched in full (yarn)."""
    rope_truncate: bool = True
    """Round the pairs between which yarn blends outwards to whole ones (gpt-oss does not)."""
    rope_attention_factor: float = 0.0
    """Factor of the rotated parts of queries and keys (yarn); 0: m(rope_mscale) / m(rope_mscale_all_dim) where both
    are given, else m(1), with m(x) = 0.1 * x * ln(rope_scaling_factor) + 1."""
    rope_mscale: float = 0.0
    """See rope_attention_factor; 0: not given."""
    rope_mscale_all_dim: float = 0.0
    """See rope_attention_factor; 0: not given. With mla, m(rope_mscale_all_dim) squared scales the scores."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * num_layers)."""

    upcycle_from: str = ""
    """A dense checkpoint or Hugging Face folder, whose feed-forward layers the experts are copies or slices of."""
    upcycle_router: Literal["group", "expert", "zero"] = "group"
    """The new routers: one random row for each whole copy of the dense layer, one for each expert, or zeros."""
    upcycle_scaling: bool = True
    """Scale the copies so that those a token is sent to add up to the dense layer (arXiv:2410.07524)."""
    upcycle_noise: float = 0.0
    """Add normal noise of so many standard deviations of each copy to it; 0 adds none."""

    @property
    def head_size(self) -> int:
        """Width of one query and key head, D."""
        if self.attention == "mla":
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Dims of one head that RoPE turns."""
        return self.qk_rope_head_dim if self.attention == "mla" else round(self.head_size * self.rope_fraction)

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads that attention sees: the query groups, or with mla as many as there are query heads."""
        return self.num_attention_heads if self.attention == "mla" else self.num_query_groups

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer in order, "D" or "M"."""
        return _expand_layer_kinds(self.layer_pattern, self.num_layers)

    @property
    def all_layer_kinds(self) -> tuple[str, ...]:
        """`layer_kinds`, and behind them those of the layers of multi-token prediction."""
        return self.layer_kinds + self.layer_kinds[-1:] * self.mtp_layers

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """The layers that route tokens to experts, those of multi-token prediction included."""
        return tuple(i for i, kind in enumerate(self.all_layer_kinds) if kind == "M")

    @property
    def last_stage_needs_embedding(self) -> bool:
        """Whether the last pipeline stage needs the embedding as well as the first."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Tokens that a token sees at most in each layer, in order; 0: all before it."""
        return layer_windows(self.attention_pattern, self.sliding_window, self.num_layers)

    @property
    def all_layer_windows(self) -> tuple[int, ...]:
        """`layer_windows`, and behind them those of the layers of multi-token prediction."""
        return self.layer_windows + self.layer_windows[-1:] * self.mtp_layers


@lru_cache(maxsize=256)
def _expand_layer_kinds(pattern: str, num_layers: int) -> tuple[str, ...]:
    """The pattern over and over. Kept, as memory formulas ask for it again and again."""
    unit = expand_layer_pattern(pattern)
    return tuple(unit[i % len(unit)] for i in range(num_layers))
