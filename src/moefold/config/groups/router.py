"""Router: scores of the experts, choice and weights of a token's experts, and scope of the auxiliary loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, cast

from moefold.config.base.field import POSITIVE, MaxMagnitude, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.part import Part, UnusedKeys
from moefold.config.sections.moe import MoEConfig

if TYPE_CHECKING:
    from torch import Tensor

SCORE_SUM_EPS = 1e-20
"""Added to a sum of scores before dividing by it, like in DeepSeek-V3."""

Softmax = Callable[["Tensor"], "Tensor"]
"""Softmax over the last dim, with the bits of the kernels in use."""


class ScoreFormula(NamedTuple):
    """A score function in float64, for the oracle."""

    scores: Callable[["Tensor"], "Tensor"]
    """Scores [..., E] of logits [..., E]."""
    weights: Callable[["Tensor"], "Tensor"]
    """Routing weights of the scores of the chosen experts, [..., K] -> same."""
    num_summed: int
    """Number of best experts whose scores are summed to the score of a group."""
    choose: Callable[..., Any] | None = None
    """Choices and weights for logits [B, S, E], given K and noise, or None if `moe.choice` chooses."""
    noise_width: Callable[[int, int], int] | None = None
    """Number of uniform numbers for each token in training, given K and E."""


class WeightedChoice:
    """Choices of a token and their weights, as a score function or its softmax defines them."""

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the routing weights of the chosen experts, [T, K]. `noise_TN` is as in `ChoiceInputs`."""
        raise NotImplementedError

    def select(self, inputs: "ChoiceInputs", choice: "ChoicePart") -> "Tensor":
        """Return the experts of each token, best first, int64 [T, K]: by default as `moe.choice` selects them."""
        return choice.select(inputs)

    def noise_width(self, top_k: int, num_choices: int) -> int:
        """Return the uniform numbers that the choices of a token need in training. 0: none."""
        return 0

    def saved_bytes(self, top_k: int, num_choices: int, value_bytes: int) -> int:
        """Return the bytes saved for backward for each token, in addition to logits, scores and choices."""
        return 0


@dataclass(frozen=True, kw_only=True)
class RouterScorePart(WeightedChoice, Part):
    """Score function of a router. Tensors are float32 or float64, with T tokens, E experts and K choices."""

    group: ClassVar[str] = "router_score"
    key: ClassVar[str] = "model.ffn.moe.router"
    framed: ClassVar[frozenset[str]] = frozenset({"scaling_factor", "num_groups", "top_groups", "expert_bias", "bias"})
    sums_top2: ClassVar[bool] = True
    """True if the score of a group is the sum of its two best experts, not its best expert."""
    scaling_factor: Annotated[float, POSITIVE] = 1.0
    """Factor of all routing weights (DeepSeek's routed_scaling_factor)."""
    num_groups: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 1
    """Number of groups of consecutive experts, for group-limited routing (DeepSeek-V2, V3). 1: no limit."""
    top_groups: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 1
    """Number of best-scoring groups for the choice of a token's experts."""
    expert_bias: bool = False
    """Add a bias to each expert's score for the choice only, updated to balance the load (arXiv:2408.15664)."""
    bias: bool = False
    """Learned bias of the router's logits (gpt-oss)."""

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the scores of all experts, [T, E]."""
        raise NotImplementedError

    def ranking(self, logits_TE: "Tensor", scores_TE: "Tensor") -> "Tensor":
        """Return the values that rank the experts if nothing is added to the scores, [T, E]."""
        return scores_TE

    def distribution(self, scores_TE: "Tensor") -> "Tensor":
        """Return the scores divided by their sum, [T, E]: the input of the load-balancing loss."""
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + SCORE_SUM_EPS)

    @property
    def weighting(self) -> Part:
        """Return the part that computes the routing weights."""
        return self

    @property
    def weights_sum_to_one(self) -> bool:
        """Return whether the routing weights of a token sum to 1 before `scaling_factor`."""
        raise NotImplementedError

    @property
    def sums_to_one_by(self) -> tuple[str, str]:
        """Return the setting with weights that sum to 1, and the setting without."""
        return "model.ffn.moe.router.normalize=true", "model.ffn.moe.router.normalize=false"

    def uniform_weight(self, num_experts: int) -> float | None:
        """Return the weight of a chosen expert if all logits are 0 and no sum divides it, or None if it varies."""
        raise NotImplementedError

    def softmax_in_decoding(self) -> Literal["pre", "post"] | None:
        """Return the softmax that decoding in C takes: of all logits, of the chosen logits, or none that C has."""
        return None

    def fused_options(self) -> dict[str, bool] | None:
        """Return the options of the fused router kernel for this score, or None if not supported by the kernel."""
        return None

    def formula(self) -> ScoreFormula | None:
        """Return the score function in float64, or None if it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class SeparateScorePart(RouterScorePart):
    """Score of each expert that only depends on its logit. The weights of a token need not sum to 1."""

    normalize: bool = True
    """Divide the scores of the chosen experts by their sum."""

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


@dataclass(frozen=True, kw_only=True)
class RouterSoftmaxPart(WeightedChoice, Part):
    """Routing weights from softmax scores. Tensors are float32 or float64, with T tokens, E experts and K choices."""

    group: ClassVar[str] = "router_softmax"
    key: ClassVar[str] = "model.ffn.moe.router.softmax"
    sum_to_one: ClassVar[bool] = False
    """True if the weights of a token sum to 1."""
    is_post: ClassVar[bool | None] = None
    """True if the weights are the softmax of the chosen logits, False if of all logits. None: other weights."""

    def uniform_weight(self, num_experts: int) -> float | None:
        """Return the weight of a choice if all logits are equal, or None if it is not fixed."""
        return 1 / num_experts

    def formula(self) -> Callable[[Callable[["Tensor"], "Tensor"]], ScoreFormula] | None:
        """Return a function from the softmax to the whole score function in float64, or None if it has no formula."""
        return None


class TokenGroup(Protocol):
    """Ranks that share a micro-batch."""

    def gather(self, rows: "Tensor") -> "Tensor":
        """Return the rows of all ranks."""
        ...


class Tokens(Protocol):
    """Tokens of this rank in their micro-batch."""

    @property
    def group(self) -> TokenGroup:
        """Return the ranks that share the micro-batch."""
        ...

    def is_token(self) -> "Tensor | None":
        """Return the mask of rows that are not padding, bool [T]. None: all rows."""
        ...

    def global_index(self) -> "Tensor":
        """Return the index of each token in the micro-batch, int64 [T]."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChoiceInputs:
    """Inputs of a choice. T tokens of this rank, E experts, K choices. Nothing has a gradient."""

    top_k: int
    logits_TE: "Tensor"
    scores_TE: "Tensor"
    ranking_TE: "Tensor"
    """Scores, with the expert bias if the router has one, or logits if they give the same ranking."""
    thresholds_E: "Tensor | None"
    """Result of `thresholds`, in training."""
    noise_TN: "Tensor | None"
    """Uniform numbers in (0, 1) in training, float64 [T, `noise_width`]."""
    is_training: bool
    tokens: Tokens
    best: Callable[["Tensor"], "Tensor"]
    """Choices of the largest values [T, E], within the best groups of experts if the recipe has groups."""
    largest: Callable[["Tensor"], "Tensor"]
    """Choices of the largest values [T, E], of all experts."""


class OracleScores(NamedTuple):
    """Scores of a micro-batch in float64, [B, S, E], without a gradient, for the oracle."""

    logits: "Tensor"
    scores: "Tensor"
    biased: "Tensor"
    """Scores and expert bias."""
    is_token: "Tensor"
    """Tokens that are not padding, bool [B, S]."""
    top_k: int


class ChoiceFormula(NamedTuple):
    """A choice in float64, for the oracle, which processes one token after another."""

    ranking: Callable[[OracleScores], "Tensor"]
    """Values of a micro-batch in training, [B, S, E]. In evaluation the biased scores decide."""
    has_aux_loss: bool = False
    """True if the load-balancing loss applies."""
    forced: Callable[[int, int, int], list[int]] | None = None
    """Experts from the number of a token, K and E, independent of the values, or None if the best values decide."""
    bias: Callable[[list[OracleScores]], "Tensor"] | None = None
    """Expert bias after a step, [E], from its micro-batches. None: steps toward an even load."""


@dataclass(frozen=True, kw_only=True)
class ChoicePart(Part):
    """Choice of the experts of each token."""

    group: ClassVar[str] = "choice"
    key: ClassVar[str] = "moe.choice"
    scores_decide: ClassVar[bool] = False
    """True if only the scores of a token determine its experts, in training and evaluation. Then the load-balancing
    loss and updates of the expert bias balance the experts."""
    reads_micro_batch: ClassVar[bool] = False
    """True if the choice reads the scores of all tokens of a micro-batch."""
    is_forced: ClassVar[bool] = False
    """True if the choice ignores the scores, for benchmarks."""
    sets_bias: ClassVar[bool] = False
    """True if the thresholds of the choice become the expert bias after a step."""

    def thresholds(self, scores_TE: "Tensor", top_k: int, tokens: Tokens) -> "Tensor | None":
        """Return the thresholds, which are subtracted from this micro-batch's scores in training, [E]."""
        return None

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the experts of each token, best first, int64 [T, K]."""
        raise NotImplementedError

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield the keys of the losses and biases that balance the experts."""
        way_out = "choose moe.choice='topk'"
        if not self.scores_decide:
            yield UnusedKeys(
                "moe.aux_kind model.ffn.moe.active_experts", f"{self.key}={self.kind!r} balances by itself", way_out
            )
        if self.sets_bias:
            yield UnusedKeys("moe.bias_update_rate", f"{self.key}={self.kind!r} sets the bias", way_out)

    def formula(self) -> ChoiceFormula | None:
        """Return the choice in float64, or None if it has no formula."""
        return None


BalanceFormula = Callable[[Any, "Tensor | None", int], "list[tuple[Tensor, Tensor]]"]
"""Pairs of counts and sums of scores, each [E], given the routed micro-batches of a global batch, the counts of the
last global batch, and the micro-batches of a data-parallel rank. A micro-batch has `scores` [B, S, E], `is_token` [B,
S] and `tokens_per_expert()` [B, E]."""


@dataclass(frozen=True, kw_only=True)
class BalanceScopePart(Part):
    """Tokens whose routing is balanced. The default is all tokens of a micro-batch."""

    group: ClassVar[str] = "balance_scope"
    key: ClassVar[str] = "moe.aux_kind"
    is_per_sample: ClassVar[bool] = False
    """True if each sample is balanced separately."""
    accumulates: ClassVar[bool] = False
    """True if the counts of the micro-batches of a step add up over all data-parallel ranks, up to the current
    micro-batch. The loss then depends on dp."""
    keeps_counts: ClassVar[bool] = False
    """True if the counts at the end of the last step are used. They are saved in checkpoints."""

    @property
    def is_global(self) -> bool:
        """Return whether the counts are over global batches."""
        return self.accumulates or self.keeps_counts

    def formula(self) -> BalanceFormula | None:
        """Return the pairs of counts and scores in float64, or None if it has no formula."""
        return None


def aux_coefficient(moe: MoEConfig) -> float:
    """Return the coefficient of the load-balancing loss: `aux_loss` if the scores decide, else 0."""
    return moe.aux_loss if cast(ChoicePart, moe.choice).scores_decide else 0.0


def aux_loss_depends_on_dp(moe: MoEConfig) -> bool:
    """Return whether the load-balancing loss of MoE layers depends on dp."""
    return cast(BalanceScopePart, moe.aux_kind).accumulates and aux_coefficient(moe) > 0
