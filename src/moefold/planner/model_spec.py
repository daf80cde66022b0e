"""Model spec: sizes of a model's distinct layers and their order, as the cost model needs them. Torch-free.

It also counts FLOPs and parameters, in the conventions of `cost/flops.py`, and finds a model by its name: a preset, a
config.json, or one of the models without a preset (dense, or not trainable as published). Their sizes come from each
config.json; where a source prints its FLOPs for a token, they agree with it (tests/planner/test_model_spec.py).
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from moefold.bounded_read import check_regular_file
from moefold.config.groups.attention import RecurrentCore, SoftmaxCore
from moefold.config.groups.ffn import RoutedPart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.presets import preset_names
from moefold.config.suggestions import closest_match, download_advice
from moefold.cost.flops import TRAIN_TO_FORWARD, keys_per_token
from moefold.errors import ConfigError
from moefold.hub import CONFIG_PATTERNS, is_hub_url, snapshot
from moefold.recipe import load_config

BF16_BYTES = 2
"""Bytes of a weight or an activation value of a bfloat16 run."""

CLAMPED_SWIGLU_PASSES = 11.28
"""Memory passes of clamped SwiGLU with biases: add, clamp twice, gate and multiply are separate kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerShape:
    """Token mixer of a layer: its core, and the widths of its projections."""

    core: SoftmaxCore | RecurrentCore
    num_params: int
    """Weights of the projections of one layer; each token uses every one once."""
    sharded_width: int
    """Columns of the projections into the heads, which tp shards."""
    output_width: int
    """Rows of the output projection, which tp shards."""
    latent_width: int = 0
    """Columns of the down-projections to latents, which tp replicates."""
    latent_rank: int = 0
    """Mean width of the latents that are projected up to the heads; 0: heads are projected from the hidden state."""
    index_params: int = 0
    """Of `num_params`, the weights of the indexer, which tp replicates; each rank projects its own tokens."""
    window: int = 0
    """Width of the sliding window in tokens; 0: full attention."""
    chunk_size: int = 0
    """Tokens of an attention chunk; 0: no chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """Feed-forward block of a layer: dense MLP or MoE."""

    kind: str
    """dense, moe or none."""
    width: int = 0
    """FFN width of the dense MLP or of one expert."""
    num_experts: int = 0
    top_k: float = 0
    """Experts of a token that compute, on average."""
    zero_experts: int = 0
    """Zero-computation experts, which only the router has."""
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

    mixer: MixerShape | None
    feed_forward: FeedForward | None
    layer: Layer | None = None
    """The layer of the runtime; None if the runtime does not support it."""


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
    """Kind of the MTP layers; -1: the kind of the last layer."""
    tie_embeddings: bool = False
    config: ModelConfig | None = None
    """The runtime's config of the model; None if the runtime does not support it."""

    @property
    def has_experts(self) -> bool:
        """True if any layer has experts."""
        return any(kind.feed_forward is not None and kind.feed_forward.kind == "moe" for kind in self.kinds)

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
    for layer in model.layers:
        layers.append(kinds.setdefault(_layer_from_config(layer), len(kinds)))
    mtp_kind = -1
    if model.mtp_layers and model.mtp_layer.kind != model.block_kinds[-1]:
        mtp_kind = kinds.setdefault(_layer_from_config(model.mtp_layer), len(kinds))
    return ModelSpec(
        name=model.preset or "model",
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        kinds=tuple(kinds),
        layers=tuple(layers),
        mtp_layers=model.mtp_layers,
        mtp_kind_override=mtp_kind,
        tie_embeddings=model.tie_embeddings,
        config=model,
    )


def _layer_from_config(layer: Layer) -> LayerKind:
    return LayerKind(mixer=_mixer_from_config(layer), feed_forward=_feed_forward_from_config(layer), layer=layer.kind)


def _mixer_from_config(layer: Layer) -> MixerShape:
    matrices = [weight for weight in layer.attention.params(layer.hidden_size) if weight.is_matrix]
    indexer = [weight for weight in matrices if weight.name.startswith("indexer.")]
    own = [weight for weight in matrices if weight not in indexer and not weight.name.startswith("conv")]
    into_heads = [weight for weight in own if weight.tp_dim == 0]
    sharded_width = sum(weight.shape[0] for weight in into_heads)
    is_recurrent = isinstance(layer.core, RecurrentCore)
    latent_width = 0 if is_recurrent else sum(weight.shape[0] for weight in own if weight.tp_dim is None)
    return MixerShape(
        core=layer.core,
        num_params=sum(weight.numel for weight in matrices),
        sharded_width=sharded_width,
        output_width=sum(weight.shape[1] for weight in own if weight.tp_dim == 1),
        latent_width=latent_width,
        latent_rank=sum(weight.numel for weight in into_heads) // sharded_width if latent_width else 0,
        index_params=sum(weight.numel for weight in indexer),
        window=layer.window,
        chunk_size=layer.chunk,
    )


def _gqa_mixer(hidden_size: int, heads: int, groups: int, head_size: int) -> MixerShape:
    model = ModelConfig(hidden_size=hidden_size, num_attention_heads=heads, num_query_groups=groups, head_dim=head_size)
    return _mixer_from_config(model.layers[0])


def _feed_forward_from_config(layer: Layer) -> FeedForward:
    part = layer.ffn
    if not isinstance(part, RoutedPart):
        return FeedForward(kind="dense", width=part.tp_unit[1])
    return FeedForward(
        kind="moe",
        width=part.width,
        num_experts=part.num_experts,
        top_k=part.mean_active if part.zero_experts else part.top_k,
        zero_experts=part.zero_experts,
        shared_width=part.shared_width,
        expert_hidden_size=part.token_width,
        activation_passes=1.0 if part.activation.is_swiglu and not part.has_bias else CLAMPED_SWIGLU_PASSES,
        num_groups=part.num_groups,
        top_groups=part.top_groups,
    )


def mixer_flops(mixer: MixerShape, seq_len: int, *, causal: bool) -> float:
    """Return the forward FLOPs of a token mixer for one token of one layer."""
    keys = keys_per_token(mixer.window, seq_len, causal=causal, chunk_size=mixer.chunk_size)
    return 2.0 * mixer.num_params + mixer.core.flops(keys)


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
    return flops + (2.0 * hidden_size * (layer.num_experts + layer.zero_experts) if router else 0.0)


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
        dense += shared_parameters(layer.feed_forward, hidden) + hidden * (
            layer.feed_forward.num_experts + layer.feed_forward.zero_experts
        )
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


def _mamba(hidden: int, heads: int) -> MixerShape:
    """Build a Mamba-2 mixer with heads of 64, a state of 128 and 8 groups; FLOPs of the state as in Megatron-Bridge."""
    inner = heads * 64
    width = 2 * inner + 2 * 8 * 128 + heads
    return MixerShape(
        core=RecurrentCore(state_flops=46 * inner * 128),
        num_params=hidden * (width + inner),
        sharded_width=width,
        output_width=inner,
    )


def _nemotron(name: str, hidden: int, counts: tuple[int, int, int], heads: int, moe: FeedForward) -> ModelSpec:
    """Build a hybrid whose layers are a Mamba-2 mixer, attention or experts, each alone."""
    mamba, attention, experts = counts
    kinds = (
        LayerKind(mixer=_mamba(hidden, heads), feed_forward=None),
        LayerKind(mixer=_gqa_mixer(hidden, 32, 2, 128), feed_forward=None),
        LayerKind(mixer=None, feed_forward=moe),
        LayerKind(mixer=_gqa_mixer(hidden, 32, 2, 128), feed_forward=moe),
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
    "nemotron-3-nano": _nemotron_nano,
    "nemotron-3-super": _nemotron_super,
}
_CONFIGS = {
    "llama3-8b": _dense_config(32, 4096, 32, 14336),
    "llama3-70b": _dense_config(80, 8192, 64, 28672),
    "llama3-405b": _dense_config(126, 16384, 128, 53248),
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


_PARENTHESES = re.compile(r"\(.*?\)")
_SYNONYMS = {
    "nemotron3nano30ba3b": "nemotron-3-nano",
    "nemotron3super120b": "nemotron-3-super",
    "nemotron3super120ba12b": "nemotron-3-super",
    "llama4scoutllm": "llama4-scout",
    "llama318b": "llama3-8b",
    "llama3170b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "llama38b": "llama3-8b",
    "llama370b": "llama3-70b",
    "kimik2base": "kimi-k2",
    "kimik21t": "kimi-k2",
    "qwen3next80b": "qwen3-next-80b-a3b",
    "qwen330b": "qwen3-30b-a3b",
    "qwen3235b": "qwen3-235b-a22b",
    "mixtral8x22bg8t8": "mixtral-8x22b-g8t8",
    "qwen257b": "qwen2-57b-a14b",
    "gptoss": "gpt-oss-120b",
    "deepseekv3671b": "deepseek-v3",
    "deepseekv3base": "deepseek-v3",
    "qwen3moe30b": "qwen3-30b-a3b",
    "qwen3moe235b": "qwen3-235b-a22b",
    "qwen2moe57b": "qwen2-57b-a14b",
    "nemotron3nano30b": "nemotron-3-nano",
    "nemotron3nanov330ba3b": "nemotron-3-nano",
    "llama4scout17b16e": "llama4-scout",
    "llama4maverick17b128e": "llama4-maverick",
    "llama4maverickllm": "llama4-maverick",
    "moonlight16ba3b": "moonlight-16b",
    "olmoe": "olmoe-1b-7b",
}


@lru_cache(maxsize=64)
def load_model_spec(name: str) -> ModelSpec:
    """Load the spec of a preset, a recipe, a Hugging Face config.json (or its folder), or another known model.

    Raises:
        ConfigError: it is none of these.
    """
    # Lazy imports: the families of Hugging Face take longer to import than a preset needs.
    if is_hub_url(name) or Path(name).name == "config.json" or Path(name).is_dir():
        from moefold.convert.hf_config import read_model_config
        from moefold.convert.known_keys import ALL_KEYS
    if is_hub_url(name):
        return model_spec_from_config(read_model_config(snapshot(name, "model", patterns=CONFIG_PATTERNS), ALL_KEYS))
    path = Path(name)
    if path.suffix == ".toml":
        return model_spec_from_config(load_config(path).model)
    if path.name == "config.json" or path.is_dir():
        return model_spec_from_config(read_model_config(path.parent if path.name == "config.json" else path, ALL_KEYS))
    known = find_model_name(name)
    if known is None and path.exists():
        try:
            check_regular_file(path)
        except OSError as error:
            raise ConfigError(f"model {name!r} cannot be read: {error.strerror}") from None
        raise ConfigError(
            f"model {name!r} is a file and neither a recipe ending in .toml nor a config.json; give it one of these "
            "names if it is one, or name a preset"
        )
    if known is None:
        names = plannable_model_names()
        guess = closest_match(name.lower(), names, cutoff=0.5)
        hint = f"did you mean {guess!r}? The" if guess else "the"
        if advice := download_advice(name):
            namesake = find_model_name(name.rpartition("/")[2])
            hint = f"{f'{namesake!r} is known by its name; or, as ' if namesake else ''}{advice}; the"
        raise ConfigError(
            f"model {name!r} is unknown; {hint} models are {', '.join(sorted(names))}; "
            "or name a recipe.toml, or a folder with a config.json"
        )
    if known in unsupported_model_names():
        return unsupported_model_spec(known)
    return replace(model_spec_from_config(load_config(None, [f"model.preset={known}"]).model), name=known)


def plannable_model_names() -> tuple[str, ...]:
    """Return the names of models that the runtime can train; others are priced by `moefold plan-accuracy` alone."""
    return (
        *preset_names(),
        *(name for name in unsupported_model_names() if unsupported_model_spec(name).config is not None),
    )


def find_model_name(name: str) -> str | None:
    """Return the model that a spelling means ("Qwen3_30B_a3B (tokendrop)" is qwen3-30b-a3b), or None."""
    plain = _normalise_name(_PARENTHESES.sub("", name))
    names = {_normalise_name(known): known for known in (*preset_names(), *unsupported_model_names())}
    return names.get(plain) or _SYNONYMS.get(plain)


def _normalise_name(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
