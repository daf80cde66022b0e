"""Modules of the parts of a layer: a part from outside must list the parameters that its module has."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from torch import nn

from moefold.config.find import is_built_in
from moefold.config.groups.attention import AttentionFrame
from moefold.config.groups.block import NormPart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.param_spec import ParamSpec
from moefold.config.part import Part, describe_part
from moefold.errors import ConfigError
from moefold.model.attention import TokenMixer
from moefold.model.norm import Norm


def build_attention(layer: Layer, model: ModelConfig) -> TokenMixer:
    """Return the attention of a layer.

    Raises:
        ConfigError: the part is from outside, and has other parameters than its module.
    """
    part = layer.attention
    module: TokenMixer = part.build(
        AttentionFrame(
            hidden_size=layer.hidden_size,
            norm_eps=model.norm.eps,
            zero_centered_norms=model.norm.zero_centered,
            score_factor=model.rope.scaling.score_factor,
        )
    )
    _check_parameters(part, module, partial(part.params, layer.hidden_size))
    return module


def build_norm(part: NormPart, width: int) -> Norm:
    """Return a norm of the residual stream.

    Raises:
        ConfigError: see `build_attention`.
    """
    module: Norm = part.build(width)
    _check_parameters(part, module, partial(part.params, "", width))
    return module


def _check_parameters(part: Part, module: nn.Module, params: Callable[[], Iterable[ParamSpec]]) -> None:
    if is_built_in(type(part)):
        return
    specs = list(params())
    for spec in specs:
        if len(spec.initial) not in (0, 1, spec.shape[0]):
            raise ConfigError(
                f"{describe_part(part)} has {len(spec.initial)} initial values of {spec.shape[0]} rows of "
                f"{spec.name}; give one for each, or one for all"
            )
    listed = {spec.name.removeprefix("."): tuple(spec.shape) for spec in specs}
    found = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    if faults := "; ".join(_differences(listed, found)):
        raise ConfigError(
            f"{describe_part(part)} lists other parameters than {type(module).__qualname__} has: {faults}"
        )


def _differences(listed: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name in dict.fromkeys((*listed, *found)):
        if name not in found:
            yield f"{name} is in params() alone"
        elif name not in listed:
            yield f"{name} is in the module alone"
        elif listed[name] != found[name]:
            yield f"{name} has the shape {listed[name]} in params() and {found[name]} in the module"
    if listed == found and list(listed) != list(found):
        yield f"params() has the order {', '.join(listed)}, and the module {', '.join(found)}"
