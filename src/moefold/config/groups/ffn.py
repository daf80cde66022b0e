"""Feed-forward networks of a layer: dense, or a mixture of experts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from moefold.config.param_spec import ModelPart, ParamSpec
from moefold.config.part import Part


@dataclass(frozen=True, kw_only=True)
class FeedForwardPart(Part):
    """Feed-forward network of a layer."""

    group: ClassVar[str] = "ffn"
    is_routed: ClassVar[bool] = False
    """Whether a router sends each token to some experts."""

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of the module, by their names in it and in its order.

        Args:
            hidden: width of the residual stream.
        """
        raise NotImplementedError

    def build(self, recipe: Any, number: int) -> Any:
        """Return the module, with the parameters of `params`.

        Args:
            recipe: a `Config`.
            number: number of the layer.
        """
        raise NotImplementedError

    @property
    def recompute_parts(self) -> frozenset[str]:
        """Parts of `train.recompute` that it has."""
        return frozenset()

    def saved(self, sizes: Any) -> Counter[str]:
        """Return the bytes saved for backward by part of the model, without the input.

        Args:
            sizes: sizes of a micro-batch, `cost.block_sizes.BlockSizes`.
        """
        raise NotImplementedError

    def delayed_wgrad(self, sizes: Any) -> Counter[str]:
        """Return the GEMM inputs and output gradients that a split backward pass holds."""
        raise NotImplementedError

    def concurrent_wgrad(self, sizes: Any) -> Counter[str]:
        """Return delayed weight-gradient bytes that exist while the saved tensors do."""
        return Counter()

    def transient(self, sizes: Any) -> Counter[str]:
        """Return the peak of temporary bytes while it runs or is recomputed."""
        return Counter()

    def saved_if_recomputed(self, sizes: Any) -> Counter[str]:
        """Return the bytes saved even if the whole layer is recomputed."""
        return Counter()


def swiglu_params(part: ModelPart, hidden: int, ffn: int) -> Iterator[ParamSpec]:
    """Yield the parameters of `SwiGLU`."""
    yield ParamSpec("w_gate", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_up", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_down", (hidden, ffn), part, tp_dim=1)
