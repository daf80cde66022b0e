"""What a model is to the cost model: sizes of its distinct layers and how often each stands where. Torch-free.

Operations and parameters of a ModelShape, in the conventions of `metrics.flops`. Torch-free.
"""

from dataclasses import dataclass
from functools import lru_cache

from moefold.config.schema import ModelConfig
from moefold.cost.flops import TRAIN_TO_FORWARD

BF16_BYTES = 2
"""Of a weight or an activation of a bfloat16 run."""

CLAMPED_SWIGLU_PASSES = 14.6
"""Passes of clamped SwiGLU with biases: add, clamp twice, gate and multiply are not one kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMixer:
    """What lets tokens of a sequence see each other: attention, or a recurrence."""

    kind: str
    """gqa, mla, linear (gated delta rule) or mamba."""
    num_params: int
    """Of the projections of one layer, each of which a token meets once."""
    sharded_width: int
    """Columns of the projections into the heads, which tp shares out."""
    output_width: int
    """Rows of the output projection, which tp shares out."""
    latent_width: int = 0
    """Columns of the down-projections to latents, which every tp rank makes whole (mla)."""
    latent_rank: int = 0
    """Mean width of the latents from which the heads are made (mla); 0: from the hidden state."""
    num_heads: int = 0
    """Query heads of the softmax; 0 for a recurrence."""
    num_kv_heads: int = 0
    """Heads of keys and values that context parallelism exchanges."""
    head_size: int = 0
    """Width of a query and key head."""
    value_head_size: int = 0
    """Width of a value head."""
    window: int = 0
    """Tokens that a token sees; 0: all before it."""
    state_flops: int = 0
    """Operations of the recurrence for one token, forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """What a token goes through by itself: a dense product, or experts."""

    kind: str
    """dense, moe or none."""
    width: int = 0
    """Inner width of the dense product or of one expert."""
    num_experts: int = 0
    top_k: int = 0
    shared_width: int = 0
    """Inner width of the expert that sees every token; 0 means none."""
    num_matrices: int = 3
    """3 with a gate (SwiGLU), 2 without."""
    activation_passes: float = 1.0
    """How often the activation reads and writes its rows: 1 for a fused SwiGLU."""
    expert_hidden_size: int = 0
    """Width in which experts work, where it is not that of the residual stream (latent experts); 0: the same."""
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """One kind of layer. Either half may be missing in models that alternate them."""

    mixer: TokenMixer | None
    feed_forward: FeedForward | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model as the cost model sees it."""

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[LayerKind, ...]
    """The distinct layers."""
    layers: tuple[int, ...]
    """The kind of each layer in order, an index into `kinds`."""
    mtp_layers: int = 0
    """Layers of multi-token prediction, each as the last layer."""
    mtp_kind_override: int = -1
    """The kind of those layers where it is another; -1: that of the last layer."""
    tie_embeddings: bool = False
    config: ModelConfig | None = None
    """The model as the runtime knows it; None where it cannot run it."""

    @property
    def has_second_embedding(self) -> bool:
        """Whether the last pipeline stage needs the embedding as well as the first."""
        return self.tie_embeddings or self.mtp_layers > 0

    @property
    def mtp_layer_kind(self) -> int:
        """The kind of the layers of multi-token prediction."""
        return self.layers[-1] if self.mtp_kind_override < 0 else self.mtp_kind_override

    def count_kinds(self, layers: range) -> tuple[int, ...]:
        """How many layers of each kind there are among those of a range."""
        found = [0] * len(self.kinds)
        for i in layers:
            found[self.layers[i]] += 1
        return tuple(found)


@lru_cache(maxsize=64)
def model_spec_from_config(model: ModelConfig) -> ModelSpec:
    """The shape of a model that the runtime knows."""
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
    """Attention whose groups of heads share keys and values."""
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
    """One token of one layer, forward."""
    flops = 2.0 * mixer.num_params + mixer.state_flops
    if mixer.num_heads:
        window = mixer.window
        full = seq_len / 2 if causal else float(seq_len)
        keys = window - window * window / (2 * seq_len) if 0 < window < seq_len else full
        flops += 2.0 * keys * mixer.num_heads * (mixer.head_size + mixer.value_head_size)
    return flops


def expert_parameters(layer: FeedForward, hidden_size: int) -> int:
    """Of one routed expert."""
    return layer.num_matrices * (layer.expert_hidden_size or hidden_size) * layer.width


def shared_parameters(layer: FeedForward, hidden_size: int) -> int:
    """Of what every token of a feed-forward meets: a dense product, or the shared expert and the latents."""
    if layer.kind == "dense":
        return layer.num_matrices * hidden_size * layer.width
    latent = 2 * hidden_size * layer.expert_hidden_size
    return layer.num_matrices * hidden_size * layer.shared_width + latent


def feed_forward_flops(layer: FeedForward, hidden_size: int, *, router: bool = True) -> float:
    """One token of one layer, forward."""
    flops = 2.0 * (shared_parameters(layer, hidden_size) + layer.top_k * expert_parameters(layer, hidden_size))
    return flops + (2.0 * hidden_size * layer.num_experts if router else 0.0)


def train_flops(model_spec: ModelSpec, seq_len: int, *, causal: bool, router: bool = True, mtp: bool = True) -> float:
    """One token of a training step."""
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
    """Parameters of one layer outside the routed experts, and those of its routed experts."""
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
    """Of the whole model; norms inside attention and biases are left out."""
    total = sum(sum(layer_parameters(model_spec, kind)) for kind in model_spec.layers)
    ends = model_spec.vocab_size * model_spec.hidden_size * (1 if model_spec.tie_embeddings else 2)
    further = model_spec.mtp_layers * (
        sum(layer_parameters(model_spec, model_spec.mtp_layer_kind)) + 2 * model_spec.hidden_size**2
    )
    return total + ends + further
