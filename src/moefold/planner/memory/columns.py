"""Places of what the planner counts of activations and states at a moment of a step. Torch-free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.cost.overlap_memory import SNAPSHOT_POINTS
from moefold.planner.model_spec import ModelSpec

Counts = NDArray[np.float64]
COMPARE_BLOCK_ROWS = 32
"""Rows that others are compared with at a time."""


@dataclass(frozen=True)
class MemoryColumns:
    """Places of what is counted, for a model of so many kinds of layers."""

    num_kinds: int
    moe_kinds: tuple[int, ...] = ()
    """Those of them that have experts."""

    @property
    def saved(self) -> int:
        """First of the columns of layers that keep their activations, by kind."""
        return 0

    @property
    def transient(self) -> int:
        """First of those of layers that run now."""
        return self.num_kinds

    @property
    def recompute_peak(self) -> int:
        """First of those of layers that run again now."""
        return 2 * self.num_kinds

    @property
    def delayed_wgrad(self) -> int:
        """First of those whose weights' gradients wait."""
        return 3 * self.num_kinds

    def at_snapshot_point(self, point: str) -> int:
        """First of those of layers at one of `pass_turns.MOMENTS`, beside another pass."""
        return (4 + SNAPSHOT_POINTS.index(point)) * self.num_kinds

    @property
    def first_end(self) -> int:
        """First of `END_COLUMNS`."""
        return (4 + len(SNAPSHOT_POINTS)) * self.num_kinds

    def end_column(self, name: str) -> int:
        """Column of one of `END_COLUMNS`."""
        return self.first_end + END_COLUMNS.index(name)

    @property
    def size(self) -> int:
        """Columns of activations."""
        return self.first_end + len(END_COLUMNS)

    @property
    def state_size(self) -> int:
        """Columns of states: layers by kind, `STATE_COLUMNS`, and stages by the set of their layers."""
        return self.num_kinds + len(STATE_COLUMNS) + (2 << self.num_kinds)

    def state_column(self, name: str) -> int:
        """Column of one of `STATE_COLUMNS`."""
        return self.num_kinds + STATE_COLUMNS.index(name)

    @property
    def first_kind_set(self) -> int:
        """First of the columns of stages by the set of kinds of their layers, as bits; the last bit: further ones."""
        return self.num_kinds + len(STATE_COLUMNS)


END_COLUMNS = (
    "embedding", "head", "further", "logits", "postponed_head", "postponed_further", "hidden", "in_transit",
)  # fmt: skip
"""What the ends of the model keep, and hidden states that are sent or awaited."""
STATE_COLUMNS = ("embedding", "head", "further", "second_embedding", "following_embedding", "stage")


def build_columns(model_spec: ModelSpec) -> MemoryColumns:
    """Those of a model."""
    kinds = model_spec.kinds
    routed = (i for i, kind in enumerate(kinds) if kind.feed_forward is not None and kind.feed_forward.kind == "moe")
    return MemoryColumns(len(kinds), tuple(routed))


def drop_dominated(rows: Counts) -> Counts:
    """Leave out rows that nowhere have more than another one, [rows, columns]."""
    # Those with most first: only one before it can outdo a row. Columns in which all have the same decide nothing.
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    left = rows.T[(rows != rows[0]).any(axis=0)]
    at = np.arange(len(rows))
    start = 0
    while start < len(at):
        block = left[:, start : start + COMPARE_BLOCK_ROWS]
        rest = left[:, start:]
        is_before = np.arange(rest.shape[1])[:, None] > np.arange(block.shape[1])
        stays = ~((rest[:, :, None] <= block[:, None, :]).all(axis=0) & is_before).any(axis=1)
        left = np.concatenate([left[:, :start], rest[:, stays]], axis=1)
        at = np.concatenate([at[:start], at[start:][stays]])
        start += int(stays[: block.shape[1]].sum())
    found: Counts = rows[at]
    return found
