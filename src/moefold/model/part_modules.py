"""Modules of the parts of a layer: a part from another package must list the parameters that its module has."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from moefold.config.base.part import checked_build, describe_part
from moefold.config.base.part_registry import is_built_in
from moefold.config.groups.attention import AttentionFrame
from moefold.config.groups.block import NormPart
from moefold.config.groups.ffn import FeedForwardFrame
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.errors import ConfigError, RunError
from moefold.model.attention import TokenMixer
from moefold.model.moe.layer import LayerOutput
from moefold.model.norm import Norm


def build_attention(layer: Layer, model: ModelConfig) -> TokenMixer:
    """Return the attention of a layer.

    Raises:
        ConfigError: a part of another package has a module of a wrong class, or with other parameters than listed.
    """
    frame = AttentionFrame(
        hidden_size=layer.hidden_size,
        norm_eps=model.norm.eps,
        zero_centered_norms=model.norm.zero_centered,
        score_factor=model.rope.scaling.score_factor,
    )
    module: TokenMixer = checked_build(layer.attention, layer.attention.build(frame), TokenMixer)
    _check_module(layer.attention, module, layer.hidden_size)
    return module


def build_ffn(layer: Layer, frame: FeedForwardFrame, number: int) -> nn.Module:
    """Return the feed-forward network of a layer, given its number.

    Raises:
        ConfigError: see `build_attention`.
    """
    module = checked_build(layer.ffn, layer.ffn.build(frame, number), nn.Module)
    _check_module(layer.ffn, module, layer.hidden_size)
    return module


def build_norm(part: NormPart, width: int) -> Norm:
    """Return a norm of the residual stream.

    Raises:
        ConfigError: see `build_attention`.
    """
    module: Any = checked_build(part, part.build(width), nn.Module)
    _check_module(part, module, "", width)
    return module


def _check_module(part: Any, module: nn.Module, *widths: Any) -> None:
    """Check the parameters of the module of a part from another package, and the shape of each output."""
    if is_built_in(type(part)):
        return
    if isinstance(module, TokenMixer) and hasattr(module, "caches"):
        raise ConfigError(f"{describe_part(part)} has a module with caches(), which is now open_caches()")
    specs = list(part.params(*widths))
    for spec in specs:
        if len(spec.initial) not in (0, 1, spec.shape[0]):
            raise ConfigError(
                f"{describe_part(part)} has {len(spec.initial)} initial values of {spec.shape[0]} rows of "
                f"{spec.name}; give one for each, or one for all"
            )
    listed_shapes = {spec.name.removeprefix("."): tuple(spec.shape) for spec in specs}
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    if faults := "; ".join(_differences(listed_shapes, shapes)):
        raise ConfigError(
            f"{describe_part(part)} lists other parameters than {type(module).__qualname__} has: {faults}"
        )
    module.register_forward_hook(partial(_check_output, describe_part(part)))


def _check_output(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Check the shape of the output of a part's module. With a shortcut, also of the routed part after it.

    Raises:
        RunError: the shape is wrong.
    """
    tensor = output.y if isinstance(output, LayerOutput) else output
    if getattr(tensor, "shape", None) != inputs[0].shape:
        kind = f"the shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"the type {type(tensor).__name__}"
        returned = f"{name} returns {kind} from {type(module).__qualname__}.forward()"
        raise RunError(f"{returned}, which must have the shape of its input, {tuple(inputs[0].shape)}")


def _differences(listed_shapes: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name in dict.fromkeys((*listed_shapes, *shapes)):
        if name not in shapes:
            yield f"{name} is only in params()"
        elif name not in listed_shapes:
            yield f"{name} is only in the module"
        elif listed_shapes[name] != shapes[name]:
            yield f"{name} has the shape {listed_shapes[name]} in params() and {shapes[name]} in the module"
    if listed_shapes == shapes and list(listed_shapes) != list(shapes):
        yield f"params() has the order {', '.join(listed_shapes)}, and the module {', '.join(shapes)}"
