"""The two views of the ranks, as integers: MoE Parallel Folding (arXiv:2504.14960 sec. 3.1).

Torch-free: the planner, the runtime and `moefold layout` share it. A view is one factorisation of the ranks into named
axes; attention uses `tp cp dp pp`, experts use `etp ep edp pp`, over the same ranks.
"""

from dataclasses import dataclass
from math import lcm, log, prod

from moefold.errors import ConfigError

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
MOE_AXES = ("etp", "ep", "edp", "pp")
DEFAULT_ORDER = "pp-dp-cp-tp"
DEFAULT_MOE_ORDER = "pp-edp-ep-etp"


@dataclass(frozen=True)
class View:
    """One factorisation of ranks 0 .. product(degrees)-1; `axes` runs from the slowest to the fastest."""

    axes: tuple[str, ...]
    degrees: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the view."""
        return prod(self.degrees)

    def degree(self, axis: str) -> int:
        """Size of one axis."""
        return self.degrees[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        """Distance between neighbours along one axis, in ranks."""
        return prod(self.degrees[self.axes.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of a rank along one axis."""
        return rank // self.stride(axis) % self.degree(axis)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, the first named axis slowest.

        The order of a group is the order of its coordinates, so member i of a one-axis group has coordinate i.
        """
        members = [rank - sum(self.coordinate(rank, axis) * self.stride(axis) for axis in axes)]
        for axis in axes:
            stride = self.stride(axis)
            members = [member + i * stride for member in members for i in range(self.degree(axis))]
        return tuple(members)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`, in the order of their first members: a partition of the ranks."""
        firsts = range(self.world_size)
        return tuple(self.group(rank, *axes) for rank in firsts if not any(self.coordinate(rank, a) for a in axes))

    def group_index(self, rank: int, axis: str) -> int:
        """Which of `groups(axis)` a rank belongs to: what is slower than the axis counts first, then what is faster."""
        stride = self.stride(axis)
        return rank // (stride * self.degree(axis)) * stride + rank % stride

    def group_indices(self, axis: str) -> tuple[int, ...]:
        """The same of each rank."""
        return tuple(self.group_index(rank, axis) for rank in range(self.world_size))


@dataclass(frozen=True)
class Layout:
    """A legal folding: both views over the same ranks, with equal pipeline groups. Made by `fold`."""

    attention: View
    moe: View

    @property
    def world_size(self) -> int:
        """Ranks in all."""
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
        """Data-parallel degree of attention: world_size / (tp*cp*pp)."""
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
        """Data-parallel degree of the experts: world_size / (etp*ep*pp)."""
        return self.moe.degree("edp")

    @property
    def as_dict(self) -> dict[str, object]:
        """The rank groups of both views, in the form that `moefold layout --json` prints."""
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
    """Fold the expert axes over the ranks of attention; dp and edp follow from the world size.

    Raises:
        ConfigError: a degree is not positive or does not divide, an order is not a permutation of its axes, or the
            pipeline groups of the two views differ.
    """
    degrees = {"world_size": world_size, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    for key, value in degrees.items():
        if value < 1:
            raise ConfigError(f"parallel.{key}={value} must be at least 1; leave it out for the default of 1")
    multiple = lcm(tp * cp * pp, etp * ep * pp)
    stage = _divide("pp", pp, world_size, "world_size", multiple)
    rows = _divide("tp", tp, stage, "world_size/pp", multiple)
    dp = _divide("cp", cp, rows, "world_size/(tp*pp)", multiple)
    moe_rows = _divide("etp", etp, stage, "world_size/pp", multiple)
    edp = _divide("ep", ep, moe_rows, "world_size/(etp*pp)", multiple)
    attention = _parse_view("order", order, {"tp": tp, "cp": cp, "dp": dp, "pp": pp})
    moe = _parse_view("moe_order", moe_order, {"etp": etp, "ep": ep, "edp": edp, "pp": pp})
    layout = Layout(attention, moe)
    _check_pipeline_groups(layout)
    return layout


def divisors(n: int) -> list[int]:
    """All positive divisors of n, ascending."""
    found, rest, prime = [1], n, 2
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        found = [d * power for d in found for power in powers]
        prime += 1
    return sorted(found)


def _divide(key: str, value: int, whole: int, name: str, multiple: int) -> int:
    """`whole / value`, or a ConfigError with the nearest divisors and the nearest world sizes that fit all degrees."""
    if whole % value == 0:
        return whole // value
    legal = divisors(whole)
    nearest = sorted(sorted(legal, key=lambda d: abs(d - value))[:8])
    choices = f"choose one of {', '.join(map(str, nearest))}" if len(nearest) > 1 else f"choose {nearest[0]}"
    raise ConfigError(
        f"parallel.{key}={value} must divide {name}={whole}; {choices}, "
        f"or make parallel.world_size a multiple of {multiple}"
    )


def _parse_view(key: str, order: str, degrees: dict[str, int]) -> View:
    axes = tuple(order.split("-"))
    if sorted(axes) != sorted(degrees):
        default = DEFAULT_ORDER if key == "order" else DEFAULT_MOE_ORDER
        raise ConfigError(
            f"parallel.{key}={order!r} must name each of {', '.join(degrees)} once, slowest to fastest, "
            f"joined by '-'; the default is {default!r}"
        )
    return View(axes, tuple(degrees[axis] for axis in axes))


def _check_pipeline_groups(layout: Layout) -> None:
    """Refuse views whose pipelines differ. A pp group is `first + i * stride`, so equal strides mean equal groups."""
    attention, moe = layout.attention, layout.moe
    inside, moe_inside = attention.stride("pp"), moe.stride("pp")
    if layout.pp == 1 or inside == moe_inside:
        return
    order, moe_order = "-".join(attention.axes), "-".join(moe.axes)
    ways = [f"ep={ep} with etp={etp}" for ep, etp in _compatible_ep_etp(layout)[:3]]
    ways.append(f"order={DEFAULT_ORDER!r} with moe_order={DEFAULT_MOE_ORDER!r}")
    raise ConfigError(
        f"parallel.order={order!r} with parallel.moe_order={moe_order!r} give different pp groups: pp has stride "
        f"{inside} in attention ({_axes_after_pp(attention)}) but {moe_inside} in the MoE view ({_axes_after_pp(moe)}), "
        f"and a rank has one stage; choose {', or '.join(ways)}"
    )


def _axes_after_pp(view: View) -> str:
    return "*".join(view.axes[view.axes.index("pp") + 1 :]) or "nothing behind pp"


def _compatible_ep_etp(layout: Layout) -> list[tuple[int, int]]:
    """The (ep, etp) that fold under the given orders, nearest first."""
    stage = layout.world_size // layout.pp
    fitting = []
    for etp in divisors(stage):
        for ep in divisors(stage // etp):
            degrees = {"etp": etp, "ep": ep, "edp": stage // (etp * ep), "pp": layout.pp}
            moe = View(layout.moe.axes, tuple(degrees[axis] for axis in layout.moe.axes))
            if moe.stride("pp") == layout.attention.stride("pp"):
                fitting.append((ep, etp))
    return sorted(fitting, key=lambda pair: abs(log(pair[0] / layout.ep)) + abs(log(pair[1] / layout.etp)))
