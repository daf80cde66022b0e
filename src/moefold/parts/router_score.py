"""Score functions of the router."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from moefold.config.base.part import KindOf, part_field
from moefold.config.groups.router import (
    ChoiceInputs,
    ChoicePart,
    RouterScorePart,
    RouterSoftmaxPart,
    ScoreFormula,
    SeparateScorePart,
    Softmax,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SoftmaxScore(RouterScorePart, kind="softmax"):
    """Softmax of the logits over all experts. `softmax` determines the weights of the chosen ones."""

    softmax: Annotated[RouterSoftmaxPart, KindOf("router_softmax")] = part_field("router_softmax", "post")
    """pre: softmax over all experts, then top-k. post: top-k of the logits, then softmax over the chosen (sum 1).
    sparsemixer: each choice has its own softmax, over the experts that are not chosen yet and close to the best expert.
    Training samples from it (SparseMixer-v2, arXiv:2409.12136; Phi-3.5-MoE; see docs/routing.md)."""
    sums_top2: ClassVar[bool] = False

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the softmax."""
        return softmax(logits_TE)

    def ranking(self, logits_TE: "Tensor", scores_TE: "Tensor") -> "Tensor":
        """Return the logits: softmax is monotonic, and the logits have the finer resolution."""
        return logits_TE

    def distribution(self, scores_TE: "Tensor") -> "Tensor":
        """Return the scores, which sum to 1."""
        return scores_TE

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the weights that `softmax` computes."""
        return self.softmax.weights(logits_TE, scores_TE, ids_TK, noise_TN, softmax)

    def select(self, inputs: ChoiceInputs, choice: ChoicePart) -> "Tensor":
        """Return the experts as `softmax` selects them."""
        return self.softmax.select(inputs, choice)

    def noise_width(self, top_k: int, num_choices: int) -> int:
        """Return the number of uniform numbers that `softmax` needs for a token."""
        return self.softmax.noise_width(top_k, num_choices)

    @property
    def weighting(self) -> RouterSoftmaxPart:
        """The part `softmax`."""
        return self.softmax

    @property
    def weights_sum_to_one(self) -> bool:
        """True if the weights of `softmax` sum to 1."""
        return self.softmax.sum_to_one

    @property
    def sums_to_one_by(self) -> tuple[str, str]:
        """Settings with which the weights sum to 1, and do not."""
        return 'model.ffn.moe.router.softmax="post"', 'model.ffn.moe.router.softmax="pre"'

    def uniform_weight(self, num_experts: int) -> float | None:
        """Return an equal share of 1, if the weights are scores."""
        return self.softmax.uniform_weight(num_experts)

    def saved_bytes(self, top_k: int, num_choices: int, value_bytes: int) -> int:
        """Return the bytes of `softmax`."""
        return self.softmax.saved_bytes(top_k, num_choices, value_bytes)

    def softmax_in_decoding(self) -> Literal["pre", "post"] | None:
        """Return the softmax of `softmax`, before or after the choice."""
        return None if self.softmax.is_post is None else "post" if self.softmax.is_post else "pre"

    def fused_options(self) -> dict[str, bool] | None:
        """Return the options of both softmaxes."""
        if self.softmax.is_post is None:
            return None
        return {"is_softmax": True, "is_post_softmax": self.softmax.is_post, "normalizes_probs": False}

    def formula(self) -> ScoreFormula | None:
        """Return the softmax with the formula of `softmax`."""
        weighted = self.softmax.formula()
        return None if weighted is None else weighted(lambda logits: logits.softmax(-1))


@dataclass(frozen=True, kw_only=True)
class SigmoidScore(SeparateScorePart, kind="sigmoid"):
    """Sigmoid of each logit separately (DeepSeek-V3, arXiv:2412.19437 sec. 2.1.2)."""

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the sigmoids."""
        from moefold.ops.elementwise import sigmoid

        return sigmoid(logits_TE)

    def uniform_weight(self, num_experts: int) -> float:
        """Return the sigmoid of 0."""
        return 0.5

    def fused_options(self) -> dict[str, bool]:
        """Return the options of the kernel."""
        return {"is_softmax": False, "is_post_softmax": False, "normalizes_probs": self.normalize}

    def formula(self) -> ScoreFormula:
        """Return 1 / (1 + exp(-x))."""

        def weights(chosen_scores: "Tensor") -> "Tensor":
            return chosen_scores / (chosen_scores.sum(-1, keepdim=True) + 1e-20) if self.normalize else chosen_scores

        return ScoreFormula(lambda logits: 1 / (1 + math.e**-logits), weights, num_summed=2)


@dataclass(frozen=True, kw_only=True)
class SqrtSoftplusScore(SeparateScorePart, kind="sqrtsoftplus"):
    """Square root of the softplus of each logit separately."""

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the roots of softplus, without a gradient at 0, where softplus of a very negative logit underflows."""
        import torch

        from moefold.ops.elementwise import softplus

        return softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()

    def uniform_weight(self, num_experts: int) -> float:
        """Return the root of the softplus of 0."""
        return math.sqrt(math.log(2))

    def formula(self) -> ScoreFormula:
        """Return sqrt(log(1 + exp(x)))."""

        def weights(chosen_scores: "Tensor") -> "Tensor":
            return chosen_scores / (chosen_scores.sum(-1, keepdim=True) + 1e-20) if self.normalize else chosen_scores

        return ScoreFormula(lambda logits: logits.exp().log1p().sqrt(), weights, num_summed=2)
