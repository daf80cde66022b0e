"""SparseMixer-v2 (arXiv:2409.12136; Phi-3.5-MoE): choices one after another, sampled in training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from moefold.config.base.field import POSITIVE, SAME_TENSORS
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.chosen import chosen_in
from moefold.config.groups.router import ChoiceInputs, ChoicePart, RouterSoftmaxPart, ScoreFormula, Softmax
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig
    from moefold.config.sections.moe import MoEConfig


@dataclass(frozen=True, kw_only=True)
class SparseMixer(RouterSoftmaxPart):
    """Each choice has its own softmax, over the experts that are not chosen yet and close to the best expert.

    Training samples from it (SparseMixer-v2, arXiv:2409.12136; Phi-3.5-MoE; docs/routing.md).
    """

    jitter: Annotated[float, POSITIVE] = 0.01
    """Half the relative distance to the best logit up to which an expert takes part in a choice."""
    samples: Annotated[bool, SAME_TENSORS] = True
    """Sample the choices in training. False: take the best experts."""

    def select(self, inputs: ChoiceInputs, choice: ChoicePart) -> "Tensor":
        """Return the experts by the logits: sampled if there is noise, otherwise the best ones."""
        from moefold.parts.router_softmax.sparsemixer.module import sample_experts

        return sample_experts(inputs.logits_TE, inputs.top_k, self.jitter, inputs.noise_TN)

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the probability of each choice in its own softmax."""
        from moefold.parts.router_softmax.sparsemixer.module import mixer_weights

        return mixer_weights(logits_TE, ids_TK, self.jitter, noise_TN)

    def noise_width(self, top_k: int, num_choices: int) -> int:
        """Return the number of uniform numbers of a token: one for each expert and one more, for each choice."""
        return top_k * (num_choices + 1) if self.samples else 0

    def uniform_weight(self, num_experts: int) -> None:
        """Return None: each choice is among fewer experts than the choice before."""

    def saved_bytes(self, top_k: int, num_choices: int, value_bytes: int) -> int:
        """Return the bytes of a softmax and two masks for each choice."""
        return top_k * num_choices * (value_bytes + 2)

    def check(self, model: "ModelConfig", moe: "MoEConfig") -> Iterator[Problem]:
        """Yield errors for settings, other than the logits, that would decide over the choices."""
        part = model.routed
        if part is None:
            return
        unsupported = {
            f"moe.choice='{moe.choice}'": (not chosen_in(moe, ChoicePart).scores_decide, "choice='topk'"),
            "model.ffn.moe.router.expert_bias=true": (part.router.expert_bias, "expert_bias=false"),
            f"model.ffn.moe.router.num_groups={part.router.num_groups}": (part.router.num_groups > 1, "num_groups=1"),
        }
        for name, (is_set, way_out) in unsupported.items():
            if is_set:
                yield Problem(
                    self.key,
                    self.kind,
                    f"is incompatible with {name}: it chooses only by the logits, and the weights of a token have no "
                    "fixed sum",
                    f"choose {way_out}, or softmax='pre'",
                )

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with more close experts: random logits differ by more than the logits of a trained router."""
        return replace(self, jitter=max(self.jitter, 0.6))

    def formula(self) -> Callable[[Callable[["Tensor"], "Tensor"]], ScoreFormula]:
        """Return the choices token by token."""
        from moefold.parts.router_softmax.sparsemixer.oracle import noise_width, sparse_mixer

        def weights(chosen_scores: "Tensor") -> "Tensor":
            raise AssertionError("its weights are not scores")

        def formula(softmax: Callable[["Tensor"], "Tensor"]) -> ScoreFormula:
            choose: Callable[..., Any] = partial(sparse_mixer, jitter=self.jitter)
            return ScoreFormula(softmax, weights, 1, choose, noise_width if self.samples else None)

        return formula
