"""SPES (arXiv:2602.11543): each site trains its own experts."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from moefold.config.base.field import ZERO_TO_ONE, VerifyAs, at_least
from moefold.config.groups.site_method import SiteMethodPart

if TYPE_CHECKING:
    from torch import nn

    from moefold.config.schema import Config
    from moefold.optim.outer import OuterOptimizer
    from moefold_experiments.spes.owned_experts import OwnedExperts

NUM_SIMILAR = 4
"""Experts with which each expert is merged."""


@dataclass(frozen=True, kw_only=True)
class SPES(SiteMethodPart):
    """Take the mean of the weights, and let each site train its own experts, which are merged in the warm-up.

    Site n trains the routed experts n, n + count, n + 2 * count, ... of each MoE layer and sends those; it routes to
    all experts, has no optimizer moments of the others, and gets them from their sites.
    """

    interface: ClassVar[int] = 1
    owns_experts: ClassVar[bool] = True

    merge_experts: Annotated[float, ZERO_TO_ONE, VerifyAs.ROUNDS] = 0.01
    """Share alpha of the merging of experts in the warm-up: after a round, each expert E becomes
    E + alpha * mean(E_d - E) over the 4 experts E_d of the layer with the most similar w_gate. alpha falls linearly to
    0 at merge_until. 0: no merging."""
    merge_every: Annotated[int, at_least(1), VerifyAs.ROUNDS] = 500
    """Steps between two mergings of experts; a multiple of every."""
    merge_until: Annotated[int, at_least(1), VerifyAs.ROUNDS] = 10000
    """Step at which the share of the merging is 0."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key."""
        return {"lr": 1.0, "momentum": 0.0, "every": 50}

    @property
    def counts_steps(self) -> bool:
        """Return whether experts are merged, by a share that falls with the steps."""
        return self.merge_experts > 0

    @property
    def may_overlap(self) -> bool:
        """Return whether no merging changes the weights that training would go on from."""
        return not self.merge_experts

    def with_every(self, every: int) -> Self:
        """Return the method with mergings at the nearest multiple of `sites.every`."""
        if not self.merge_experts or self.merge_every % every == 0:
            return self
        return replace(self, merge_every=max(1, round(self.merge_every / every)) * every)

    def check(self, recipe: "Config") -> Iterator[Any]:  # type: ignore[override]
        """Yield what is incompatible with experts of each site."""
        from moefold_experiments.spes.rules import spes_problems

        yield from spes_problems(self, recipe)

    def outer(self) -> "type[OuterOptimizer]":
        """Return the outer optimizer of a site with experts of its own."""
        from moefold_experiments.spes.module import OuterOfOwners

        return OuterOfOwners

    def own_parameters(
        self, parameters: "Mapping[str, nn.Parameter]", experts: Collection[str], count: int, number: int
    ) -> "OwnedExperts":
        """Return the trained parameters with views of the site's own experts; see the base class."""
        from moefold_experiments.spes.owned_experts import OwnedExperts

        return OwnedExperts(parameters, experts, count, number)
