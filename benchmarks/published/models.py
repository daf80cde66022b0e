"""Models of published measurements: the planner's, and hybrids that the runtime does not have.

Where a source prints its FLOPs for a token, the sizes in `models.toml` agree with it
(tests/benchmarks/test_published_models.py). The layers of a hybrid are parts that moefold can count but not build.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part_registry import find_part
from moefold.config.groups.attention import AttentionCore, AttentionPart
from moefold.config.groups.ffn import FeedForwardPart
from moefold.config.layers import Layer
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.cost.saved_tensors import BytesByPart
from moefold.planner.model_spec import ModelSpec, find_model_name, load_model_spec, normalise_name

if TYPE_CHECKING:
    from moefold.config.groups.layer_sizes import LayerSizes


@dataclass(frozen=True, kw_only=True)
class Mamba(AttentionPart):
    """Mamba-2 mixer with heads of 64, a state of 128 and 8 groups, with FLOPs of the state as in Megatron-Bridge."""

    is_recurrent: ClassVar[bool] = True
    num_heads: int

    @property
    def _inner(self) -> int:
        return self.num_heads * 64

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield both projections."""
        width = 2 * self._inner + 2 * 8 * 128 + self.num_heads
        yield ParamSpec("w_in", (width, hidden), "attention", tp_dim=0)
        yield ParamSpec("w_out", (hidden, self._inner), "attention", tp_dim=1)

    def core(self, hidden: int) -> AttentionCore:
        """Return the FLOPs of the states."""
        return AttentionCore(state_flops=46 * self._inner * 128)


@dataclass(frozen=True, kw_only=True)
class NoMixer(AttentionPart):
    """Empty mixer, for a layer that is only a feed-forward network."""

    is_recurrent: ClassVar[bool] = True

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield nothing."""
        yield from ()

    def core(self, hidden: int) -> AttentionCore:
        """Return a core without states."""
        return AttentionCore()

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return nothing, and take back the input of the block."""
        return BytesByPart({"residual stream": -sizes.hidden_bytes})


@dataclass(frozen=True, kw_only=True)
class NoNetwork(FeedForwardPart):
    """Empty feed-forward network, for a layer that is only a mixer."""

    tp_unit: ClassVar[tuple[str, int]] = ("", 0)

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield nothing."""
        yield from ()

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return nothing, and take back the input of the block."""
        return BytesByPart({"residual stream": -sizes.hidden_bytes})

    def delayed_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return nothing."""
        return BytesByPart()


class UngatedExperts(find_part("ffn", "moe")):  # type: ignore[misc]
    """Experts, and a shared one, of two matrices."""

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters without the gates."""
        return (weight for weight in super().params(hidden) if not weight.name.endswith("w_gate"))


@dataclass(frozen=True)
class ForeignModel(ModelConfig):
    """Model with layers that the runtime does not have."""

    blocks: tuple[Layer, ...] = ()
    """Each layer in order, then an MTP layer if the model has any."""

    @cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """See base class."""
        return self.blocks[: self.num_layers + self.mtp_layers]


def _hybrid(model: ModelConfig, pairs: int, attention: int, mixer_heads: int) -> ForeignModel:
    """Build a hybrid whose layers are each one of Mamba-2 mixer, attention and experts. An MTP layer has both."""
    whole = model.decoder_layers[0]
    both = replace(whole, ffn=UngatedExperts(**_fields_of(whole.ffn)))
    attention_alone = replace(whole, ffn=NoNetwork())
    pair = [replace(attention_alone, attention=Mamba(num_heads=mixer_heads)), replace(both, attention=NoMixer())]
    # The order matters only for pipelines: attention is spread evenly over pairs of a mixer and experts.
    step = pairs // attention
    layers: list[Layer] = []
    for i in range(pairs):
        layers += pair
        if i % step == step - 1 and layers.count(attention_alone) < attention:
            layers.append(attention_alone)
    return ForeignModel(**_fields_of(model) | {"layers": len(layers), "blocks": (*layers, both)})


def _fields_of(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in fields(section)}


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "models.toml").read_text(encoding="utf-8"))


def hybrid_names() -> tuple[str, ...]:
    """Return the names of the hybrids."""
    return tuple(name for name in _tables() if name != "synonyms")


@lru_cache(maxsize=64)
def load_published_model(name: str) -> ModelSpec:
    """Load the spec of a model by the name that `find_published_model` returns."""
    if name not in hybrid_names():
        return load_model_spec(name)
    keys = dict(_tables()[name])
    hybrid = keys.pop("hybrid")
    return ModelSpec(name, _hybrid(config_from_dict({"model": keys}).model, **hybrid), is_trainable=False)


@lru_cache(maxsize=512)
def find_published_model(name: str) -> str | None:
    """Return the model that a spelling means ("Nemotron_3_Nano (pretrain)" is nemotron-3-nano), or None."""
    synonyms = {other: hybrid for hybrid, others in _tables()["synonyms"].items() for other in others}
    synonyms |= {normalise_name(hybrid): hybrid for hybrid in hybrid_names()}
    return synonyms.get(normalise_name(name)) or find_model_name(name)
