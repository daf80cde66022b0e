"""AdamW (arXiv:1711.05101): two moments for each number."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from moefold.config.base.field import BELOW_ONE, POSITIVE, VerifyAs, at_least
from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.optimizer import OptimizerPart, StateSpec
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from moefold.optim.build import OptimizerRun

MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_BF16_MOMENT_DECAY = 0.98
"""Maximum decay of a bfloat16 moment. bfloat16 rounds to 1 part in 2**9, and a step that would change a moment by a
tenth still adds (1 - 0.98) / 10 of it."""
BYTES_PER_PARAM = 34
"""Memory traffic: gradient 4 twice (norm, update), weight and both moments 4 each read and written, and the bfloat16
copy written."""
BF16_MOMENTS_BYTES_PER_PARAM = 118
"""Memory traffic with bfloat16 moments, which no fused kernel updates. Each is upcast, decayed, added to and rounded
(26 and 6). The denominator is computed (24) and the weight updated (24), pass by pass, in addition to norm and copy."""


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerPart):
    """Move each number by its mean gradient over the root of its mean squared gradient, and decay matrices.

    arXiv:1711.05101.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("moment_dtype",)

    beta1: Annotated[float, BELOW_ONE] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, BELOW_ONE] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Number that is added to the root of the second moment."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decoupled weight decay of matrices. Norms and biases have no decay."""
    moment_dtype: Annotated[Literal["float32", "bfloat16"], VerifyAs.FORMAT] = "float32"
    """Storage type of the optimizer moments between steps (float32: float64 with run.dtype="float64"). Updates are
    computed in the type of the master weights. bfloat16 needs decays of at most 0.98 and rounds: mappings then agree to
    its 8 bits."""

    @property
    def has_bf16_moments(self) -> bool:
        """True if moments are bfloat16 between steps."""
        return self.moment_dtype == "bfloat16"

    @property
    def state_dtype(self) -> str:
        """Type of the moments. Empty: the type of the master weights."""
        return "bfloat16" if self.has_bf16_moments else ""

    @property
    def smallest_divisor(self) -> float:
        """Smallest number that an update divides a gradient by."""
        return self.eps

    def with_moment_dtype(self, dtype: Literal["float32", "bfloat16"]) -> Self:
        """Return the optimizer with moments of another type."""
        return replace(self, moment_dtype=dtype)

    def states(self, weight: ParamSpec) -> tuple[StateSpec, ...]:
        """Return both moments and the step count of the bias correction."""
        dtype = self.state_dtype
        return (StateSpec("step", "float32", is_count=True), *(StateSpec(name, dtype) for name in MOMENTS))

    def traffic(self, weight: ParamSpec) -> float:
        """Return the bytes that an update moves for each number of a weight."""
        return BF16_MOMENTS_BYTES_PER_PARAM if self.has_bf16_moments else BYTES_PER_PARAM

    def check(self, *args: Any, **kwargs: Any) -> Iterator[Problem]:
        """Yield errors for decays for which a bfloat16 moment is too coarse."""
        yield from self._imprecise_decays({"beta1": self.beta1, "beta2": self.beta2})

    def _imprecise_decays(self, decays: Mapping[str, float]) -> Iterator[Problem]:
        """Yield the decays, by setting, with which rounding loses the change of a step."""
        for name, decay in decays.items() if self.has_bf16_moments else ():
            if decay > MAX_BF16_MOMENT_DECAY:
                yield Problem(
                    f"{self.key}.{name}",
                    decay,
                    f"must be at most {MAX_BF16_MOMENT_DECAY} with {self.key}.moment_dtype='bfloat16': what a step "
                    "adds would be lost in rounding",
                    f"choose {name}={MAX_BF16_MOMENT_DECAY} or less, or moment_dtype='float32'",
                )

    def formula(self) -> Callable[..., "Tensor"]:
        """Return the update of one weight. See the base class."""
        from moefold.parts.optimizer.adamw.oracle import update

        return partial(update, self)

    def build(self, parameters: "Mapping[str, nn.Parameter]", run: "OptimizerRun") -> "Optimizer":
        """Build the optimizer. It does not communicate."""
        from moefold.parts.optimizer.adamw.module import build_adamw

        return build_adamw(self, parameters, run)
