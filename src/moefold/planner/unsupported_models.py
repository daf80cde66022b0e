"""Models by name without a preset: those that the runtime cannot train as published, and dense ones. Torch-free.

Sizes are those of each model's config.json; where a source prints its FLOPs for a token, they agree with it
(tests/planner/test_model_spec.py).
"""

from dataclasses import replace

from moefold.config.schema import ModelConfig
from moefold.planner.model_spec import FeedForward, LayerKind, ModelSpec, TokenMixer, gqa_mixer, model_spec_from_config


def unsupported_model_names() -> tuple[str, ...]:
    """Return all names."""
    return tuple(sorted((*_HYBRIDS, *_CONFIGS)))


def unsupported_model_spec(name: str) -> ModelSpec:
    """Return the spec of one of `unsupported_model_names`."""
    if name in _HYBRIDS:
        return _HYBRIDS[name]()
    return replace(model_spec_from_config(_CONFIGS[name]), name=name)


def _dense_config(layers: int, hidden: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=8,
        ffn_hidden_size=ffn,
        vocab_size=128256,
        layer_pattern="D",
    )


def _qwen3_next() -> ModelSpec:
    """Build Qwen/Qwen3-Next-80B-A3B.

    It has three gated delta-rule layers (16 key and 32 value heads of 128) to one of attention.
    """
    hidden = 2048
    keys = 16 * 128
    values = 32 * 128
    width = 2 * keys + 2 * values + 2 * 32
    linear = TokenMixer(
        kind="linear",
        num_params=hidden * (width + values),
        sharded_width=width,
        output_width=values,
        state_flops=8 * 32 * 128 * 128,
    )
    full = gqa_mixer(hidden, 16, 2, 256)
    # The query projection also outputs a gate of the same width.
    full = replace(full, num_params=full.num_params + hidden * 4096, sharded_width=full.sharded_width + 4096)
    moe = FeedForward(kind="moe", width=512, num_experts=512, top_k=10, shared_width=512)
    kinds = (LayerKind(mixer=linear, feed_forward=moe), LayerKind(mixer=full, feed_forward=moe))
    return ModelSpec(
        name="qwen3-next-80b-a3b", hidden_size=hidden, vocab_size=151936, kinds=kinds, layers=(0, 0, 0, 1) * 12
    )


def _mamba(hidden: int, heads: int) -> TokenMixer:
    """Build a Mamba-2 mixer with heads of 64, a state of 128 and 8 groups; FLOPs of the state as in Megatron-Bridge."""
    inner = heads * 64
    width = 2 * inner + 2 * 8 * 128 + heads
    return TokenMixer(
        kind="mamba",
        num_params=hidden * (width + inner),
        sharded_width=width,
        output_width=inner,
        state_flops=46 * inner * 128,
    )


def _nemotron(name: str, hidden: int, counts: tuple[int, int, int], heads: int, moe: FeedForward) -> ModelSpec:
    """Build a hybrid whose layers are a Mamba-2 mixer, attention or experts, each alone."""
    mamba, attention, experts = counts
    kinds = (
        LayerKind(mixer=_mamba(hidden, heads), feed_forward=None),
        LayerKind(mixer=gqa_mixer(hidden, 32, 2, 128), feed_forward=None),
        LayerKind(mixer=None, feed_forward=moe),
        LayerKind(mixer=gqa_mixer(hidden, 32, 2, 128), feed_forward=moe),
    )
    # The order matters only for pipelines: attention is spread evenly over pairs of a mixer and experts.
    pairs = [(0, 2)] * min(mamba, experts)
    step = len(pairs) // attention
    layers: list[int] = []
    for i, pair in enumerate(pairs):
        layers += pair
        if i % step == step - 1 and layers.count(1) < attention:
            layers.append(1)
    return ModelSpec(name=name, hidden_size=hidden, vocab_size=131072, kinds=kinds, layers=tuple(layers))


def _nemotron_nano() -> ModelSpec:
    """Build nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: 23 Mamba-2, 6 attention and 23 MoE layers."""
    moe = FeedForward(kind="moe", width=1856, num_experts=128, top_k=6, shared_width=3712, num_matrices=2)
    return _nemotron("nemotron-3-nano", 2688, (23, 6, 23), 64, moe)


def _nemotron_super() -> ModelSpec:
    """Build nvidia/NVIDIA-Nemotron-3-Super-120B-A12B: 40 Mamba-2, 8 attention and 40 MoE layers with latent experts."""
    moe = FeedForward(
        kind="moe", width=2688, num_experts=512, top_k=22, shared_width=5376, num_matrices=2, expert_hidden_size=1024
    )
    return replace(_nemotron("nemotron-3-super", 4096, (40, 8, 40), 128, moe), mtp_layers=1, mtp_kind_override=3)


_HYBRIDS = {
    "qwen3-next-80b-a3b": _qwen3_next,
    "nemotron-3-nano": _nemotron_nano,
    "nemotron-3-super": _nemotron_super,
}
_CONFIGS = {
    "llama3-8b": _dense_config(32, 4096, 32, 14336),
    "llama3-70b": _dense_config(80, 8192, 64, 28672),
    "llama3-405b": _dense_config(126, 16384, 128, 53248),
    # Its RoPE scaling has equal bounds, which the runtime rejects; times and sizes do not depend on it.
    "kimi-k2": ModelConfig(
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=64,
        attention="mla",
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        ffn_hidden_size=18432,
        vocab_size=163840,
        layer_pattern="DM60",
        num_experts=384,
        top_k=8,
        moe_ffn_hidden_size=2048,
        router_score="sigmoid",
        expert_bias=True,
        shared_expert_ffn_hidden_size=2048,
    ),
    # moonshotai/Moonlight-16B-A3B.
    "moonlight-16b": ModelConfig(
        num_layers=27,
        hidden_size=2048,
        num_attention_heads=16,
        attention="mla",
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        ffn_hidden_size=11264,
        vocab_size=163840,
        layer_pattern="DM26",
        num_experts=64,
        top_k=6,
        moe_ffn_hidden_size=1408,
        router_score="sigmoid",
        expert_bias=True,
        shared_expert_ffn_hidden_size=2816,
    ),
    # Every other one of the 48 layers of Llama-4-Maverick has experts.
    "llama4-maverick": ModelConfig(
        num_layers=48,
        hidden_size=5120,
        num_attention_heads=40,
        num_query_groups=8,
        ffn_hidden_size=16384,
        vocab_size=202048,
        layer_pattern="DM",
        num_experts=128,
        top_k=1,
        router_score="sigmoid",
        router_normalize=False,
        moe_ffn_hidden_size=8192,
        shared_expert_ffn_hidden_size=8192,
    ),
    "llama4-scout": ModelConfig(
        num_layers=48,
        hidden_size=5120,
        num_attention_heads=40,
        num_query_groups=8,
        vocab_size=202048,
        layer_pattern="M",
        num_experts=16,
        top_k=1,
        router_score="sigmoid",
        router_normalize=False,
        moe_ffn_hidden_size=8192,
        shared_expert_ffn_hidden_size=8192,
    ),
}
