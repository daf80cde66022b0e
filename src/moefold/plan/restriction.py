"""Parts of the space of mappings: axes that are fixed, and the five methods of arXiv:2504.14960. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Degrees(Protocol):
    """The degrees of a fold."""

    @property
    def tp(self) -> int:
        """Degree of tp."""
        ...

    @property
    def cp(self) -> int:
        """Degree of cp."""
        ...

    @property
    def dp(self) -> int:
        """Degree of dp."""
        ...

    @property
    def pp(self) -> int:
        """Degree of pp."""
        ...

    @property
    def ep(self) -> int:
        """Degree of ep."""
        ...

    @property
    def etp(self) -> int:
        """Degree of etp."""
        ...


@dataclass(frozen=True)
class MappingMethod:
    """A way of mapping that others have, as a part of the space."""

    summary: str
    accepts: Callable[[Degrees], bool]
    zero: int | None = None
    """What it shards over the data-parallel ranks; None: any."""
    ep_may_span_cp: bool = False
    """Whether ep may take ranks of cp, so that ep neighbours are etp apart; else those of tp and cp lie between."""


def _is_coupled(degrees: Degrees) -> bool:
    """Experts are cut as attention is, and ep lies within dp: what there was before folding."""
    return degrees.etp == degrees.tp and degrees.dp % degrees.ep == 0


def _is_coupled_with_cp(degrees: Degrees) -> bool:
    return degrees.etp == degrees.tp and (degrees.dp * degrees.cp) % degrees.ep == 0


FOLDED = "folding"
"""The method without a restriction."""

COUPLED = "coupled"
"""Without folding, as arXiv:2504.14960 describes its baselines."""

COUPLED_WITH_CP = "coupled+cp"
"""The largest space without folding: the baselines that arXiv:2504.14960 measured with context parallelism, where EP4
stands on DP2 x CP4, which `coupled` cannot express."""

METHODS = {
    FOLDED: MappingMethod("any ep and etp that fold over the ranks of a stage", lambda d: True, ep_may_span_cp=True),
    COUPLED: MappingMethod("etp = tp, and ep divides dp (Megatron-Core without folding)", _is_coupled),
    COUPLED_WITH_CP: MappingMethod(
        "etp = tp, and ep divides dp*cp (without folding, as measured)", _is_coupled_with_cp, ep_may_span_cp=True
    ),
    "fsdp": MappingMethod("pp = ep = 1, etp = tp, zero = 3", lambda d: _is_coupled(d) and d.pp == d.ep == 1, 3),
    "fsdp+ep": MappingMethod(
        "pp = 1, ep of 2 or more divides dp, etp = tp, zero = 3",
        lambda d: _is_coupled(d) and d.pp == 1 and d.ep > 1,
        3,
    ),
    "tp+ep+dp": MappingMethod("pp = 1, ep divides dp, etp = tp, zero = 1", lambda d: _is_coupled(d) and d.pp == 1, 1),
}
"""By the name that `moefold plan --method` takes. As far as the paper describes its baselines (sec. 4.1)."""

DEGREES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")


@dataclass(frozen=True)
class Restriction:
    """The mappings of a method with some axes fixed."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Value by axis: tp cp dp pp ep etp edp mbs schedule vpp zero dispatcher recompute offload moments overlap."""
    method: str = FOLDED
    """A key of `METHODS`."""

    def allows_fold(self, degrees: Degrees) -> bool:
        """Whether the degrees are as fixed, and the method's."""
        fixed = self._fixed_degrees
        return all(getattr(degrees, axis) == degree for axis, degree in fixed) and METHODS[self.method].accepts(degrees)

    @property
    def _fixed_degrees(self) -> list[tuple[str, Any]]:
        return [(axis, self.fixed[axis]) for axis in DEGREES if axis in self.fixed]

    def allows(self, axis: str, value: Any) -> bool:
        """Whether another axis may have a value."""
        method = METHODS[self.method]
        if axis == "zero" and method.zero not in (None, value):
            return False
        return axis not in self.fixed or bool(self.fixed[axis] == value)
