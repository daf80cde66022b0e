"""Feed-forward networks of a layer: dense, or a mixture of experts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol

from moefold.config.base.field import SAME_TENSORS, MaxMagnitude, ReadIf, VerifyAs, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import ModelPart, ParamSpec
from moefold.config.base.part import KindOf, Part, Table, part_field
from moefold.config.groups.block import ActivationPart
from moefold.config.groups.router import RouterScorePart

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from moefold.config.groups.layer_sizes import LayerSizes
    from moefold.config.sections.moe import MoEConfig


class ChosenExperts(Protocol):
    """Experts of the tokens of a micro-batch, and their weights, float64 [B, S, K] each."""

    @property
    def experts(self) -> "Tensor":
        """Return the ids of the chosen experts."""
        ...

    @property
    def weights(self) -> "Tensor":
        """Return the routing weights, 0 for a dropped choice."""
        ...


Route = Callable[["Tensor", "Tensor", "Tensor | None"], ChosenExperts]
"""The router of the oracle: x [B, S, H], its weight and its bias or None -> the choices."""
FeedForwardFormula = Callable[
    [Mapping[str, "Tensor"], "Tensor", Route, Callable[["Tensor"], "Tensor"]], tuple["Tensor", "Tensor | None"]
]
"""A network in float64: weights by name, the normalised hidden states [B, S, H], the router, and the rounding of
dispatched tokens -> output, and output of routed experts or None. Both are added where `model.ffn.moe.shortcut` says.
"""


@dataclass(frozen=True, kw_only=True)
class FeedForwardFrame:
    """Settings outside of the parts that the networks of all layers read."""

    hidden_size: int
    moe: "MoEConfig"
    micro_batches: int
    """Micro-batches of a step, of all ranks."""
    rank_micro_batches: int
    """Micro-batches per data-parallel rank and step."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class FeedForwardPart(Part):
    """Feed-forward network of a layer."""

    group: ClassVar[str] = "ffn"
    recompute_parts: ClassVar[frozenset[str]] = frozenset()
    """Parts of `train.recompute` that it may have."""
    is_routed: ClassVar[bool] = False
    """True if a router sends each token to some experts."""

    @property
    def routed(self) -> "RoutedPart | None":
        """This part, if it `is_routed`, else None."""
        return None

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of the module, by their names in it and in its order."""
        raise NotImplementedError

    def build(self, frame: FeedForwardFrame, number: int) -> "Module":
        """Return the module of layer `number`, with the parameters of `params`."""
        raise NotImplementedError

    def formula(self) -> FeedForwardFormula | None:
        """Return the network in float64, or None if it has no formula."""
        return None

    @property
    def tp_unit(self) -> tuple[str, int]:
        """Recipe key of the number that tensor parallelism divides, and this number."""
        raise NotImplementedError

    def saved(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the bytes saved for backward by part of the model, without the input."""
        raise NotImplementedError

    def delayed_wgrad(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the GEMM inputs and output gradients that a split backward pass holds."""
        raise NotImplementedError

    def concurrent_wgrad(self, sizes: "LayerSizes") -> Counter[str]:
        """Return delayed weight-gradient bytes that exist while the saved tensors do."""
        return Counter()

    def transient(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the peak of temporary bytes while the network runs or is recomputed."""
        return Counter()

    def saved_if_recomputed(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the bytes saved even if the whole layer is recomputed."""
        return Counter()


@dataclass(frozen=True, kw_only=True)
class DensePart(FeedForwardPart):
    """Network that processes every token."""

    intermediate_size: Annotated[int, at_least(1), MaxMagnitude(2**26), VerifyAs.SIZE] = 1024
    """Inner width of the network of dense layers."""


@dataclass(frozen=True, kw_only=True)
class SharedExpert(Table):
    """Expert that processes every token, a SwiGLU."""

    intermediate_size: Annotated[int, at_least(1), MaxMagnitude(2**26)] = 512
    """Inner width of the shared expert."""
    gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate (Qwen2-MoE)."""


@dataclass(frozen=True, kw_only=True)
class RoutedPart(FeedForwardPart):
    """Experts and the router that chooses some of them for each token."""

    is_routed: ClassVar[bool] = True
    framed: ClassVar[frozenset[str]] = frozenset({"top_k", "zero_experts", "active_experts", "shortcut"})
    num_experts: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 8
    """Experts of one MoE layer, E."""
    top_k: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 2
    """Experts chosen for each token, K."""
    intermediate_size: Annotated[int, at_least(1), MaxMagnitude(2**26), VerifyAs.SIZE] = 512
    """Inner width of one expert, F."""
    latent_size: Annotated[int, at_least(0, "0: none"), MaxMagnitude(MAX_WIDTH)] = 0
    """Width of the dispatched tokens, the input and output of the routed experts: one projection maps the hidden state
    to it, another maps it back (latent experts, arXiv:2502.16927). Router and shared expert keep the hidden size. 0:
    none."""
    bias: bool = False
    """Biases of the gate, up and down projections of each routed expert (gpt-oss)."""
    activation: Annotated[ActivationPart, KindOf("activation")] = part_field("activation", "swiglu")
    """Activation of the routed experts."""
    router: Annotated[RouterScorePart, KindOf("router_score")] = part_field("router_score", "softmax")
    """Score function of the router's logits."""
    probs_on_input: bool = False
    """Multiply the input of a routed expert by the routing weight instead of its output (Llama 4)."""
    shared: SharedExpert | None = None
    """Expert that processes every token."""
    zero_experts: Annotated[int, at_least(0, "0: none"), MaxMagnitude(MAX_WIDTH)] = 0
    """Zero-computation experts: additional choices of the router, whose output is the layer's input times the routing
    weight, without weights and without dispatch (LongCat-Flash, arXiv:2509.01322). 0: none."""
    active_experts: Annotated[
        float,
        at_least(0, "0: as all choices"),
        SAME_TENSORS,
        ReadIf("model.ffn.moe.zero_experts"),
        ReadIf("model.ffn.moe.router.expert_bias"),
    ] = 0.0
    """Target of the expert bias with zero_experts: mean number of the top_k choices that are experts with computation.
    0: top_k * num_experts / (num_experts + zero_experts), the mean for equally frequent choices."""
    shortcut: bool = False
    """Add the output of the routed experts of a layer only after the next layer, which is dense. The output of the
    shared expert is added in the layer (shortcut-connected MoE, arXiv:2404.05019, as in LongCat-Flash)."""

    @property
    def routed(self) -> "RoutedPart":
        """The part with the router: this part."""
        return self

    @property
    def shared_width(self) -> int:
        """Inner width of the shared expert. 0: there is none."""
        return self.shared.intermediate_size if self.shared else 0

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
        """The width of the shared expert."""
        return "model.ffn.moe.shared.intermediate_size", self.shared_width

    def token_size(self, hidden: int) -> int:
        """Return the width of the tokens that are dispatched, the input and output of an expert."""
        return self.latent_size or hidden


def swiglu_params(part: ModelPart, hidden: int, ffn: int) -> Iterator[ParamSpec]:
    """Yield the parameters of `SwiGLU`."""
    yield ParamSpec("w_gate", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_up", (ffn, hidden), part, tp_dim=0)
    yield ParamSpec("w_down", (hidden, ffn), part, tp_dim=1, drawn="output")


@dataclass(frozen=True, kw_only=True)
class Networks(Table):
    """Feed-forward networks of the layers."""

    dense: Annotated[DensePart, KindOf("ffn", "not is_routed")] = part_field("ffn", "swiglu")
    """Network of layers 'dense' of model.layers."""
    moe: Annotated[RoutedPart, KindOf("ffn", "is_routed")] = part_field("ffn", "moe")
    """Mixture of experts of layers 'moe' of model.layers."""
