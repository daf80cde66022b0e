"""Communicators of a rank: groups of a layout share a communicator by ranks and by purpose.

Collectives of one NCCL communicator run one after another, on one stream. FSDP has its own communicator: its
all-gathers and reduce-scatters and the dispatch of tokens do not wait for each other, although both often connect the
same ranks. The experts' communicators can have a stream of high priority.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moefold.topology.layout import Layout, View

Purpose = Literal["model", "experts", "fsdp"]


@dataclass(frozen=True)
class GroupSpec:
    """A group of each rank: the ranks that differ along `axes` of a view, and the purpose of their communication."""

    view: Literal["attention", "moe"]
    axes: tuple[str, ...]
    purpose: Purpose = "model"

    def view_of(self, layout: Layout) -> View:
        """Return the view of the layout that has these axes."""
        return layout.attention if self.view == "attention" else layout.moe


GROUPS = {
    "pp": GroupSpec("attention", ("pp",)),
    "tp": GroupSpec("attention", ("tp",)),
    "cp": GroupSpec("attention", ("cp",)),
    "dp": GroupSpec("attention", ("dp",)),
    "dp_cp": GroupSpec("attention", ("dp", "cp")),
    "sequence": GroupSpec("attention", ("cp", "tp")),
    "stage": GroupSpec("attention", ("dp", "cp", "tp")),
    "etp": GroupSpec("moe", ("etp",), "experts"),
    "ep": GroupSpec("moe", ("ep",), "experts"),
    "edp": GroupSpec("moe", ("edp",)),
    "experts": GroupSpec("moe", ("ep", "etp"), "experts"),
    "one": GroupSpec("attention", ()),
    "fsdp_dense": GroupSpec("attention", ("dp", "cp"), "fsdp"),
    "fsdp_experts": GroupSpec("moe", ("edp",), "fsdp"),
}
"""The groups of a rank by name, in the order of their creation."""


@dataclass(frozen=True)
class Communicator:
    """A communicator of a rank. Two groups with equal communicators share one."""

    ranks: tuple[int, ...]
    """Members, ascending."""
    purpose: Purpose


def communicators(layout: Layout, rank: int, *, separates_purposes: bool) -> dict[str, Communicator]:
    """Return the communicator of each group of a rank, by the names and in the order of `GROUPS`.

    Every rank creates the same number of communicators in the same order. The communicators that are created at the
    same time partition the world. So each can be split from the world's communicator by all ranks.

    Args:
        separates_purposes: whether groups with the same ranks share a communicator only if their purpose is the same.
            A group of one rank communicates nothing, and has one communicator for all purposes.
    """
    by_name = {}
    for name, spec in GROUPS.items():
        ranks = tuple(sorted(spec.view_of(layout).group(rank, *spec.axes)))
        is_separate = separates_purposes and len(ranks) > 1
        by_name[name] = Communicator(ranks, spec.purpose if is_separate else "model")
    return by_name


def communicator_names(layout: Layout, by_name: Mapping[str, Communicator]) -> dict[Communicator, str]:
    """Return the axes along which the ranks of each communicator differ, in both views, such as "cp x tp / ep"."""
    axes: dict[Communicator, list[str]] = {}
    for name, communicator in by_name.items():
        spec = GROUPS[name]
        axis_names = axes.setdefault(communicator, [])
        # An axis of degree 1 adds nothing to a product.
        product = " x ".join(axis for axis in spec.axes if spec.view_of(layout).degree(axis) > 1)
        if product and product not in axis_names:
            axis_names.append(product)
    return {
        communicator: (" / ".join(axis_names) or "one rank") + (" (FSDP)" if communicator.purpose == "fsdp" else "")
        for communicator, axis_names in axes.items()
    }
