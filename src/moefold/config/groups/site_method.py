"""Methods of sites: the exchange between jobs in a round, and the update of their weights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from moefold.config.base.part import Part, missing_method

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter


class OwnedParameters(Protocol):
    """Trained parameters of a site with `owns_experts`."""

    parameters: "dict[str, Parameter]"
    """Parameters by name. The site's own experts replace all experts."""

    def take_gradients(self) -> None:
        """Give the parameters their gradients, before the optimizer's step. It does not communicate."""

    def drop_gradients(self) -> None:
        """Free the gradients of the experts, after the optimizer's step. It does not communicate."""


@dataclass(frozen=True, kw_only=True)
class SiteMethodPart(Part):
    """Values of absent keys of [sites], and operations of a round beyond these keys.

    By default, all sites of a round send their differences in `sites.precision`, and step along the mean.
    """

    group: ClassVar[str] = "site_method"
    key: ClassVar[str] = "sites.method"
    changes_maths: ClassVar[bool] = False
    in_pairs: ClassVar[bool] = False
    """True if a site exchanges with only one other site, drawn from run.seed and the number of the round. Outer weights
    then differ between sites, and all sites exchange in the round after the last step."""
    overlaps_whole_round: ClassVar[bool] = False
    """True if a round is exchanged during the whole next round: sites.overlap is equal to sites.every."""
    owns_experts: ClassVar[bool] = False
    """True if only site n trains the experts n, n + count, n + 2 * count, ... of each layer (`own_parameters`)."""
    coding_s: ClassVar[tuple[float, float]] = (0.0, 0.0)
    """With a `wire_format`: seconds to encode an element, and to decode and add it, on one core of a host."""

    def values(self, every: Any) -> Mapping[str, Any]:
        """Return the values by key, without the section.

        Args:
            every: `sites.every` of the recipe, unchecked, or its default.
        """
        raise NotImplementedError

    @property
    def has_outer_step(self) -> bool:
        """Return whether the outer step differs from a mean, for any `sites.lr` and momentum."""
        return False

    @property
    def counts_steps(self) -> bool:
        """Return whether a round depends on the step, so that all sites have equal steps between two rounds."""
        return False

    @property
    def may_overlap(self) -> bool:
        """Return whether training may continue during an exchange."""
        return True

    def wire_format(self, itemsize: int) -> Any:
        """Return the size of coded differences, a `cost.site_traffic.CodedSize`. None: the size of `sites.precision`.

        Args:
            itemsize: bytes of an element before it is coded.
        """
        return None

    def wire_code(self, dtype: "torch.dtype") -> Any:
        """Return the code of differences of a type, a `comm.wire_codes.WireCode`. None: `sites.precision`."""
        return None

    def outer(self) -> Any:
        """Return the class of the outer optimizer, derived from `optim.outer.OuterOptimizer`. None: this class."""
        return None

    def own_parameters(
        self, parameters: "Mapping[str, Parameter]", experts: Collection[str], count: int, number: int
    ) -> OwnedParameters:
        """Return the parameters that a site with `owns_experts` trains. It does not communicate.

        Args:
            parameters: the trained parameters of this rank, by name.
            experts: names of the parameters of routed experts.
            count: sites of the run.
        """
        raise missing_method(self, "own_parameters")

    def least_every(self, cost: Any, precision: str) -> int | None:
        """Return the smallest `sites.every` for `moefold plan`, if the overlap is equal to it.

        Args:
            cost: the `planner.sites.SiteCost` of the rounds.
            precision: a value of `sites.precision`.

        Returns:
            None if the planner chooses the overlap.
        """
        return None

    def with_every(self, every: int) -> Self:
        """Return the method with settings for another `sites.every`."""
        return self
