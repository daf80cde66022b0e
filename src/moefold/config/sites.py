"""The [sites] section: training across jobs that exchange weights rarely; see docs/sites.md."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

METHODS: MappingProxyType[str, MappingProxyType[str, Any]] = MappingProxyType(
    {
        "mean": MappingProxyType({"lr": 1.0, "momentum": 0.0}),
        "diloco": MappingProxyType({"lr": 0.7, "momentum": 0.9}),
    }
)
"""Values of a method for the keys that the recipe leaves out. mean: local SGD with a plain mean (arXiv:1805.09767).
diloco: arXiv:2311.08105, where every is 500."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SitesConfig:
    """Jobs that train one model and exchange weights every few steps, by an outer optimizer ([sites.md](sites.md))."""

    count: int = 1
    """Sites of the run. 1: no exchange; the outer step of method "diloco" is taken all the same."""
    number: int = -1
    """Number of the site that this job is, from 0. -1: `moefold train` starts all sites on this machine, each with the
    run folder run.dir/site-N."""
    meet: str = ""
    """HOST:PORT of `moefold meet`, the meeting point of the sites. Empty with number -1 only."""
    secret: str = ""
    """File with the shared secret that signs every message to and from the meeting point; empty: the environment
    variable MOEFOLD_SITES_SECRET. Needed unless the meeting point is on this machine."""
    method: Literal["mean", "diloco"] = "mean"
    """Preset of the outer step: sets the keys lr and momentum that the recipe leaves out. mean: the mean of the sites'
    weights (lr 1, momentum 0). diloco: Nesterov momentum on the mean difference (arXiv:2311.08105; lr 0.7, momentum
    0.9), which pays after hundreds of rounds."""
    every: int = 30
    """Steps between two rounds, in which the sites exchange the differences of their weights since the last round."""
    first: int = 0
    """No round up to this step; run.steps: a single one, after the last step. The last step always ends with a
    round."""
    lr: float = 1.0
    """Learning rate of the outer step."""
    momentum: float = 0.0
    """Momentum of the outer step; 0: none."""
    nesterov: bool = True
    """Nesterov momentum in the outer step; false: heavy-ball momentum."""
    quorum: int = 0
    """Fewest sites of a round, which is skipped if there are fewer; 0: more than half of count."""
    timeout_s: float = 60.0
    """Longest wait for a site in a round, and for a stuck exchange; the round goes on without it, or is skipped."""

    @property
    def is_active(self) -> bool:
        """Return whether the run has an outer step."""
        return self.count > 1 or self.has_outer_step

    @property
    def has_outer_step(self) -> bool:
        """Return whether the outer step does more than to take the mean of the sites' weights."""
        return self.lr != 1.0 or self.momentum > 0

    @property
    def num_states(self) -> int:
        """Return the number of tensors that the outer optimizer keeps for each weight: outer weights and momentum."""
        return (1 + (self.momentum > 0)) * self.is_active

    @property
    def starts_all(self) -> bool:
        """Return whether this command starts every site of the run on this machine."""
        return self.count > 1 and self.number < 0

    @property
    def min_members(self) -> int:
        """Return the fewest sites of a round."""
        return self.quorum or self.count // 2 + 1

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether a round follows a step.

        Args:
            step: number of the step, from 1.
            num_steps: run.steps.
        """
        return self.is_active and (step == num_steps or (step > self.first and step % self.every == 0))
