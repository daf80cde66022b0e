"""Score functions of the router: scores of the experts from the logits of a token, and weights of the chosen ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from moefold.config.part import FlatKey, Part

if TYPE_CHECKING:
    from torch import Tensor

SCORE_SUM_EPS = 1e-20
"""Added to a sum of scores before dividing by it, as DeepSeek-V3 does."""

Softmax = Callable[["Tensor"], "Tensor"]
"""Softmax over the last dim, with the bits of the kernels in use."""


class ScoreFormula(NamedTuple):
    """A score function in float64, for the oracle."""

    scores: Callable[["Tensor"], "Tensor"]
    """Scores [..., E] of logits [..., E]."""
    weights: Callable[["Tensor"], "Tensor"]
    """Routing weights of the scores of the chosen experts, [..., K] -> same."""
    num_summed: int
    """Best experts whose scores are summed to the score of a group of experts."""
    choose: Callable[..., Any] | None = None
    """Choices and weights of logits [B, S, E], given K and noise; None: `moe.choice` chooses."""
    noise_width: Callable[[int, int], int] | None = None
    """Uniform numbers for each token in training, given K and E; None: none."""


@dataclass(frozen=True, kw_only=True)
class RouterScorePart(Part):
    """Score function of a router. Tensors are float32 or float64; T tokens, E experts, K choices."""

    group: ClassVar[str] = "router_score"
    key: ClassVar[str] = "model.router_score"
    sums_top2: ClassVar[bool] = True
    """Whether a group of experts has the score of its two best experts, not of its best one."""

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the scores of all experts, [T, E]."""
        raise NotImplementedError

    def ranking(self, logits_TE: "Tensor", scores_TE: "Tensor") -> "Tensor":
        """Return the values by which experts are ranked where nothing is added to the scores, [T, E]."""
        return scores_TE

    def distribution(self, scores_TE: "Tensor") -> "Tensor":
        """Return the scores divided by their sum, [T, E]: the input of the load-balancing loss."""
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + SCORE_SUM_EPS)

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the routing weights of the chosen experts, [T, K]; `noise_TN` as for `choose`."""
        raise NotImplementedError

    def choose(self, logits_TE: "Tensor", top_k: int, noise_TN: "Tensor | None") -> "Tensor | None":
        """Return the choices, int64 [T, K], of a router that chooses by itself; None: `moe.choice` decides.

        Args:
            logits_TE: the logits, without a gradient.
            top_k: K.
            noise_TN: uniform numbers in (0, 1), float64 [T, `noise_width`]; None: none.
        """
        return None

    def noise_width(self, top_k: int, num_choices: int) -> int:
        """Return the uniform numbers that the choices of a token need in training; 0: none."""
        return 0

    @property
    def chooses(self) -> bool:
        """Return whether it chooses the experts by itself."""
        return False

    @property
    def weights_sum_to_one(self) -> bool:
        """Return whether the routing weights of a token sum to 1 before `router_scaling_factor`."""
        raise NotImplementedError

    @property
    def sums_to_one_by(self) -> tuple[str, str]:
        """Return the setting by which the weights sum to 1, and the one by which they do not."""
        return "model.router_normalize=true", "model.router_normalize=false"

    def uniform_weight(self, num_experts: int) -> float | None:
        """Return the weight of a choice where all logits are 0 and no sum divides it; None: it has no fixed value."""
        raise NotImplementedError

    def saved_bytes(self, top_k: int, num_choices: int, value_bytes: int) -> int:
        """Return the bytes for each token that it keeps for backward, in addition to logits, scores and choices."""
        return 0

    def decoding_is_post(self) -> bool | None:
        """Return whether decoding in C takes the softmax of the chosen logits (True) or of all; None: it cannot."""
        return None

    def fused_options(self) -> dict[str, bool] | None:
        """Return the options of the fused router kernel for this score; None: the kernel does not have it."""
        return None

    def formula(self) -> ScoreFormula | None:
        """Return the score function in float64; None: it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class SeparateScorePart(RouterScorePart):
    """Score of each expert by its logit alone; the weights of a token need not sum to 1."""

    normalize: Annotated[bool, FlatKey("model.router_normalize")]

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the scores of the chosen experts, divided by their sum if `normalize`."""
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / (weights_TK.sum(-1, keepdim=True) + SCORE_SUM_EPS) if self.normalize else weights_TK

    @property
    def weights_sum_to_one(self) -> bool:
        """Return whether the weights are divided by their sum."""
        return self.normalize
