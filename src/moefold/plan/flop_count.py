"""Operations and parameters of a ModelShape, in the conventions of `metrics.flops`. Torch-free."""

from moefold.metrics.flops import TRAIN_TO_FORWARD
from moefold.plan.shape import FeedForward, ModelSpec, TokenMixer


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
    layer, hidden = model_spec.kinds[kind], model_spec.hidden_size
    dense, experts = 2 * hidden, 0
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
