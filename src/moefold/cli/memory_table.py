"""The tables of `moefold memory`: bytes by rank and part, and measured activations beside the formulas."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moefold.cli.screen import Column, open_console, print_columns, print_prose
from moefold.config.schema import Config
from moefold.metrics.bytes_text import format_bytes
from moefold.metrics.kept_parts import KernelProfile
from moefold.metrics.memory_formula import compute_rank_memory
from moefold.parallel.layout import Layout

if TYPE_CHECKING:
    from moefold.train.measured_memory import MeasuredMemory

BALANCING_DISPATCHERS = ("leastloaded",)
"""Dispatchers that move rows between ranks, so that the router alone does not say how many a rank has."""


def print_parts(rows: Mapping[int, Mapping[str, int]], title: str) -> None:
    """Print a column for each rank, a row for each part that any of them has, and the total."""
    console = open_console()
    console.print(f"{title}\n", style="bold")
    parts = list(dict.fromkeys(part for row in rows.values() for part, size in row.items() if size))
    columns = [Column(name="part", cells=[*parts, "total"])]
    for rank, row in rows.items():
        cells = [*(format_size(row.get(part, 0)) for part in parts), format_size(sum(row.values()))]
        columns.append(Column(name=f"rank {rank}", cells=cells, justify="right"))
    print_columns(console, columns)


def print_comparison(cfg: Config, layout: Layout, ranks: Sequence["MeasuredMemory"], kernels: KernelProfile) -> None:
    """Print measured activations beside those of the formulas, with even experts and with the rows of this step."""
    console = open_console()
    loads = [rank_imbalance(layout, ranks, i) for i in range(len(ranks))]
    even = compute_rank_memory(cfg, kernels=kernels)
    columns = [
        Column(name="rank", cells=[str(rank.rank) for rank in ranks], justify="right"),
        Column(name="measured", cells=[format_size(rank.activations) for rank in ranks], justify="right"),
        *_formula_columns("formula", ranks, [even[rank.pp_rank].activations.total for rank in ranks]),
    ]
    uneven = any(load is not None for load in loads) and cfg.parallel.dispatcher not in BALANCING_DISPATCHERS
    if uneven:
        of_load = {load: compute_rank_memory(cfg, kernels=kernels, imbalance=load) for load in set(loads) if load}
        routed = [
            (of_load[load] if load else even)[rank.pp_rank].activations.total
            for rank, load in zip(ranks, loads, strict=True)
        ]
        columns.append(
            Column(name="rows", cells=["-" if load is None else f"{load:.2f}x" for load in loads], justify="right")
        )
        columns += _formula_columns("with rows", ranks, routed)
    console.print("\nactivations at their fullest moment, measured and by formula\n", style="bold")
    print_columns(console, columns)
    console.print()
    if cfg.train.offload:
        print_prose(console, "formula", "as if nothing were offloaded")
    print_prose(console, "why", _explanation(uneven=uneven))


def rank_imbalance(layout: Layout, ranks: Sequence["MeasuredMemory"], rank: int) -> float | None:
    """Return the rows that a rank's experts worked on over the mean of its ep and etp group; None without experts.

    Rows of an expert reach all etp ranks of the ep rank that holds it.
    """
    group = layout.moe.group(rank, "ep", "etp")
    counts: list[int] = [sum(column) for column in zip(*(ranks[member].routed for member in group), strict=True)]
    if not sum(counts):
        return None
    held = len(counts) // layout.ep
    place = layout.moe.coordinate(rank, "ep")
    mine: int = sum(counts[place * held : (place + 1) * held])
    return mine * layout.ep / sum(counts)


def format_size(size: int) -> str:
    """Return bytes in a unit that suits, - for none."""
    return format_bytes(size) if size else "-"


def _formula_columns(name: str, ranks: Sequence["MeasuredMemory"], sizes: Sequence[int]) -> list[Column]:
    shares = [
        f"{100 * (size / rank.activations - 1):+.1f}%" if rank.activations else "-"
        for rank, size in zip(ranks, sizes, strict=True)
    ]
    return [
        Column(name=name, cells=[format_size(size) for size in sizes], justify="right"),
        Column(name="off by", cells=shares, justify="right"),
    ]


def _explanation(*, uneven: bool) -> str:
    known = "within 10 % for even experts on one thread (docs/memory.md)"
    if not uneven:
        return f"the formula is {known}."
    return (
        "`formula` counts even experts, but a rank keeps activations for the rows that the router sends to its "
        "experts. `rows` is their number in this step over the mean of the ep group, and `with rows` is the formula "
        f"with it. What is left is the error of the formula, {known}, and rows that differ between layers and "
        "micro-batches."
    )
