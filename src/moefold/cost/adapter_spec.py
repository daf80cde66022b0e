"""Low-rank adapters of a model by name: which matrices have them, and how they are sharded.

The adapter of a matrix W is a pair A, B of a small rank r. The layer computes W x + (alpha / r) B A x (arXiv:2106.09685
sec. 4.1). For a matrix [out, in], A is [r, in] and B is [out, r]. For experts [E, in, out], which multiply rows from
the right, A is [E, in, r] and B is [E, r, out]. A shards the inputs as W does, and B shards the outputs. The dim of the
rank is never sharded.
"""

from dataclasses import replace
from functools import lru_cache

from moefold.config.base.param_spec import ModelPart, ParamSpec
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.cost.layer_spec import model_weights

ADAPTED_PARTS: tuple[ModelPart, ...] = ("attention", "dense_mlp", "shared_experts", "experts")
"""Parts of a model whose matrices may have adapters."""
ALL_TARGETS = "all"
MODULE_NAME = "lora"
"""Name of the module with the adapters of another module's matrices."""


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names of the adapter A, B of a matrix."""
    module, _, leaf = name.rpartition(".")
    prefix = f"{module}.{MODULE_NAME}.{leaf}" if module else f"{MODULE_NAME}.{leaf}"
    return f"{prefix}_a", f"{prefix}_b"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a model belongs to an adapter."""
    return f".{MODULE_NAME}." in name


def adapter_pair(weight: ParamSpec, rank: int) -> tuple[ParamSpec, ParamSpec]:
    """Return the adapter A, B of a matrix."""
    name_a, name_b = adapter_names(weight.name)
    base = replace(weight, matrix_rows=(), never_as_matrix=False)
    if weight.is_expert:
        experts, inputs, outputs = weight.shape
        is_row = weight.etp_dim == 1
        a = replace(base, name=name_a, shape=(experts, inputs, rank), etp_dim=1 if is_row else None)
        return a, replace(base, name=name_b, shape=(experts, rank, outputs), etp_dim=None if is_row else 2)
    outputs, inputs = weight.shape
    is_row = weight.tp_dim == 1
    a = replace(base, name=name_a, shape=(rank, inputs), tp_dim=1 if is_row else None, tp_heads=0)
    b = replace(base, name=name_b, shape=(outputs, rank))
    return a, replace(b, tp_dim=None, tp_heads=0) if is_row else b


def _can_adapt(weight: ParamSpec, layer: Layer) -> bool:
    """Return whether a parameter of a layer may have an adapter.

    Parameters of linear attention, of indexers, of the gates of shared experts and of latent projections may not.
    """
    module, _, leaf = weight.name.rpartition(".")
    if weight.part == "attention" and not layer.attention.has_adapters:
        return False
    has_adapters = module in ("attention", "ffn", "ffn.shared", "ffn.experts")
    return has_adapters and weight.is_matrix and weight.part in ADAPTED_PARTS and leaf != "shared_gate"


@lru_cache(maxsize=256)
def adapted_layer_weights(layer: Layer, lora: LoraConfig) -> tuple[ParamSpec, ...]:
    """Return the matrices with adapters of a layer."""
    found = []
    for weight in layer.params if lora.rank else ():
        leaf = weight.name.rpartition(".")[2]
        is_target = not {ALL_TARGETS, weight.part, leaf, f"{weight.part}.{leaf}"}.isdisjoint(lora.targets)
        if is_target and _can_adapt(weight, layer):
            found.append(weight)
    return tuple(found)


def layer_adapters(layer: Layer, lora: LoraConfig) -> tuple[ParamSpec, ...]:
    """Return the adapters of a layer, by their names in it."""
    pairs = (adapter_pair(weight, lora.rank) for weight in adapted_layer_weights(layer, lora))
    return tuple(adapter for pair in pairs for adapter in pair)


def adaptable_names(model: ModelConfig) -> dict[str, None]:
    """Return the legal targets of a model, in the order of its layers: parts, matrices, and matrices of parts."""
    found: dict[str, None] = {ALL_TARGETS: None}
    weights = [w for layer in model.decoder_layers for w in layer.params if _can_adapt(w, layer)]
    leaves = [(weight.part, weight.name.rpartition(".")[2]) for weight in weights]
    found |= dict.fromkeys(part for part, _ in leaves)
    found |= dict.fromkeys(leaf for _, leaf in leaves)
    return found | dict.fromkeys(f"{part}.{leaf}" for part, leaf in leaves)


@lru_cache(maxsize=64)
def adapted_weights(model: ModelConfig, lora: LoraConfig) -> dict[str, ParamSpec]:
    """Return the matrices of a model that have adapters, by name. Layers of multi-token prediction have none."""
    found = (
        replace(weight, name=f"layers.{i}.{weight.name}")
        for i, layer in enumerate(model.decoder_layers)
        for weight in adapted_layer_weights(layer.kind, lora)
    )
    return {weight.name: weight for weight in found}


@lru_cache(maxsize=64)
def adapter_weights(model: ModelConfig, lora: LoraConfig) -> dict[str, ParamSpec]:
    """Return every parameter of the adapters of a model by its name."""
    weights = adapted_weights(model, lora).values()
    return {adapter.name: adapter for weight in weights for adapter in adapter_pair(weight, lora.rank)}


@lru_cache(maxsize=64)
def training_weights(model: ModelConfig, lora: LoraConfig) -> dict[str, ParamSpec]:
    """Return every parameter of a model in training by its name: the model's, and its adapters'."""
    return model_weights(model) | adapter_weights(model, lora)


def expert_names(model: ModelConfig, lora: LoraConfig) -> frozenset[str]:
    """Return the names of the parameters of routed experts in training, their adapters' parameters included."""
    return frozenset(name for name, weight in training_weights(model, lora).items() if weight.is_expert)
