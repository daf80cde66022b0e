"""Model spec: sizes of a model's distinct layers and their order, as the cost model needs them. Torch-free.

It also counts FLOPs and parameters of a `ModelSpec`, in the conventions of `cost/flops.py`.
"""

from dataclasses import dataclass
from functools import lru_cache

from moefold.config.schema import ModelConfig
from moefold.cost.flops import TRAIN_TO_FORWARD

BF16_BYTES = 2
"""Bytes of a weight or an activation value of a bfloat16 run."""

CLAMPED_SWIGLU_PASSES = 14.6
"""Memory passes of clamped SwiGLU with biases: add, clamp twice, gate and multiply are separate kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMixer:
    """Token mixer of a layer: attention or a recurrence."""

    kind: str
    """gqa, mla, linear (gated delta rule) or mamba."""
    num_params: int
    """Weights of the projections of one layer; each token uses every one once."""
    sharded_width: int
    """Columns of the projections into the heads, which tp shards."""
    output_width: int
    """Rows of the output projection, which tp shards."""
    latent_width: int = 0
    """Columns of the down-projections to latents, which tp replicates (mla)."""
    latent_rank: int = 0
    """Mean width of the latents that are projected up to the heads (mla); 0: heads are projected from the hidden
    state."""
    num_heads: int = 0
    """Query heads of the softmax; 0 for a recurrence."""
    num_kv_heads: int = 0
    """KV heads, which context parallelism exchanges."""
    head_size: int = 0
    """Width of a query and key head."""
    value_head_size: int = 0
    """Width of a value head."""
    window: int = 0
    """Width of the sliding window in tokens; 0: full attention."""
    state_flops: int = 0
    """FLOPs of the recurrence for one token, forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """Feed-forward block of a layer: dense MLP or MoE."""

    kind: str
    """dense, moe or none."""
    width: int = 0
    """FFN width of the dense MLP or of one expert."""
    num_experts: int = 0
    top_k: int = 0
    shared_width: int = 0
    """FFN width of the shared expert; 0: none."""
    num_matrices: int = 3
    """3 with a gate (SwiGLU), 2 without."""
    activation_passes: float = 1.0
    """Memory passes of the activation: 1 for a fused SwiGLU."""
    expert_hidden_size: int = 0
    """Hidden size of the experts, if it differs from the residual stream's (latent experts); 0: the same."""
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """One kind of layer. Models that alternate mixers and feed-forward blocks have one of them in each layer."""

    mixer: TokenMixer | None
    feed_forward: FeedForward | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Model as the cost model needs it."""

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[LayerKind, ...]
    """The distinct layers."""
    layers: tuple[int, ...]
    """The kind of each layer in order, an index into `kinds`."""
    mtp_layers: int = 0
    """MTP (multi-token prediction) layers, each like the last layer."""
    mtp_kind_override: int = -1
    """Kind of the MTP layers; -1: that of the last layer."""
    tie_embeddings: bool = False
    config: ModelConfig | None = None
    """The runtime's config of the model; None if the runtime does not support it."""

    @property
    def has_second_embedding(self) -> bool:
        """True if the last pipeline stage needs the embedding as well as the first."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def mtp_layer_kind(self) -> int:
        """Kind of the MTP layers."""
        return self.layers[-1] if self.mtp_kind_override < 0 else self.mtp_kind_override

    def count_kinds(self, layers: range) -> tuple[int, ...]:
        """Return the number of layers of each kind in a range of layers."""
        found = [0] * len(self.kinds)
        for i in layers:
            found[self.layers[i]] += 1
        return tuple(found)


@lru_cache(maxsize=64)
def model_spec_from_config(model: ModelConfig) -> ModelSpec:
    """Build the spec of a model that the runtime supports."""
    layers = []
    kinds: dict[LayerKind, int] = {}
    for kind, window in zip(model.layer_kinds, model.layer_windows, strict=True):
        layer = LayerKind(mixer=_mixer_from_config(model, window), feed_forward=_feed_forward_from_config(model, kind))
        layers.append(kinds.setdefault(layer, len(kinds)))
    return ModelSpec(
        name=model.preset or "model",
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        kinds=tuple(kinds),
        layers=tuple(layers),
        mtp_layers=model.mtp_layers,
        tie_embeddings=model.tie_embeddings,
        config=model,
    )


def _mixer_from_config(model: ModelConfig, window: int) -> TokenMixer:
    if model.attention == "gqa":
        return gqa_mixer(
            model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_size, window=window
        )
    hidden = model.hidden_size
    heads = model.num_attention_heads
    rank = model.q_lora_rank
    up_q = heads * model.head_size
    up_kv = heads * (model.qk_nope_head_dim + model.v_head_dim)
    down = rank + model.kv_lora_rank + model.qk_rope_head_dim
    up = (rank or hidden) * up_q + model.kv_lora_rank * up_kv
    return TokenMixer(
        kind="mla",
        num_params=hidden * down + up + heads * model.v_head_dim * hidden,
        sharded_width=up_q + up_kv,
        output_width=heads * model.v_head_dim,
        latent_width=down,
        latent_rank=up // (up_q + up_kv),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=model.head_size,
        value_head_size=model.v_head_dim,
        window=window,
    )


def gqa_mixer(hidden_size: int, heads: int, groups: int, head_size: int, *, window: int = 0) -> TokenMixer:
    """Build a grouped-query attention mixer."""
    width = (heads + 2 * groups) * head_size
    return TokenMixer(
        kind="gqa",
        num_params=hidden_size * (width + heads * head_size),
        sharded_width=width,
        output_width=heads * head_size,
        num_heads=heads,
        num_kv_heads=groups,
        head_size=head_size,
        value_head_size=head_size,
        window=window,
    )


def _feed_forward_from_config(model: ModelConfig, kind: str) -> FeedForward:
    if kind == "D":
        return FeedForward(kind="dense", width=model.ffn_hidden_size)
    return FeedForward(
        kind="moe",
        width=model.moe_ffn_hidden_size,
        num_experts=model.num_experts,
        top_k=model.top_k,
        shared_width=model.shared_expert_ffn_hidden_size,
        activation_passes=CLAMPED_SWIGLU_PASSES if model.moe_activation == "clamped_swiglu" or model.moe_bias else 1.0,
        num_groups=model.num_groups,
        top_groups=model.top_groups,
    )


def mixer_flops(mixer: TokenMixer, seq_len: int, *, causal: bool) -> float:
    """Return the forward FLOPs of a token mixer for one token of one layer."""
    flops = 2.0 * mixer.num_params + mixer.state_flops
    if mixer.num_heads:
        window = mixer.window
        full = seq_len / 2 if causal else float(seq_len)
        keys = window - window * window / (2 * seq_len) if 0 < window < seq_len else full
        flops += 2.0 * keys * mixer.num_heads * (mixer.head_size + mixer.value_head_size)
    return flops


def expert_parameters(layer: FeedForward, hidden_size: int) -> int:
    """Return the parameters of one routed expert."""
    return layer.num_matrices * (layer.expert_hidden_size or hidden_size) * layer.width


def shared_parameters(layer: FeedForward, hidden_size: int) -> int:
    """Return the parameters that every token uses: the dense MLP, or the shared expert and the latent projections."""
    if layer.kind == "dense":
        return layer.num_matrices * hidden_size * layer.width
    latent = 2 * hidden_size * layer.expert_hidden_size
    return layer.num_matrices * hidden_size * layer.shared_width + latent


def feed_forward_flops(layer: FeedForward, hidden_size: int, *, router: bool = True) -> float:
    """Return the forward FLOPs of a feed-forward block for one token of one layer."""
    flops = 2.0 * (shared_parameters(layer, hidden_size) + layer.top_k * expert_parameters(layer, hidden_size))
    return flops + (2.0 * hidden_size * layer.num_experts if router else 0.0)


def train_flops(model_spec: ModelSpec, seq_len: int, *, causal: bool, router: bool = True, mtp: bool = True) -> float:
    """Return the training FLOPs for one token."""
    per_kind = [
        (mixer_flops(kind.mixer, seq_len, causal=causal) if kind.mixer else 0.0)
        + (feed_forward_flops(kind.feed_forward, model_spec.hidden_size, router=router) if kind.feed_forward else 0.0)
        for kind in model_spec.kinds
    ]
    head = 2.0 * model_spec.hidden_size * model_spec.vocab_size
    forward = sum(per_kind[kind] for kind in model_spec.layers) + head
    if mtp and model_spec.mtp_layers:
        forward += model_spec.mtp_layers * (
            per_kind[model_spec.mtp_layer_kind] + head + 4.0 * model_spec.hidden_size**2
        )
    return TRAIN_TO_FORWARD * forward


def layer_parameters(model_spec: ModelSpec, kind: int) -> tuple[int, int]:
    """Return the parameters of one layer outside the routed experts, and of its routed experts."""
    layer = model_spec.kinds[kind]
    hidden = model_spec.hidden_size
    dense = 2 * hidden
    experts = 0
    if layer.mixer:
        dense += layer.mixer.num_params
    if layer.feed_forward:
        dense += shared_parameters(layer.feed_forward, hidden) + hidden * layer.feed_forward.num_experts
        experts = layer.feed_forward.num_experts * expert_parameters(layer.feed_forward, hidden)
    return dense, experts


def all_parameters(model_spec: ModelSpec) -> int:
    """Return the parameters of the whole model, without norms inside attention and biases."""
    total = sum(sum(layer_parameters(model_spec, kind)) for kind in model_spec.layers)
    ends = model_spec.vocab_size * model_spec.hidden_size * (1 if model_spec.tie_embeddings else 2)
    further = model_spec.mtp_layers * (
        sum(layer_parameters(model_spec, model_spec.mtp_layer_kind)) + 2 * model_spec.hidden_size**2
    )
    return total + ends + further
