"""Column layout of the memory tables: activation and state columns of a snapshot. Torch-free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.cost.overlap_memory import SNAPSHOT_POINTS
from moefold.planner.model_spec import ModelSpec

Counts = NDArray[np.float64]
COMPARE_BLOCK_ROWS = 32
"""Rows that `drop_dominated` compares with at a time."""


@dataclass(frozen=True)
class MemoryColumns:
    """Column layout for a model with `num_kinds` kinds of layers."""

    num_kinds: int
    moe_kinds: tuple[int, ...] = ()
    """Kinds with experts."""

    @property
    def saved(self) -> int:
        """First column of layers whose activations are saved for backward, by kind."""
        return 0

    @property
    def transient(self) -> int:
        """First column of running layers, by kind."""
        return self.num_kinds

    @property
    def recompute_peak(self) -> int:
        """First column of layers that are being recomputed, by kind."""
        return 2 * self.num_kinds

    @property
    def delayed_wgrad(self) -> int:
        """First column of layers with delayed weight gradients, by kind."""
        return 3 * self.num_kinds

    def at_snapshot_point(self, point: str) -> int:
        """Return the first column of layers at one of `SNAPSHOT_POINTS` of an overlapped pass, by kind."""
        return (4 + SNAPSHOT_POINTS.index(point)) * self.num_kinds

    @property
    def first_end(self) -> int:
        """First of `END_COLUMNS`."""
        return (4 + len(SNAPSHOT_POINTS)) * self.num_kinds

    def end_column(self, name: str) -> int:
        """Return the column of one of `END_COLUMNS`."""
        return self.first_end + END_COLUMNS.index(name)

    @property
    def size(self) -> int:
        """Number of activation columns."""
        return self.first_end + len(END_COLUMNS)

    @property
    def state_size(self) -> int:
        """Number of state columns: layers by kind, `STATE_COLUMNS`, and stages by the set of their layer kinds."""
        return self.num_kinds + len(STATE_COLUMNS) + (2 << self.num_kinds)

    def state_column(self, name: str) -> int:
        """Return the column of one of `STATE_COLUMNS`."""
        return self.num_kinds + STATE_COLUMNS.index(name)

    @property
    def first_kind_set(self) -> int:
        """First column of stages by the bit set of their layer kinds; the last bit stands for MTP layers."""
        return self.num_kinds + len(STATE_COLUMNS)


END_COLUMNS = (
    "embedding", "head", "further", "logits", "postponed_head", "postponed_further", "hidden", "in_transit",
)  # fmt: skip
"""Activations of the embedding and the head, and hidden states that are sent or awaited."""
STATE_COLUMNS = ("embedding", "head", "further", "second_embedding", "following_embedding", "stage")


def build_columns(model_spec: ModelSpec) -> MemoryColumns:
    """Build the columns of a model."""
    kinds = model_spec.kinds
    routed = (i for i, kind in enumerate(kinds) if kind.feed_forward is not None and kind.feed_forward.kind == "moe")
    return MemoryColumns(len(kinds), tuple(routed))


def drop_dominated(rows: Counts) -> Counts:
    """Drop the rows that are nowhere larger than another row, [rows, columns]."""
    # Sorted by descending sum: only an earlier row can dominate a row. Constant columns are ignored.
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
