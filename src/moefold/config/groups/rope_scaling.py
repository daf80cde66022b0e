"""Scaling of RoPE for sequences longer than a model was first trained with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from moefold.config.base.field import Bound, at_least
from moefold.config.base.part import KindOf, Part, Table, part_field
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor


class RopeFormula(NamedTuple):
    """A RoPE scaling in float64, for the oracle."""

    frequency: Callable[[int, float, int, int], float]
    """Angle per position of a pair, given its number, theta, the rotated dims and the tokens of a sequence."""
    rotated_factor: Callable[[int], float] = lambda seq_len: 1.0
    """Factor of the rotated parts of queries and keys, given the tokens of a sequence."""
    score_factor: float = 1.0
    """Factor of MLA's scores."""


@dataclass(frozen=True, kw_only=True)
class RopeScalingPart(Part):
    """Scaling of the rotary frequencies.

    All sequences of a run or command have the same frequencies, because cached keys are already rotated: `seq_len` is
    the number of tokens of the longest sequence. 0: within the original context.
    """

    group: ClassVar[str] = "rope_scaling"
    key: ClassVar[str] = "model.rope.scaling"
    hf_type: ClassVar[str] = ""
    """`rope_type` in config.json of Hugging Face folders. Empty: no such scaling there."""
    hf_names: ClassVar[Mapping[str, str]] = {"original_seq_len": "original_max_position_embeddings"}
    """Names of fields in `rope_parameters` of config.json, if they differ."""
    hf_optional: ClassVar[frozenset[str]] = frozenset()
    """Fields that may be absent in `rope_parameters`."""

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return the angle per position of each of `rotary_dim` / 2 pairs of dims, float64. theta is their base."""
        raise NotImplementedError

    def rotated_factor(self, seq_len: int) -> float:
        """Return the factor of the rotated parts of queries and keys."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """Factor of MLA's scores in addition to 1/sqrt(D)."""
        return 1.0

    @property
    def context(self) -> int:
        """Tokens of the context after scaling. 0: unknown."""
        return 0

    def formula(self) -> RopeFormula | None:
        """Return the scaling in float64, or None if it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Table):
    """Rotary position embedding (arXiv:2104.09864) of all layers with RoPE."""

    theta: Annotated[float, Bound("must be greater than 1", lambda base: base > 1)] = 10000.0
    """Base of the rotary frequencies."""
    interleaved: bool = False
    """Pairing of RoPE dims: 2i with 2i+1 (true, DeepSeek), or i with i + half (false, Llama)."""
    scaling: Annotated[RopeScalingPart, KindOf("rope_scaling")] = part_field("rope_scaling", "none")
    """RoPE scaling for contexts longer than the original context."""


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """RoPE of the layers with RoPE, and the attention temperature of the other layers."""

    theta: float
    """Base of the frequencies."""
    rotary_dim: int
    """Dims of one head that are rotated."""
    interleaved: bool
    """True if neighbouring dims form a pair. Otherwise a pair has a dim of each half."""
    scaling: RopeScalingPart
    temperature_scale: float
    """Scale of the temperature of layers without RoPE, see `Temperature`. 0: none."""
    temperature_tokens: int


@dataclass(frozen=True, kw_only=True)
class FactorScaling(RopeScalingPart):
    """Scaling by a factor, which is above 1."""

    factor: Annotated[float, at_least(1)] = 1.0
    """Scaling factor, at least 1."""

    def check(self, *args: Any, **kwargs: Any) -> Iterator[Problem]:
        """Yield a factor without effect."""
        if self.factor == 1:
            rule = "changes nothing with model.rope.scaling.factor=1.0"
            yield Problem(self.key, self.kind, rule, "give a factor above 1, or choose 'none'")


@dataclass(frozen=True, kw_only=True)
class ContextScaling(FactorScaling):
    """Scaling of some frequencies, chosen by the original context."""

    original_seq_len: Annotated[int, at_least(1)] = 8192
    """Context length before RoPE scaling."""

    @property
    def context(self) -> int:
        """Tokens of the original context times the factor."""
        return round(self.original_seq_len * self.factor)


def unscaled_frequencies(theta: float, rotary_dim: int) -> "Tensor":
    """Return the frequencies without scaling, in the form of `RopeScalingPart.frequencies`."""
    import torch

    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
