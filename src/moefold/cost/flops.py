"""Parameter and FLOP counts of a model, from its sizes alone, and peak bfloat16 throughput of devices. Torch-free.

The planner, the trainer's `tflops_per_rank` and `mfu`, and the tests share these formulas.

Conventions:

* A multiply-add is 2 operations. Only GEMMs count; norms, activations, RoPE, softmax, biases and the embedding
  look-up do not.
* A training step is 3 forward passes: the backward pass has two GEMMs for each of the forward pass. Recomputation
  does not count ("model FLOPs", arXiv:2204.02311 app. B).
* Attention is *full* by default, as in arXiv:2504.14960 and arXiv:2204.02311: each token attends to all seq_len keys.
  `causal=True` counts the half that a causal mask leaves, seq_len / 2 keys for each token. A layer with a sliding
  window W counts the unmasked keys either way, W - W*W/(2*seq_len) on average: a sliding-window kernel computes no
  others. Document masks, which depend on the data, change no count.
* Every token runs through top_k experts, whether or not some routed tokens are dropped.
* The output head is counted, and so is the router, which arXiv:2504.14960 leaves out: subtract `3 * router` to
  compare with its numbers (0.007 % for Mixtral-8x22B, 0.3 % for the many small experts of Qwen3-30B-A3B).
"""

import re
from dataclasses import dataclass, replace

from moefold.config.model import ModelConfig

TRAIN_TO_FORWARD = 3
"""FLOPs of a training step over those of its forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameter counts of a whole model, by part. The fields from `embedding` to `mtp` add up to `total`."""

    embedding: int
    """Token embedding, V*H."""
    head: int
    """Output head, V*H; 0 with tied embeddings."""
    attention: int
    """Projections of all layers (queries, keys, values, latents, output), with their biases and sinks."""
    dense_mlp: int
    """SwiGLU of the dense layers."""
    router: int
    """Router of each MoE layer, H*E, and its bias."""
    experts: int
    """All routed experts."""
    shared_experts: int
    """Shared experts and their gates."""
    norms: int
    """Two norms per layer, the norms inside attention (queries and keys, latents), if any, and the final norm."""
    mtp: int
    """MTP (multi-token prediction) layers: each a layer like the last one, a projection of 2*H to H and three norms."""
    active_experts: int
    """Active part of `experts`: top_k of num_experts."""

    @property
    def total(self) -> int:
        """All parameters; shared ones count once."""
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
    """Attention scores and their product with the values; the only part that grows with seq_len."""
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
    hidden, layers, dense_layers, moe_layers = _sizes(model)
    biases = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_size if model.qkv_bias else 0
    biases += hidden if model.attention_output_bias else 0
    biases += model.num_attention_heads if model.attention_sinks else 0
    expert = _swiglu(hidden, model.moe_ffn_hidden_size)
    expert += 2 * model.moe_ffn_hidden_size + hidden if model.moe_bias else 0
    return ParameterCount(
        embedding=model.vocab_size * hidden,
        head=0 if model.tie_embeddings else model.vocab_size * hidden,
        attention=layers * (_attention_weights(model) + biases),
        dense_mlp=dense_layers * _swiglu(hidden, model.ffn_hidden_size),
        router=moe_layers * (hidden + model.router_bias) * model.num_experts,
        experts=moe_layers * model.num_experts * expert,
        shared_experts=moe_layers * _shared_experts(model),
        norms=layers * (2 * hidden + _attention_norms(model)) + hidden,
        mtp=_mtp_parameters(model) if model.mtp_layers else 0,
        active_experts=moe_layers * model.top_k * expert,
    )


def train_flops_per_token(model: ModelConfig, seq_len: int, *, causal: bool = False) -> FlopCount:
    """Count the FLOPs per token of a training step, averaged over a sequence (conventions: module docstring).

    Args:
        seq_len: tokens of the whole sequence, over all context-parallel ranks.
        causal: count the half of the attention core that a causal mask leaves, instead of all of it.
    """
    hidden, layers, dense_layers, moe_layers = _sizes(model)
    value_size = model.v_head_dim if model.attention == "mla" else model.head_size
    keys = sum(_keys_per_token(window, seq_len, causal) for window in model.layer_windows)
    return FlopCount(
        attention_projections=2 * layers * _attention_weights(model),
        attention_core=round(2 * keys * model.num_attention_heads * (model.head_size + value_size)),
        dense_mlp=2 * dense_layers * _swiglu(hidden, model.ffn_hidden_size),
        router=2 * moe_layers * hidden * model.num_experts,
        experts=2 * moe_layers * model.top_k * _swiglu(hidden, model.moe_ffn_hidden_size),
        shared_experts=2 * moe_layers * _shared_experts(model),
        head=2 * hidden * model.vocab_size,
        mtp=_mtp_flops(model, seq_len, causal=causal) if model.mtp_layers else 0,
    )


def _last_layer(model: ModelConfig) -> ModelConfig:
    """Return a one-layer model with the last layer, the kind of the MTP layers."""
    pattern = "W" if model.layer_windows[-1] else "F"
    return replace(model, mtp_layers=0, num_layers=1, layer_pattern=model.layer_kinds[-1], attention_pattern=pattern)


def _mtp_parameters(model: ModelConfig) -> int:
    one = count_parameters(_last_layer(model))
    hidden = model.hidden_size
    # The final norm of the one-layer model counts as the norm after each MTP layer.
    layer = one.total - one.embedding - one.head
    return model.mtp_layers * (layer + 2 * hidden * hidden + 2 * hidden)


def _mtp_flops(model: ModelConfig, seq_len: int, *, causal: bool) -> int:
    one = train_flops_per_token(_last_layer(model), seq_len, causal=causal)
    return model.mtp_layers * (one.forward + 2 * 2 * model.hidden_size**2)


def _sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return hidden size, layers, dense layers and MoE layers."""
    moe_layers = model.layer_kinds.count("M")
    return model.hidden_size, model.num_layers, model.num_layers - moe_layers, moe_layers


def _attention_weights(model: ModelConfig) -> int:
    """Return the projection weights of one attention layer."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    head = model.head_size
    if model.attention == "gqa":
        return hidden * (heads + 2 * model.num_query_groups) * head + heads * head * hidden
    rank = model.q_lora_rank
    query = (hidden + heads * head) * rank if rank else hidden * heads * head
    down = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    up = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return query + down + up + heads * model.v_head_dim * hidden


def _attention_norms(model: ModelConfig) -> int:
    """Return the norm weights inside one attention layer."""
    if model.attention == "mla":
        return model.q_lora_rank + model.kv_lora_rank
    if not model.qk_norm:
        return 0
    heads = model.num_attention_heads + model.num_query_groups if model.qk_norm_width == "all_heads" else 2
    return heads * model.head_size


def _keys_per_token(window: int, seq_len: int, causal: bool) -> float:
    """Return the keys that a token attends to in one layer, averaged over the sequence."""
    if 0 < window < seq_len:
        return window - window * window / (2 * seq_len)
    return seq_len / 2 if causal else seq_len


def _swiglu(hidden_size: int, ffn_hidden_size: int) -> int:
    """Return the parameters of gate, up and down projection."""
    return 3 * hidden_size * ffn_hidden_size


def _shared_experts(model: ModelConfig) -> int:
    """Return the parameters of one layer's shared expert and its gate (one output column)."""
    width = model.shared_expert_ffn_hidden_size
    return _swiglu(model.hidden_size, width) + (model.hidden_size if width and model.shared_expert_gate else 0)


_PARTIAL_DEVICE = re.compile(r"\b(mig|grid|vgpu|laptop)\b")
"""Names of partial or reduced devices, whose peak is not the device's."""

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"gb300", 2500.0),
    (r"gb200", 2500.0),
    (r"b300", 2250.0),
    (r"b200", 2250.0),
    (r"gh200", 989.5),
    (r"h200 nvl", 835.5),
    (r"h200", 989.5),
    (r"h100 nvl", 835.5),
    (r"h[18]00 pcie", 756.0),
    (r"h[18]00", 989.5),
    (r"h20", 148.0),
    (r"a[18]00", 312.0),
    (r"a30", 165.0),
    (r"a40", 149.7),
    (r"l40s", 362.05),
    (r"l40", 181.05),
    (r"l4", 121.0),
    (r"rtx a6000", 154.8),
    (r"rtx 3090$", 71.0),
    (r"rtx 4090$", 165.2),
    (r"rtx 5090$", 209.5),
    (r"mi300a", 980.6),
    (r"mi300x", 1307.4),
    (r"mi325x", 1307.4),
    (r"mi350x", 2306.9),
    (r"mi355x", 2516.6),
)


def peak_bf16_tflops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 TFLOP/s of a device, or None if it is unknown.

    Since Hopper, NVIDIA documents print peaks with 2:4 sparsity; here is the dense half. Sources, all vendor
    documents of the device:

    * GB300, GB200: GB300 NVL72 and GB200 NVL72 datasheets, 360 PFLOP/s sparse for 72 GPUs: 2500.
    * B300, B200: HGX B300 and HGX B200 datasheets, 36 PFLOP/s sparse for 8 GPUs: 2250.
    * GH200, H200 (SXM), H100 (SXM), H800 (SXM): datasheets, 1979 sparse: 989.5; H200 NVL and H100 NVL: 1671 sparse:
      835.5; H100 PCIe and H800 PCIe: 1513 sparse: 756. H20: datasheet, 148 dense.
    * A100 and A800, SXM and PCIe: datasheets, 312 dense. A30: 165. A40: 149.7.
    * L40S: datasheet, 362.05 dense. L40: 181.05. L4: 242 sparse: 121.
    * RTX A6000: GA102 whitepaper, 154.8 (float32 accumulation). RTX 3090: the same, 71. RTX 4090: Ada whitepaper,
      165.2. RTX 5090: RTX Blackwell whitepaper, 209.5.
    * MI300A, MI300X, MI325X, MI350X, MI355X: AMD datasheets, 980.6, 1307.4, 1307.4, 2306.9, 2516.6 dense.

    A slice of a device (MIG, vGPU) and a laptop's variant are unknown.

    Args:
        device_name: name as returned by `torch.cuda.get_device_name` ("NVIDIA H100 80GB HBM3").
    """
    name = device_name.lower().replace("-", " ").replace("_", " ")
    if _PARTIAL_DEVICE.search(name):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(rf"\b{pattern}\b", name)), None)
