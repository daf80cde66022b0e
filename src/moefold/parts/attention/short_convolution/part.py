"""Gated short convolution (LFM2, arXiv:2511.23404): a causal convolution between two gates, instead of attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import MaxMagnitude, VerifyAs, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.attention import AttentionCore, AttentionFrame, AttentionPart, LinearFormula
from moefold.cost.saved_tensors import BytesByPart

if TYPE_CHECKING:
    from moefold.config.groups.layer_sizes import LayerSizes
    from moefold.parts.attention.short_convolution.module import ShortConvolution


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionPart(AttentionPart):
    """Mix the last tokens in each channel, between two gates, as wide as the hidden state (LFM2, arXiv:2511.23404)."""

    is_recurrent: ClassVar[bool] = True
    conv_kernel: Annotated[int, at_least(2), MaxMagnitude(MAX_WIDTH), VerifyAs.SIZE] = 4
    """Tokens that the causal convolution of each channel combines, itself included."""
    bias: bool = False
    """Biases on the convolution and on the projections (LFM2)."""

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with a short kernel."""
        return replace(self, conv_kernel=min(self.conv_kernel, small.conv_kernel))

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `ShortConvolution`. See base class."""
        for name in ("wb", "wc", "wv"):
            yield ParamSpec(name, (hidden, hidden), "attention", tp_dim=0)
        shape = hidden, self.conv_kernel
        yield ParamSpec("conv", shape, "attention", tp_dim=0, never_as_matrix=True, drawn="convolution")
        yield ParamSpec("wo", (hidden, hidden), "attention", tp_dim=1, drawn="output")
        if self.bias:
            for name in ("bb", "bc", "bv", "conv_bias"):
                yield ParamSpec(name, (hidden,), "attention", tp_dim=0)
            yield ParamSpec("bo", (hidden,), "attention")

    def core(self, hidden: int) -> AttentionCore:
        """Return the last tokens. The convolution counts as a matrix."""
        return AttentionCore(conv_width=hidden, conv_kernel=self.conv_kernel)

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the gates and values, the inputs of the recomputed convolution, and of its output."""
        tp = sizes.parallel.tp
        width = sizes.hidden_size // tp
        saved = sizes.norm_with_output(saves_output=tp == 1, part="attention")
        saved["attention"] += sizes.gathered_bytes(3 * width)
        saved["core attention"] += sizes.gathered_bytes(width)
        return saved

    def delayed_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the projections. See base class."""
        hidden = sizes.hidden_size
        return BytesByPart(attention=sizes.gathered_bytes(2 * hidden + 4 * hidden // sizes.parallel.tp))

    def transient(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the temporary bytes of the convolution, which is recomputed in the backward pass."""
        width = sizes.hidden_size // sizes.parallel.tp
        factor = 3.0 if sizes.item_bytes < sizes.high_precision_bytes else 2.0
        numbers = round(sizes.gathered_tokens * factor * width)
        transient = BytesByPart({"core attention": numbers * sizes.high_precision_bytes})
        if "layer" in sizes.recompute:
            transient["attention"] += sizes.gathered_bytes(3 * width)
        return transient

    def build(self, frame: AttentionFrame) -> "ShortConvolution":
        """Return the module. See base class."""
        from moefold.parts.attention.short_convolution.module import ShortConvolution

        return ShortConvolution(self, frame)

    def formula(self) -> LinearFormula:
        """Return the output for the tokens of one document. See base class."""
        from moefold.parts.attention.short_convolution.oracle import output

        return partial(output, self)
