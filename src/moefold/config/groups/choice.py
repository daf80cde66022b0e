"""Choices of experts from their scores: the best ones, balanced ones in training, or forced ones for benchmarks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from moefold.config.part import Part, UnusedKeys

if TYPE_CHECKING:
    from torch import Tensor


class TokenGroup(Protocol):
    """The ranks that share a micro-batch."""

    def gather(self, rows: "Tensor") -> "Tensor":
        """Return the rows of all ranks."""
        ...


class Tokens(Protocol):
    """The tokens of this rank in their micro-batch."""

    @property
    def group(self) -> TokenGroup:
        """Return the ranks that share the micro-batch."""
        ...

    def is_token(self) -> "Tensor | None":
        """Return the rows that are no padding, bool [T]; None: all."""
        ...

    def global_index(self) -> "Tensor":
        """Return the index of each token in the micro-batch, int64 [T]."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChoiceInputs:
    """Inputs of a choice. T tokens of this rank, E experts, K choices; nothing has a gradient."""

    top_k: int
    logits_TE: "Tensor"
    scores_TE: "Tensor"
    ranking_TE: "Tensor"
    """Scores, with the expert bias if the router has one; logits where they rank the same."""
    thresholds_E: "Tensor | None"
    """What `thresholds` returned, in training."""
    is_training: bool
    tokens: Tokens
    best: Callable[["Tensor"], "Tensor"]
    """Choices of the largest values [T, E], within the best groups of experts if the recipe has groups."""
    largest: Callable[["Tensor"], "Tensor"]
    """Choices of the largest values [T, E], of all experts."""


class ChoiceFormula(NamedTuple):
    """A choice in float64, for the oracle, which takes one token after another."""

    has_aux_loss: bool
    """Whether the load-balancing loss goes with it."""
    has_thresholds: bool
    """Whether quantiles of the scores of a micro-batch are subtracted in training, and become the expert bias."""
    ranking: Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
    """Values in training from logits, scores less thresholds, biased scores [B, S, E], and the tokens that are no
    padding, bool [B, S]."""
    forced: Callable[[int, int, int], list[int]] | None = None
    """Experts by the number of a token, K and E, whatever the values are; None: the best values decide."""


@dataclass(frozen=True, kw_only=True)
class ChoicePart(Part):
    """Choice of the experts of each token."""

    group: ClassVar[str] = "choice"
    key: ClassVar[str] = "moe.choice"
    scores_decide: ClassVar[bool] = False
    """Whether the scores of a token alone decide over its experts, in training as in evaluation. Then the
    load-balancing loss and updates of the expert bias balance the experts."""
    reads_micro_batch: ClassVar[bool] = False
    """Whether it reads the scores of all tokens of a micro-batch."""
    is_forced: ClassVar[bool] = False
    """Whether it ignores the scores, for benchmarks."""
    sets_bias: ClassVar[bool] = False
    """Whether its thresholds become the expert bias after a step."""

    def thresholds(self, scores_TE: "Tensor", top_k: int, tokens: Tokens) -> "Tensor | None":
        """Return what is subtracted from the scores of this micro-batch in training, [E]; None: nothing."""
        return None

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the experts of each token, best first, int64 [T, K]."""
        raise NotImplementedError

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield the keys of the losses and biases that balance the experts; see base class."""
        other = "choose moe.choice='topk'"
        if not self.scores_decide:
            yield UnusedKeys("moe.aux_kind model.active_experts", f"{self.key}={self.kind!r} balances by itself", other)
        if self.sets_bias:
            yield UnusedKeys("moe.bias_update_rate", f"{self.key}={self.kind!r} sets the bias", other)

    def formula(self) -> ChoiceFormula | None:
        """Return the choice in float64; None: it has no formula."""
        return None
