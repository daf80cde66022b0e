"""SPSA with a gradient of one byte (arXiv:2305.17333, arXiv:2306.10015): two forward passes and no backward pass."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from moefold.config.base.field import POSITIVE, at_least
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import UnusedKeys
from moefold.config.groups.optimizer import ForwardOnlyStep, MethodRates, OptimizerPart, StateSpec
from moefold.config.rule import apply_rule

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from moefold.config.schema import Config
    from moefold.optim.build import OptimizerRun
    from moefold.parallel.parallel_model import ParallelModel
    from moefold_experiments.spsa.passes import ForwardPasses


BYTES_PER_PARAM = 26
"""Memory traffic: the weight is read and written for each pass and for the update, and the copy written. Normal
numbers, which stay in the cache of a CPU, are not counted."""


@dataclass(frozen=True, kw_only=True)
class Spsa(OptimizerPart):
    """Move all weights along normal numbers, by the difference of the losses on both sides."""

    interface: ClassVar[int] = 1
    needs_gradients: ClassVar[bool] = False
    rates: ClassVar[MethodRates | None] = MethodRates("SPSA", 1e-6, 5e-5, "MeZO (arXiv:2305.17333)")

    eps: Annotated[float, POSITIVE] = 1e-3
    """Factor of the normal numbers z that the two passes add to and subtract from the weights (arXiv:2305.17333)."""
    max_gradient: Annotated[float, POSITIVE] = 10.0
    """Largest magnitude of the gradient projected on z, which is rounded to one of 255 equidistant values
    (arXiv:2306.10015); larger ones are clamped."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""

    def states(self, weight: ParamSpec) -> tuple[StateSpec, ...]:
        """Return no state."""
        return ()

    def traffic(self, weight: ParamSpec) -> float:
        """Return the bytes that the passes and the update move for each number of a weight."""
        return BYTES_PER_PARAM

    def unused_keys(self) -> Iterator[UnusedKeys]:
        """Yield what an optimizer without gradients does not read; it has a key of its own in the place of clipping."""
        reason = f"{self.key}={self.kind!r} clamps its projected gradient by {self.key}.max_gradient"
        yield UnusedKeys("train.clip_grad", reason, f"set {self.key}.max_gradient")
        yield from super().unused_keys()

    def formula(self) -> Callable[[ForwardOnlyStep], float]:
        """Return one step; see the base class."""
        from moefold_experiments.spsa.oracle import run_step

        return partial(run_step, self)

    def build(self, parameters: "Mapping[str, nn.Parameter]", run: "OptimizerRun") -> "Optimizer":
        """Build the optimizer; local."""
        from moefold_experiments.spsa.module import SPSA

        return SPSA(self, parameters, run)

    def passes(self, model: "ParallelModel", optimizer: Any) -> "ForwardPasses":
        """Return what runs the forward passes of a step; see the base class."""
        from moefold_experiments.spsa.passes import ForwardPasses

        return ForwardPasses(model, optimizer)

    def check(self, recipe: "Config") -> Iterator[Any]:  # type: ignore[override]
        """Yield what is incompatible with forward passes alone."""
        from moefold_experiments.spsa.rules import spsa_problems

        yield from apply_rule(super().check, recipe)
        yield from spsa_problems(f"{self.key}={self.kind!r}", recipe)
