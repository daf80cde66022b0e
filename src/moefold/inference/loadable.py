"""Check that the description of a checkpoint is readable and matches its tensors."""

from pathlib import Path

from moefold.checkpoint.checkpoint_meta import META_FILE, read_meta
from moefold.checkpoint.inspect import stored_tensors
from moefold.config.lora import LoraConfig
from moefold.convert.preflight import read_model
from moefold.convert.weight_sources import parameter_shapes
from moefold.cost.adapter_spec import adapter_weights
from moefold.errors import ConfigError, format_list
from moefold.inference.source import checkpoint_source

WEIGHTS_PREFIX = "model."
"""Prefix of weights and buffers in the index of a checkpoint."""


def loading_faults(path: Path) -> list[str]:
    """Return the reasons why a checkpoint with intact files cannot be loaded: a change may precede the manifest."""
    try:
        meta = read_meta(path)
        model = read_model(path)
        checkpoint_source(path)
        stored = {tensor.name: tensor.shape for tensor in stored_tensors(path)}
        if model.num_layers > len(stored):
            return [f"its {META_FILE} describes {model.num_layers} layers, and it has {len(stored)} tensors"]
        if meta.lora:
            lora = LoraConfig(rank=meta.lora["rank"], alpha=meta.lora["alpha"], targets=meta.lora["targets"])
            shapes = {name: weight.shape for name, weight in adapter_weights(model, lora).items()}
        else:
            shapes = parameter_shapes(model)
    except ConfigError as error:
        return [str(error)]
    differing = [
        f"{name} of shape {list(shape)}"
        for name, shape in shapes.items()
        if stored.get(WEIGHTS_PREFIX + name) != tuple(shape)
    ]
    return [f"its {META_FILE} describes tensors that it does not have: {format_list(differing)}"] if differing else []
