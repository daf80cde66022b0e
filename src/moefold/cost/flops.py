"""Parameter and FLOP counts of a model from its sizes.

The planner, the trainer's `tflops_per_rank` and `mfu`, and the tests share these formulas.

Conventions:

* A multiply-add is 2 operations. Only GEMMs count. Norms, activations, RoPE, softmax, biases and the embedding
  look-up do not.
* A training step is 3 forward passes: the backward pass has two GEMMs for each of the forward pass. Recomputation
  does not count ("model FLOPs", arXiv:2204.02311 app. B).
* Attention is *full* by default, as in arXiv:2204.02311: each token attends to all seq_len keys.
  `causal=True` counts the half that a causal mask leaves, seq_len / 2 keys for each token. A layer with a sliding
  window W counts the unmasked keys either way, W - W*W/(2*seq_len) on average: a sliding-window kernel computes no
  others. Linear attention counts its recurrence as it is defined, token by token. Document masks, which depend on the
  data, change no count.
* Every token runs through top_k experts, whether or not some routed tokens are dropped.
* The output head and the router are counted. arXiv:2504.14960 leaves the router out: subtract `3 * router` to compare
  with its numbers (0.007 % for Mixtral-8x22B, 0.3 % for the many small experts of Qwen3-30B-A3B).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from moefold.config.base.param_spec import ModelPart, ParamSpec
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import layer_adapters
from moefold.cost.layer_spec import embedding_weight, head_weights, mtp_layer_weights

TRAIN_TO_FORWARD = 3
"""FLOPs of a training step over the FLOPs of its forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameter counts of a whole model, by part. The fields from `embedding` to `mtp` add up to `total`."""

    embedding: int
    """Token embedding, V*H."""
    head: int
    """Output head, V*H, or 0 with tied embeddings."""
    attention: int
    """Projections of all layers (queries, keys, values, latents, output), with their biases and sinks."""
    dense_mlp: int
    """SwiGLU of the dense layers."""
    router: int
    """Router of each MoE layer, H*E, and its bias."""
    experts: int
    """All routed experts."""
    shared_experts: int
    """Shared experts and their gates, and the projections of latent experts."""
    norms: int
    """Two norms per layer, the norms inside attention (queries and keys, latents), if any, and the final norm."""
    mtp: int
    """MTP (multi-token prediction) layers: each a layer like the last one, a projection of 2*H to H and three norms."""
    active_experts: int
    """Active part of `experts`: top_k of num_experts, fewer with zero-computation experts."""

    @property
    def total(self) -> int:
        """All parameters. Shared ones count once."""
        trunk = self.attention + self.dense_mlp + self.router + self.shared_experts + self.norms
        return self.embedding + self.head + trunk + self.experts + self.mtp

    @property
    def active(self) -> int:
        """Active parameters per token, embedding and head included: the "A3B" of a model's name.

        MTP layers are left out, as they are after training.
        """
        return self.total - self.mtp - self.experts + self.active_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """FLOPs per token: each part of the forward pass, and their sums."""

    attention_projections: int
    """Projections of queries, keys, values and output, through latents with MLA."""
    attention_core: int
    """Attention scores and their product with the values, the only part that grows with seq_len."""
    dense_mlp: int
    """SwiGLU of the dense layers."""
    router: int
    """Router logits."""
    experts: int
    """The top_k routed experts of each MoE layer."""
    shared_experts: int
    """Shared experts and their gates, and the projections of latent experts."""
    head: int
    """Output logits."""
    mtp: int
    """MTP (multi-token prediction) in training: its layers, their projections, and one more output head for each."""

    @property
    def forward(self) -> int:
        """FLOPs of one token in the forward pass."""
        attention = self.attention_projections + self.attention_core
        return attention + self.dense_mlp + self.router + self.experts + self.shared_experts + self.head + self.mtp

    @property
    def total(self) -> int:
        """FLOPs of one token in forward and backward pass."""
        return TRAIN_TO_FORWARD * self.forward


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model, over all ranks."""
    counts: Counter[ModelPart] = Counter()
    for kind, number in Counter(model.block_kinds).items():
        for weight in kind.params:
            counts[weight.part] += number * weight.numel
    for weight in (embedding_weight(model), *head_weights(model)):
        counts[weight.part] += weight.numel
    if model.mtp_layers:
        counts["mtp"] = model.mtp_layers * sum(weight.numel for weight in mtp_layer_weights(model))
    routed = model.routed
    return ParameterCount(
        **{part: counts[part] for part in get_args(ModelPart)},
        active_experts=int(counts["experts"] // routed.num_experts * routed.mean_active) if routed else 0,
    )


def _core_flops(layer: Layer, seq_len: int, *, causal: bool) -> float:
    """Return the forward FLOPs of one token of a layer without a weight."""
    return layer.core.flops(keys_per_token(layer.window, seq_len, causal=causal, chunk_size=layer.chunk))


def layer_flops(model: ModelConfig, layer: Layer, seq_len: int) -> FlopCount:
    """Count the FLOPs per token of one layer, as `train_flops_per_token` counts the model's."""
    return _flop_count(_gemm_flops(model, layer.params), _core_flops(layer, seq_len, causal=False))


def _flop_count(gemms: Counter[ModelPart], core: float, head: int = 0, mtp: int = 0) -> FlopCount:
    return FlopCount(
        attention_projections=gemms["attention"],
        attention_core=round(core),
        dense_mlp=gemms["dense_mlp"],
        router=gemms["router"],
        experts=gemms["experts"],
        shared_experts=gemms["shared_experts"],
        head=head,
        mtp=mtp,
    )


def train_flops_per_token(model: ModelConfig, seq_len: int, *, causal: bool = False) -> FlopCount:
    """Count the FLOPs per token of a training step, averaged over a sequence (conventions: module docstring).

    Args:
        seq_len: tokens of the whole sequence, over all context-parallel ranks.
        causal: count the half of the attention core that a causal mask leaves, instead of all of it.
    """
    core_flops = [_core_flops(layer, seq_len, causal=causal) for layer in model.decoder_layers]
    flops: Counter[ModelPart] = Counter()
    for kind, number in Counter(model.block_kinds).items():
        flops.update({part: number * count for part, count in _gemm_flops(model, kind.params).items()})
    head = 2 * model.hidden_size * model.vocab_size
    mtp = 0
    if model.mtp_layers:
        gemms = _gemm_flops(model, mtp_layer_weights(model))
        core = _core_flops(model.mtp_layer, seq_len, causal=causal)
        mtp = model.mtp_layers * (sum(gemms.values()) + round(core) + head)
    return _flop_count(flops, sum(core_flops), head, mtp)


def step_flops_per_token(model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> float:
    """Count the FLOPs per token of the training step of a recipe. Frozen weights have no gradient.

    A frozen matrix with an adapter costs one product in the forward pass and one (not two) in the backward pass. Each
    adapter costs three. An optimizer without gradients costs two forward passes.
    """
    count = train_flops_per_token(model, train.seq_len)
    adapters = 0
    for kind in model.block_kinds if lora.rank else ():
        adapters += sum(_gemm_flops(model, layer_adapters(kind, lora)).values())
    if not chosen_in(train, OptimizerPart).needs_gradients:
        return 2 * (count.forward + adapters)
    if not lora.rank:
        return count.total
    frozen = count.forward - count.attention_core
    return TRAIN_TO_FORWARD * (count.attention_core + adapters) + (TRAIN_TO_FORWARD - 1) * frozen


def keys_per_token(window: int, seq_len: int, *, causal: bool, chunk_size: int = 0) -> float:
    """Return the keys that a token attends to in one layer, averaged over the sequence.

    Args:
        window: sliding window in tokens. 0: none.
        causal: count the half that a causal mask leaves. Has no effect with a window or chunks.
        chunk_size: tokens of an attention chunk. 0: none.
    """
    if 0 < chunk_size < seq_len:
        chunks, rest = divmod(seq_len, chunk_size)
        return (chunks * chunk_size**2 + rest**2) / (2 * seq_len)
    if 0 < window < seq_len:
        return window - window * window / (2 * seq_len)
    return seq_len / 2 if causal else seq_len


def _gemm_flops(model: ModelConfig, weights: Iterable[ParamSpec]) -> Counter[ModelPart]:
    """Return the FLOPs of one token's GEMMs with the weights of a layer, by part."""
    flops: Counter[ModelPart] = Counter()
    for weight in weights:
        if weight.is_matrix:
            active: float = weight.numel
            if weight.is_expert:
                active = weight.numel // model.experts.num_experts * model.experts.mean_active
            flops[weight.part] += int(2 * active)
    return flops
