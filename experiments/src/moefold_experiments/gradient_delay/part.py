"""AdamW and Muon with the gradients of the step before (arXiv:2606.30634)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from moefold.config.base.field import at_least
from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.optimizer import OptimizerPart, StateSpec
from moefold.config.rule import apply_rule
from moefold.message_text import Problem
from moefold.parts.optimizer.adamw.part import AdamW
from moefold.parts.optimizer.muon.part import Muon

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from moefold.config.schema import Config
    from moefold.optim.build import OptimizerRun

PENDING_GRADIENT = "pending_gradient"
"""State with the gradient that the next step applies."""
LAST_UPDATE = "last_update"
"""State with what the optimizer subtracted in the last step, for the correction."""


@dataclass(frozen=True, kw_only=True)
class Delayed(OptimizerPart):
    """Apply the gradient of the step before, clipped there; the first step updates nothing."""

    interface: ClassVar[int] = 1

    correction: Annotated[float, at_least(0, "0: none")] = 0.0
    """Factor c: with u(t) what the optimizer subtracts, weights x become x - u(t) - c * (u(t) - u(t-1)). 1 in
    arXiv:2606.30634; 0: none."""

    @property
    def copies_weights(self) -> bool:
        """Return whether an update has a copy of the trained weights, to measure u(t)."""
        return self.correction > 0

    def kept_states(self) -> tuple[StateSpec, ...]:
        """Return the states of the delay, of any weight."""
        names = (PENDING_GRADIENT, LAST_UPDATE) if self.correction else (PENDING_GRADIENT,)
        return tuple(StateSpec(name, is_kept=True) for name in names)

    def states(self, weight: ParamSpec) -> tuple[StateSpec, ...]:
        """Return the states of the optimizer and of the delay."""
        return (*super().states(weight), *self.kept_states())

    def check(self, recipe: "Config") -> Iterator[Problem]:  # type: ignore[override]
        """Yield what is incompatible with delayed gradients: rounds of sites, rollouts, and a run of one step."""
        yield from apply_rule(super().check, recipe)
        if recipe.sites.is_active:
            yield self._problem(
                f"would apply gradients of weights that a round of sites.method='{recipe.sites.method}' has replaced",
                "choose another optimizer, or leave [sites] out",
            )
        if recipe.rl.is_on:
            yield self._problem(
                "would apply the last gradients of a round of rollouts in the next round",
                "choose another optimizer (rl.staleness trains on older rollouts)",
            )
        if recipe.run.steps == 1:
            yield self._problem(
                "updates nothing in the first step, and run.steps=1 has no other", "set run.steps to 2 or more"
            )

    def _problem(self, rule: str, way_out: str) -> Problem:
        return Problem(self.key, self.kind, rule, way_out)

    def formula(self) -> Callable[..., Any]:
        """Return the update of one weight; see the base class."""
        from moefold_experiments.gradient_delay.oracle import delayed

        inner = super().formula()
        assert inner is not None, "AdamW and Muon have formulas"
        return delayed(inner, self.correction)

    def build(self, parameters: "Mapping[str, nn.Parameter]", run: "OptimizerRun") -> "Optimizer":
        """Build the optimizer with delayed steps; collective over the stage where the optimizer is."""
        from moefold_experiments.gradient_delay.module import delay_steps

        names = tuple(state.name for state in self.kept_states())
        return delay_steps(super().build(parameters, run), parameters, run, names, self.correction)


@dataclass(frozen=True, kw_only=True)
class DelayedAdamW(Delayed, AdamW):
    """AdamW (arXiv:1711.05101) with the gradients of the step before."""

    state_fields: ClassVar[tuple[str, ...]] = ("moment_dtype", "correction")


@dataclass(frozen=True, kw_only=True)
class DelayedMuon(DelayedAdamW, Muon):  # type: ignore[misc]
    """Muon (arXiv:2502.16982) for matrices and AdamW for the rest, with the gradients of the step before."""

    state_fields: ClassVar[tuple[str, ...]] = ("moment_dtype", "groups", "correction")
