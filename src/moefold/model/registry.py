"""Registry of the blocks of a layer: attention by `model.attention`, feed-forward networks by the layer's letter."""

from collections.abc import Callable
from functools import partial

from torch import nn

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.model.attention import Attention, TokenMixer
from moefold.model.delta_attention import GatedDeltaNet, KimiDeltaAttention
from moefold.model.gated_linear_attention import GatedLinearAttention
from moefold.model.init import seed_for
from moefold.model.mla import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.moe.layer import MoELayer
from moefold.model.short_convolution import ShortConvolution
from moefold.model.sparse_attention import SparseAttention, SparseLatentAttention


def _build_dense(cfg: Config, number: int) -> SwiGLU:
    return SwiGLU(cfg.model.hidden_size, cfg.model.ffn_hidden_size)


def _build_moe_layer(cfg: Config, number: int) -> MoELayer:
    model = cfg.model
    width = model.shared_expert_ffn_hidden_size
    shared = SwiGLU(model.hidden_size, width) if width else None
    num_micro_batches = cfg.train.global_batch_size // cfg.train.micro_batch_size
    return MoELayer(
        model,
        cfg.moe,
        loss_scale=1.0 / num_micro_batches,
        micro_batches_per_rank=cfg.num_micro_batches,
        noise_seed=seed_for(cfg.run.seed, f"layers.{number}.ffn.router.jitter"),
        shared=shared,
    )


ATTENTION_BUILDERS: dict[str, Callable[[ModelConfig, int], TokenMixer]] = {
    "gqa": Attention,
    "mla": LatentAttention,
    "sparse_gqa": SparseAttention,
    "sparse_mla": SparseLatentAttention,
    "shared_sparse_gqa": partial(SparseAttention, has_indexer=False),
    "shared_sparse_mla": partial(SparseLatentAttention, has_indexer=False),
    "gated_deltanet": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "gla": GatedLinearAttention,
    "short_convolution": ShortConvolution,
}
"""How to build each attention of `cost/layer_spec.py`, for a sliding window; 0: none."""

FEED_FORWARD_BUILDERS: dict[str, Callable[[Config, int], nn.Module]] = {"D": _build_dense, "M": _build_moe_layer}
"""How to build each feed-forward network of `cost/layer_spec.py`, for a layer by its number in the whole model."""
