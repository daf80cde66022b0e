"""Parameters and floating-point operations of a model, counted from its sizes alone. Torch-free.

The planner, the trainer's `tflops_per_rank` and `mfu`, and the tests share these formulas.

Conventions:

* A multiply-add is 2 operations. Only matrix products count; norms, activations, rotations, softmax, biases and the
  embedding look-up do not.
* A training step is 3 forward passes: the backward pass has two products for each of the forward pass. Recomputation
  does not count, so the same step has the same count however it is run ("model FLOPs", arXiv:2204.02311 app. B).
* Attention is *full* by default, as in arXiv:2504.14960 and arXiv:2204.02311: each token meets all seq_len keys.
  `causal=True` counts the half that a causal mask leaves, seq_len / 2 keys for each token. A layer with a sliding
  window W counts the keys that its mask leaves either way, W - W*W/(2*seq_len) on average: a kernel for windows
  computes no others. Document masks, which depend on the data, change no count.
* Every token runs through top_k experts, whether or not some copies are dropped.
* The output head is counted, and so is the router, which arXiv:2504.14960 leaves out: subtract `3 * router` to
  compare with its numbers (0.007 % for Mixtral-8x22B, 0.3 % for the many small experts of Qwen3-30B-A3B).
"""

from dataclasses import dataclass

from moefold.config.schema import ModelConfig

TRAIN_TO_FORWARD = 3
"""Operations of a training step over those of its forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters of a whole model, by part. The fields from `embedding` to `norms` add up to `total`."""

    embedding: int
    """Token embedding, V*H."""
    head: int
    """Output head, V*H; 0 where it shares the embedding."""
    attention: int
    """Query, key, value and output projections of all layers, with the biases and sinks there are."""
    dense_mlp: int
    """SwiGLU of the dense layers."""
    router: int
    """Router of each MoE layer, H*E, and its bias."""
    experts: int
    """All routed experts."""
    shared_experts: int
    """Shared experts and their gates."""
    norms: int
    """Two norms a layer, the query and key norms where there are any, and the final norm."""
    active_experts: int
    """The part of `experts` that one token meets: top_k of num_experts."""

    @property
    def total(self) -> int:
        """All parameters; shared ones count once."""
        trunk = self.attention + self.dense_mlp + self.router + self.shared_experts + self.norms
        return self.embedding + self.head + trunk + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token meets, embedding and head included: what the "A3B" of a model's name means."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """Floating-point operations of one token: each part of the forward pass, and their sums."""

    attention_projections: int
    """Query, key, value and output projections."""
    attention_core: int
    """Scores and their product with the values; the one part that grows with seq_len."""
    dense_mlp: int
    """SwiGLU of the dense layers."""
    router: int
    """Router logits."""
    experts: int
    """The top_k routed experts of each MoE layer."""
    shared_experts: int
    """Shared experts and their gates."""
    head: int
    """Output logits."""

    @property
    def forward(self) -> int:
        """One token through the forward pass."""
        attention = self.attention_projections + self.attention_core
        return attention + self.dense_mlp + self.router + self.experts + self.shared_experts + self.head

    @property
    def total(self) -> int:
        """One token through forward and backward pass."""
        return TRAIN_TO_FORWARD * self.forward


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model, over all ranks."""
    hidden, layers, dense_layers, moe_layers = _sizes(model)
    qkv_width = _qkv_width(model)
    attention = hidden * qkv_width + model.num_attention_heads * model.head_size * hidden
    attention += qkv_width if model.qkv_bias else 0
    attention += hidden if model.attention_output_bias else 0
    attention += model.num_attention_heads if model.attention_sinks else 0
    head_norms = 2 * model.head_size if model.qk_norm else 0
    expert = _swiglu(hidden, model.moe_ffn_hidden_size)
    expert += 2 * model.moe_ffn_hidden_size + hidden if model.moe_bias else 0
    return ParameterCount(
        embedding=model.vocab_size * hidden,
        head=0 if model.tie_embeddings else model.vocab_size * hidden,
        attention=layers * attention,
        dense_mlp=dense_layers * _swiglu(hidden, model.ffn_hidden_size),
        router=moe_layers * (hidden + model.router_bias) * model.num_experts,
        experts=moe_layers * model.num_experts * expert,
        shared_experts=moe_layers * _shared_experts(model),
        norms=layers * (2 * hidden + head_norms) + hidden,
        active_experts=moe_layers * model.top_k * expert,
    )


def train_flops_per_token(model: ModelConfig, seq_len: int, *, causal: bool = False) -> FlopCount:
    """Count the operations of one token of a training step, averaged over a sequence (see the module's conventions).

    Args:
        seq_len: tokens of the sequence that attention sees, over all context-parallel ranks.
        causal: count half of the attention core, as its causal mask leaves, instead of all of it.
    """
    hidden, layers, dense_layers, moe_layers = _sizes(model)
    query_width = model.num_attention_heads * model.head_size
    keys = sum(_keys(window, seq_len, causal) for window in model.layer_windows)
    return FlopCount(
        attention_projections=2 * layers * hidden * (_qkv_width(model) + query_width),
        attention_core=round(2 * 2 * keys * query_width),
        dense_mlp=2 * dense_layers * _swiglu(hidden, model.ffn_hidden_size),
        router=2 * moe_layers * hidden * model.num_experts,
        experts=2 * moe_layers * model.top_k * _swiglu(hidden, model.moe_ffn_hidden_size),
        shared_experts=2 * moe_layers * _shared_experts(model),
        head=2 * hidden * model.vocab_size,
    )


def _sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Hidden size, layers, dense layers, MoE layers."""
    moe_layers = model.layer_kinds.count("M")
    return model.hidden_size, model.num_layers, model.num_layers - moe_layers, moe_layers


def _qkv_width(model: ModelConfig) -> int:
    return (model.num_attention_heads + 2 * model.num_query_groups) * model.head_size


def _keys(window: int, seq_len: int, causal: bool) -> float:
    """Keys that a token of one layer meets, on average over the sequence."""
    if 0 < window < seq_len:
        return window - window * window / (2 * seq_len)
    return seq_len / 2 if causal else seq_len


def _swiglu(hidden_size: int, ffn_hidden_size: int) -> int:
    """Parameters of gate, up and down projection."""
    return 3 * hidden_size * ffn_hidden_size


def _shared_experts(model: ModelConfig) -> int:
    """Parameters of one layer's shared expert and its gate, a product with one column."""
    width = model.shared_expert_ffn_hidden_size
    return _swiglu(model.hidden_size, width) + (model.hidden_size if width and model.shared_expert_gate else 0)
