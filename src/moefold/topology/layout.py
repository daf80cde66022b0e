"""Rank layout of MoE Parallel Folding (arXiv:2504.14960 sec. 3.1): two views of the same ranks, as integers.

A view is one factorisation of the ranks into named axes: attention uses `tp cp dp pp`, experts use `etp ep edp pp`. The
planner, the runtime and `moefold layout` share this module.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm, log, prod

from moefold.config.sections.parallel import ParallelConfig
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
MOE_AXES = ("etp", "ep", "edp", "pp")
DEGREES = ("tp", "cp", "pp", "ep", "etp")
"""Degrees that a recipe sets. The number of ranks decides dp and edp."""
DEFAULT_ORDER = "pp-dp-cp-tp"
DEFAULT_MOE_ORDER = "pp-edp-ep-etp"


@dataclass(frozen=True)
class View:
    """One factorisation of ranks 0 .. product(degrees)-1. `axes` runs from the slowest to the fastest."""

    axes: tuple[str, ...]
    degrees: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees)

    def degree(self, axis: str) -> int:
        """Return the size of one axis."""
        return self.degrees[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        """Return the distance between neighbours along one axis, in ranks."""
        return prod(self.degrees[self.axes.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank along one axis."""
        return rank // self.stride(axis) % self.degree(axis)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, the first named axis slowest.

        Members are ordered by coordinate: member i of a one-axis group has coordinate i.
        """
        members = [rank - sum(self.coordinate(rank, axis) * self.stride(axis) for axis in axes)]
        for axis in axes:
            stride = self.stride(axis)
            members = [member + i * stride for member in members for i in range(self.degree(axis))]
        return tuple(members)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axes`, ordered by first member: a partition of the ranks."""
        firsts = range(self.world_size)
        return tuple(self.group(rank, *axes) for rank in firsts if not any(self.coordinate(rank, a) for a in axes))

    def group_index(self, rank: int, axis: str) -> int:
        """Return the index of a rank's group in `groups(axis)`."""
        stride = self.stride(axis)
        return rank // (stride * self.degree(axis)) * stride + rank % stride

    def group_indices(self, axis: str) -> tuple[int, ...]:
        """Return `group_index` of every rank."""
        return tuple(self.group_index(rank, axis) for rank in range(self.world_size))


@dataclass(frozen=True)
class Layout:
    """Legal folding: both views of the same ranks, with equal pipeline groups. Built by `fold`."""

    attention: View
    moe: View

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.attention.world_size

    @property
    def tp(self) -> int:
        """Tensor-parallel degree of attention and dense layers."""
        return self.attention.degree("tp")

    @property
    def cp(self) -> int:
        """Context-parallel degree."""
        return self.attention.degree("cp")

    @property
    def dp(self) -> int:
        """Data-parallel degree of attention: `world_size / (tp*cp*pp)`."""
        return self.attention.degree("dp")

    @property
    def pp(self) -> int:
        """Pipeline ranks, the same in both views."""
        return self.attention.degree("pp")

    @property
    def etp(self) -> int:
        """Expert-tensor-parallel degree."""
        return self.moe.degree("etp")

    @property
    def ep(self) -> int:
        """Expert-parallel degree."""
        return self.moe.degree("ep")

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts: `world_size / (etp*ep*pp)`."""
        return self.moe.degree("edp")

    @property
    def as_dict(self) -> dict[str, object]:
        """Rank groups of both views, in the form that `moefold layout --json` prints."""
        return {
            "world_size": self.world_size,
            "attention": {axis: [list(group) for group in self.attention.groups(axis)] for axis in ATTENTION_AXES},
            "moe": {axis: [list(group) for group in self.moe.groups(axis)] for axis in MOE_AXES},
        }


def fold(
    *,
    world_size: int,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    moe_order: str = DEFAULT_MOE_ORDER,
) -> Layout:
    """Fold the expert axes over the ranks of attention. The world size decides dp and edp.

    Raises:
        ConfigError: a degree is not positive or does not divide, an order is not a permutation of its axes, or the
            pipeline groups of the two views differ.
    """
    degrees = {"world_size": world_size, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    for key, value in degrees.items():
        if value < 1:
            rule = "must be at least 1"
            raise ConfigError(Problem(f"parallel.{key}", value, rule, "leave it out for the default of 1"))
    multiple = lcm(tp * cp * pp, etp * ep * pp)
    stage = _divide("pp", pp, world_size, "world_size", multiple)
    rows = _divide("tp", tp, stage, "world_size/pp", multiple)
    dp = _divide("cp", cp, rows, "world_size/(tp*pp)", multiple)
    moe_rows = _divide("etp", etp, stage, "world_size/pp", multiple)
    edp = _divide("ep", ep, moe_rows, "world_size/(etp*pp)", multiple)
    attention = _parse_view("order", order, (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)))
    moe = _parse_view("moe_order", moe_order, (("etp", etp), ("ep", ep), ("edp", edp), ("pp", pp)))
    layout = Layout(attention, moe)
    _check_pipeline_groups(layout)
    return layout


def fold_mapping(parallel: ParallelConfig) -> Layout:
    """Fold the mapping of a recipe.

    Raises:
        ConfigError: see `fold`.
    """
    return fold(
        world_size=parallel.world_size,
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        ep=parallel.ep,
        etp=parallel.etp,
        order=parallel.order,
        moe_order=parallel.moe_order,
    )


def divisors(n: int) -> list[int]:
    """Return all positive divisors of n, ascending."""
    factors = [1]
    remainder = n
    prime = 2
    while remainder > 1:
        if prime * prime > remainder:
            prime = remainder
        powers = [1]
        while remainder % prime == 0:
            remainder //= prime
            powers.append(powers[-1] * prime)
        factors = [d * power for d in factors for power in powers]
        prime += 1
    return sorted(factors)


def _divide(key: str, value: int, total: int, name: str, multiple: int) -> int:
    """Return `total / value`. The ConfigError names the nearest divisors and the world sizes that fit all degrees."""
    if total % value == 0:
        return total // value
    legal = divisors(total)
    nearest = sorted(sorted(legal, key=lambda d: abs(d - value))[:8])
    choices = f"choose one of {', '.join(map(str, nearest))}" if len(nearest) > 1 else f"choose {nearest[0]}"
    rule = f"must divide {name}={total}"
    way_out = f"{choices}, or make {Setting('parallel.world_size')} a multiple of {multiple}"
    raise ConfigError(Problem(f"parallel.{key}", value, rule, way_out))


@lru_cache(maxsize=4096)
def _parse_view(key: str, order: str, degrees_of_axes: tuple[tuple[str, int], ...]) -> View:
    axes = tuple(order.split("-"))
    degrees = dict(degrees_of_axes)
    if sorted(axes) != sorted(degrees):
        default = DEFAULT_ORDER if key == "order" else DEFAULT_MOE_ORDER
        rule = f"must name each of {', '.join(degrees)} once, slowest to fastest, joined by '-'"
        raise ConfigError(Problem(f"parallel.{key}", order, rule, f"the default is {default!r}"))
    return View(axes, tuple(degrees[axis] for axis in axes))


def _check_pipeline_groups(layout: Layout) -> None:
    """Check that both views have equal pp groups.

    A pp group is `first + i * stride`, so equal strides mean equal groups.
    """
    attention = layout.attention
    moe = layout.moe
    stride = attention.stride("pp")
    moe_stride = moe.stride("pp")
    if layout.pp == 1 or stride == moe_stride:
        return
    order = "-".join(attention.axes)
    moe_order = "-".join(moe.axes)
    options = [f"ep={ep} with etp={etp}" for ep, etp in _compatible_ep_etp(layout)[:3]]
    options.append(f"order={DEFAULT_ORDER!r} with moe_order={DEFAULT_MOE_ORDER!r}")
    raise ConfigError(
        f"parallel.order={order!r} with parallel.moe_order={moe_order!r} give different pp groups: pp has stride "
        f"{stride} in attention ({_axes_after_pp(attention)}) but {moe_stride} in the MoE view "
        f"({_axes_after_pp(moe)}), and a rank has one stage; choose {', or '.join(options)}"
    )


def _axes_after_pp(view: View) -> str:
    return "*".join(view.axes[view.axes.index("pp") + 1 :]) or "nothing after pp"


def _compatible_ep_etp(layout: Layout) -> list[tuple[int, int]]:
    """Return the (ep, etp) that fold under the given orders, nearest first."""
    stage = layout.world_size // layout.pp
    fitting = []
    for etp in divisors(stage):
        for ep in divisors(stage // etp):
            degrees = {"etp": etp, "ep": ep, "edp": stage // (etp * ep), "pp": layout.pp}
            moe = View(layout.moe.axes, tuple(degrees[axis] for axis in layout.moe.axes))
            if moe.stride("pp") == layout.attention.stride("pp"):
                fitting.append((ep, etp))
    return sorted(fitting, key=lambda pair: abs(log(pair[0] / layout.ep)) + abs(log(pair[1] / layout.etp)))
