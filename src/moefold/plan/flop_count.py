"""Operations and parameters of a ModelShape, in the conventions of `metrics.flops`. Torch-free."""

from moefold.metrics.flops import TRAIN_TO_FORWARD
from moefold.plan.shape import FeedForward, Mixer, ModelShape


def mixer_flops(mixer: Mixer, seq_len: int, *, causal: bool) -> float:
    """One token of one layer, forward."""
    flops = 2.0 * mixer.weights + mixer.state_flops
    if mixer.heads:
        window = mixer.window
        full = seq_len / 2 if causal else float(seq_len)
        keys = window - window * window / (2 * seq_len) if 0 < window < seq_len else full
        flops += 2.0 * keys * mixer.heads * (mixer.head_size + mixer.value_size)
    return flops


def expert_parameters(layer: FeedForward, hidden_size: int) -> int:
    """Of one routed expert."""
    return layer.matrices * (layer.expert_input or hidden_size) * layer.width


def shared_parameters(layer: FeedForward, hidden_size: int) -> int:
    """Of what every token of a feed-forward meets: a dense product, or the shared expert and the latents."""
    if layer.kind == "dense":
        return layer.matrices * hidden_size * layer.width
    latent = 2 * hidden_size * layer.expert_input
    return layer.matrices * hidden_size * layer.shared_width + latent


def feed_forward_flops(layer: FeedForward, hidden_size: int, *, router: bool = True) -> float:
    """One token of one layer, forward."""
    flops = 2.0 * (shared_parameters(layer, hidden_size) + layer.top_k * expert_parameters(layer, hidden_size))
    return flops + (2.0 * hidden_size * layer.num_experts if router else 0.0)


def train_flops(shape: ModelShape, seq_len: int, *, causal: bool, router: bool = True, mtp: bool = True) -> float:
    """One token of a training step."""
    per_kind = [
        (mixer_flops(kind.mixer, seq_len, causal=causal) if kind.mixer else 0.0)
        + (feed_forward_flops(kind.feed_forward, shape.hidden_size, router=router) if kind.feed_forward else 0.0)
        for kind in shape.kinds
    ]
    head = 2.0 * shape.hidden_size * shape.vocab_size
    forward = sum(per_kind[kind] for kind in shape.layers) + head
    if mtp and shape.mtp_layers:
        forward += shape.mtp_layers * (per_kind[shape.further_kind] + head + 4.0 * shape.hidden_size**2)
    return TRAIN_TO_FORWARD * forward


def layer_parameters(shape: ModelShape, kind: int) -> tuple[int, int]:
    """Parameters of one layer outside the routed experts, and those of its routed experts."""
    layer, hidden = shape.kinds[kind], shape.hidden_size
    dense, experts = 2 * hidden, 0
    if layer.mixer:
        dense += layer.mixer.weights
    if layer.feed_forward:
        dense += shared_parameters(layer.feed_forward, hidden) + hidden * layer.feed_forward.num_experts
        experts = layer.feed_forward.num_experts * expert_parameters(layer.feed_forward, hidden)
    return dense, experts


def all_parameters(shape: ModelShape) -> int:
    """Of the whole model; norms inside attention and biases are left out."""
    total = sum(sum(layer_parameters(shape, kind)) for kind in shape.layers)
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    further = shape.mtp_layers * (sum(layer_parameters(shape, shape.further_kind)) + 2 * shape.hidden_size**2)
    return total + ends + further
