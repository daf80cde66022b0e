"""Record of a rank's state bytes, and what its formulas add up: bytes of a number, weights of a unit, buffers."""

from collections.abc import Iterable
from dataclasses import dataclass

from moefold.config.base.param_spec import ModelPart, ParamSpec
from moefold.config.chosen import chosen, chosen_in
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes, WirePart
from moefold.config.groups.router import BalanceScopePart, aux_coefficient
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import MODULE_NAME, is_adapter, layer_adapters
from moefold.cost.layer_spec import embedding_weight, head_weights, mtp_layer_weights
from moefold.topology.pipeline_layout import Stage

Unit = Layer | str
"""Unit of a model: a kind of layers, "embedding", "head", or "mtp" for an MTP layer."""
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
QUANTIZED_PARTS: tuple[ModelPart, ...] = ("attention", "dense_mlp", "experts", "shared_experts", "mtp")
"""Parts whose matrices are operands of low-precision GEMMs in training."""
QUANTIZED_COPIES = 2
"""Quantised copies of a weight, one byte per value: one for the forward pass, one for the gradient of the input."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """State bytes of a rank between and during steps, without activations."""

    weights: int = 0
    """Master weights: this rank's shards with padding."""
    gathered: int = 0
    """Gathered weights in the compute type, as many as are in memory at once, and their quantised copies."""
    gradients: int = 0
    """Reduced gradients, sharded like the master weights and in their type."""
    gradient_sums: int = 0
    """Unsharded gradients of this rank, summed over micro-batches before they are reduced."""
    optimizer: int = 0
    """States of the optimizer and of the outer optimizer."""
    buffers: int = 0
    """Expert bias, expert counts, RoPE cosines and sines, and the symmetric memory of a dispatcher."""

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def master_dtype_bytes(run: RunConfig) -> int:
    """Return the bytes of one element of a master weight, its gradient or a float32 moment."""
    return 8 if run.dtype == "float64" else 4


def compute_dtype_bytes(run: RunConfig) -> int:
    """Return the bytes of one element of the compute type."""
    return ITEM_BYTES[run.dtype]


def trained_names(model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> str:
    """Return a part of the names of the weights that a recipe trains, or "" if it trains all."""
    if lora.trains_adapters_only:
        return f".{MODULE_NAME}."
    return ".indexer." if model.trains_indexers_only(train) else ""


def caches_quantized_weights(train: TrainConfig, num_micro_batches: int, zero: int) -> bool:
    """Return whether FP8 kernels keep quantised weights for a step: several micro-batches read the same weights.

    With ZeRO 3 gathered weights and their quantised copies are freed after each use.
    """
    return train.precision == "fp8-blockwise" and num_micro_batches > 1 and zero < 3


def quantized_copy_bytes(weights: Iterable[ParamSpec]) -> int:
    """Return the bytes of the quantised copies of weights, without their scales. Low ranks and indexers count too."""
    return QUANTIZED_COPIES * sum(w.numel for w in weights if w.updates_as_matrix and w.part in QUANTIZED_PARTS)


def expert_buffer_bytes(model: ModelConfig, moe: MoEConfig) -> int:
    """Return the bytes of an MoE layer's buffers: expert bias and expert counts."""
    counts = 8 * (aux_coefficient(moe) > 0 and chosen_in(moe, BalanceScopePart).keeps_counts)
    routed = model.routed
    return routed.num_choices * (4 * routed.router.expert_bias + counts) if routed else 0


def rope_buffer_bytes(run: RunConfig, model: ModelConfig, train: TrainConfig, cp: int) -> int:
    """Return the bytes of the RoPE cosines and sines, which every stage has."""
    return 2 * (train.seq_len // cp) * model.rope_settings.rotary_dim * compute_dtype_bytes(run)


def dispatch_buffer_bytes(cfg: Config) -> int:
    """Return the bytes of a rank's buffers of the dispatcher, allocated once for all layers."""
    sizes = exchange_sizes(cfg)
    return 0 if sizes is None else chosen(cfg, DispatcherPart).reserved_bytes(sizes)


def exchange_sizes(cfg: Config) -> DispatchSizes | None:
    """Return the `dispatch_sizes` of a recipe, or None if no token leaves its rank."""
    p = cfg.parallel
    if p.ep * p.etp == 1:
        return None
    return dispatch_sizes(cfg.model, cfg.train, cfg.moe, p.cp * p.tp, compute_dtype_bytes(cfg.run))


def dispatch_sizes(
    model: ModelConfig, train: TrainConfig, moe: MoEConfig, num_shards: int, item_bytes: int
) -> DispatchSizes:
    """Return the largest exchange sizes of a micro-batch, whose tokens `num_shards` ranks share."""
    part = model.routed
    return DispatchSizes(
        num_experts=part.num_experts if part else 0,
        max_rows=train.seq_len // num_shards * train.micro_batch_size * (part.top_k if part else 0),
        width=part.token_size(model.hidden_size) if part else 0,
        item_bytes=item_bytes,
        fp8_dispatch=chosen_in(moe, WirePart).rounds,
    )


def cast_copy_bytes(run: RunConfig, model: ModelConfig, lora: LoraConfig, name: Unit) -> int:
    """Return the bytes of an unsharded rank's copies of a unit in the compute type, or 0 if that is the master type."""
    if compute_dtype_bytes(run) == master_dtype_bytes(run) or (name == "embedding" and not model.tie_embeddings):
        return 0
    weights = [weight for weight in unit_weights(model, lora, name) if not weight.is_full_precision]
    if lora.trains_adapters_only:
        weights = [weight for weight in weights if is_adapter(weight.name)]
    return sum(weight.numel for weight in weights) * compute_dtype_bytes(run)


def unit_names(model: ModelConfig, stage: Stage) -> list[Unit]:
    """Return the units of a stage."""
    parts = stage.parts
    names: list[Unit] = ["embedding"] if stage.is_first or (stage.is_last and model.last_stage_needs_embedding) else []
    names += [model.block_kinds[i] for i in parts.layers]
    return names + ["head"] + ["mtp"] * parts.num_mtp_layers if stage.is_last else names


def has_experts(model: ModelConfig, name: Unit) -> bool:
    """Return whether a unit has routed experts."""
    layer = model.mtp_layer if name == "mtp" else name
    return not isinstance(layer, str) and layer.ffn.is_routed


def unit_weights(model: ModelConfig, lora: LoraConfig, name: Unit) -> tuple[ParamSpec, ...]:
    """Return the unsharded weights of a unit, in training: with their adapters."""
    match name:
        case "embedding":
            return (embedding_weight(model),)
        case "head":
            return head_weights(model)
        case "mtp":
            return mtp_layer_weights(model)
    assert not isinstance(name, str), f"{name} is not a unit"
    return (*name.params, *layer_adapters(name, lora))
