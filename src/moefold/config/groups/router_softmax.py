"""Routing weights of a router with softmax scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.router_score import ScoreFormula, Softmax
from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RouterSoftmaxPart(Part):
    """Routing weights from softmax scores. Tensors are float32 or float64; T tokens, E experts, K choices."""

    group: ClassVar[str] = "router_softmax"
    key: ClassVar[str] = "model.router_softmax"
    sum_to_one: ClassVar[bool] = False
    """Whether the weights of a token sum to 1."""
    is_post: ClassVar[bool | None] = None
    """Whether the weights are the softmax of the chosen logits (True) or of all (False); None: neither."""

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the routing weights of the chosen experts, [T, K]."""
        raise NotImplementedError

    def choose(self, logits_TE: "Tensor", top_k: int, noise_TN: "Tensor | None") -> "Tensor | None":
        """Return the choices, as `RouterScorePart.choose`."""
        return None

    def noise_width(self, top_k: int, num_choices: int) -> int:
        """Return the uniform numbers that the choices of a token need in training; 0: none."""
        return 0

    @property
    def chooses(self) -> bool:
        """Return whether it chooses the experts by itself."""
        return False

    def uniform_weight(self, num_experts: int) -> float | None:
        """Return the weight of a choice where all logits are equal; None: it has no fixed value."""
        return 1 / num_experts

    def saved_bytes(self, top_k: int, num_choices: int, value_bytes: int) -> int:
        """Return the bytes for each token that it keeps for backward, in addition to logits, scores and choices."""
        return 0

    def formula(self) -> Callable[[Callable[["Tensor"], "Tensor"]], ScoreFormula] | None:
        """Return a function from the softmax to the whole score function in float64; None: it has no formula."""
        return None
