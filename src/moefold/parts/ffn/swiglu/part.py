"""SwiGLU (arXiv:2002.05202): the dense feed-forward network."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.ffn import DensePart, FeedForwardFormula, FeedForwardFrame, swiglu_params
from moefold.cost.saved_tensors import BytesByPart

if TYPE_CHECKING:
    from moefold.config.groups.layer_sizes import LayerSizes
    from moefold.model.mlp import SwiGLU


@dataclass(frozen=True, kw_only=True)
class SwiGluPart(DensePart):
    """Multiply an up projection by the SiLU of a gate projection, and project back."""

    recompute_parts: ClassVar[frozenset[str]] = frozenset({"dense_mlp"})

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with a narrow inner width on each rank."""
        return replace(self, intermediate_size=small.shard_width * small.tp)

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `SwiGLU`. See base class."""
        return swiglu_params("dense_mlp", hidden, self.intermediate_size)

    @property
    def tp_unit(self) -> tuple[str, int]:
        """The inner width. See base class."""
        return "model.ffn.dense.intermediate_size", self.intermediate_size

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of gate, up and their product. See base class."""
        if "dense_mlp" in sizes.recompute:
            return sizes.norm_with_output(saves_output=True)
        saved = sizes.norm_with_output(saves_output=sizes.parallel.tp == 1, part="dense MLP")
        saved["dense MLP"] += sizes.swiglu(self.intermediate_size)
        return saved

    def delayed_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the projections. See base class."""
        return BytesByPart({"dense MLP": sizes.swiglu_wgrad(self.intermediate_size)})

    def build(self, frame: FeedForwardFrame, number: int) -> "SwiGLU":
        """Return the module. See base class."""
        from moefold.model.mlp import SwiGLU

        return SwiGLU(frame.hidden_size, self.intermediate_size)

    def formula(self) -> FeedForwardFormula:
        """Return SwiGLU. See base class."""
        from moefold.parts.ffn.swiglu.oracle import swiglu

        return lambda weights, x, route, round_dispatched: (swiglu(weights, x), None)
