"""Feed-forward networks of a layer: dense, or a mixture of experts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from moefold.config.groups.block import ActivationPart
from moefold.config.param_spec import ModelPart, ParamSpec
from moefold.config.part import FlatKey, KindOf, Part


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

    @property
    def tp_unit(self) -> tuple[str, int]:
        """Recipe key whose value tensor parallelism divides, and that value."""
        raise NotImplementedError

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


@dataclass(frozen=True, kw_only=True)
class RoutedPart(FeedForwardPart):
    """Experts, of which a router chooses some for each token."""

    is_routed: ClassVar[bool] = True
    framed: ClassVar[frozenset[str]] = frozenset(
        {
            *("top_k", "zero_experts", "active_experts", "expert_bias", "scaling_factor", "num_groups", "top_groups"),
            "is_shortcut",
        }
    )
    num_experts: Annotated[int, FlatKey("model.num_experts")]
    top_k: Annotated[int, FlatKey("model.top_k")]
    zero_experts: Annotated[int, FlatKey("model.zero_experts")]
    active_experts: Annotated[float, FlatKey("model.active_experts")]
    width: Annotated[int, FlatKey("model.moe_ffn_hidden_size")]
    """Inner width of an expert."""
    token_width: Annotated[int, FlatKey("model.moe_hidden_size")]
    """Width of the tokens that experts compute; 0: of the residual stream."""
    shared_width: Annotated[int, FlatKey("model.shared_expert_ffn_hidden_size")]
    """Inner width of the shared expert; 0: none."""
    shared_gate: Annotated[bool, FlatKey("model.shared_expert_gate")]
    has_bias: Annotated[bool, FlatKey("model.moe_bias")]
    activation: Annotated[ActivationPart, KindOf("activation")]
    probs_on_input: Annotated[bool, FlatKey("model.router_probs_on_input")]
    router_bias: Annotated[bool, FlatKey("model.router_bias")]
    expert_bias: Annotated[bool, FlatKey("model.expert_bias")]
    scaling_factor: Annotated[float, FlatKey("model.router_scaling_factor")]
    """Factor of the routing weights."""
    num_groups: Annotated[int, FlatKey("model.num_groups")]
    """Groups of neighbouring experts."""
    top_groups: Annotated[int, FlatKey("model.top_groups")]
    """Groups from which the experts of a token are chosen."""
    is_shortcut: Annotated[bool, FlatKey("model.moe_shortcut")]
    """Whether the output of the routed experts is added after the next layer."""

    @property
    def num_choices(self) -> int:
        """Choices of the router: the experts, then the zero-computation experts."""
        return self.num_experts + self.zero_experts

    @property
    def mean_active(self) -> float:
        """Expected number of experts with computation of a token."""
        return self.active_experts or self.top_k * self.num_experts / self.num_choices

    @property
    def tp_unit(self) -> tuple[str, int]:
        """The width of the shared expert; see base class."""
        return "model.shared_expert_ffn_hidden_size", self.shared_width

    def token_size(self, hidden: int) -> int:
        """Return the width of the tokens that are dispatched, the input and output of an expert.

        Args:
            hidden: width of the residual stream.
        """
        return self.token_width or hidden


def swiglu_params(part: ModelPart, hidden: int, ffn: int) -> Iterator[ParamSpec]:
    """Yield the parameters of `SwiGLU`."""
    yield ParamSpec("w_gate", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_up", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_down", (hidden, ffn), part, tp_dim=1)
