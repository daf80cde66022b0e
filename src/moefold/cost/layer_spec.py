"""Parameters of a model by name: the parameters of its layers, from their parts, and of embedding and head.

Sharding, counts, FLOPs, state memory, Muon's groups, the planner and conversion read them.
"""

from dataclasses import replace
from functools import lru_cache

from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.attention import prefixed
from moefold.config.model import ModelConfig


@lru_cache(maxsize=256)
def mtp_layer_weights(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters of one MTP (multi-token prediction) layer."""
    hidden = model.hidden_size
    layer = model.mtp_layer
    return (
        ParamSpec("projection", (hidden, 2 * hidden), "mtp"),
        *layer.params,
        *(
            param
            for name in ("embedding_norm", "hidden_norm", "output_norm")
            for param in layer.norm.params(name, hidden)
        ),
    )


def embedding_weight(model: ModelConfig) -> ParamSpec:
    """Return the token embedding."""
    return ParamSpec("weight", (model.vocab_size, model.hidden_size), "embedding", tp_dim=0)


def head_weights(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the last norm, the output head unless embeddings are tied, and its bias."""
    weight = () if model.tie_embeddings else (replace(embedding_weight(model), part="head"),)
    bias = (ParamSpec("bias", (model.vocab_size,), "head", tp_dim=0),) if model.head_bias else ()
    return (*weight, *bias, *model.decoder_layers[0].norm.params("norm", model.hidden_size))


@lru_cache(maxsize=16)
def model_weights(model: ModelConfig) -> dict[str, ParamSpec]:
    """Return every parameter of a model by its name, in the order of the module."""
    found = list(prefixed("embedding", [embedding_weight(model)]))
    for i, layer in enumerate(model.decoder_layers):
        found += prefixed(f"layers.{i}", layer.params)
    for i in range(model.num_layers, model.num_layers + model.mtp_layers):
        found += prefixed(f"layers.{i}", mtp_layer_weights(model))
    found += prefixed("head", head_weights(model))
    return {weight.name: weight for weight in found}
