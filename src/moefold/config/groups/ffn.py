"""Feed-forward networks of a layer: dense, or a mixture of experts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from moefold.config.param_spec import ModelPart, ParamSpec
from moefold.config.part import Part


class ChosenExperts(Protocol):
    """Experts of the tokens of a micro-batch, and their weights, float64 [B, S, K] each."""

    @property
    def experts(self) -> Any:
        """Return the numbers of the experts."""
        ...

    @property
    def weights(self) -> Any:
        """Return the routing weights; 0 for a dropped choice."""
        ...


Route = Callable[[Any, Any, Any], ChosenExperts]
"""The router of the oracle: x [B, S, H], its weight and its bias or None -> the choices."""
FeedForwardFormula = Callable[[Mapping[str, Any], Any, Route, Callable[[Any], Any]], tuple[Any, Any]]
"""A network in float64: weights by name, the normalised hidden states [B, S, H], the router, and the rounding of
dispatched tokens -> output, and output of routed experts or None; both are added, `model.moe_shortcut` says where."""


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

    def formula(self) -> FeedForwardFormula | None:
        """Return the network in float64; None: it has no formula."""
        return None

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
