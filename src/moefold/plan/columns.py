"""Places of what the planner counts of activations and states at a moment of a step. Torch-free."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.metrics.pass_turns import MOMENTS
from moefold.plan.shape import ModelShape

Counts = NDArray[np.float64]
AT_ONCE = 32
"""Rows that others are compared with at a time."""


@dataclass(frozen=True)
class Columns:
    """Places of what is counted, for a model of so many kinds of layers."""

    kinds: int
    routed: tuple[int, ...] = ()
    """Those of them that have experts."""

    @property
    def kept(self) -> int:
        """First of the columns of layers that keep their activations, by kind."""
        return 0

    @property
    def passing(self) -> int:
        """First of those of layers that run now."""
        return self.kinds

    @property
    def again(self) -> int:
        """First of those of layers that run again now."""
        return 2 * self.kinds

    @property
    def postponed(self) -> int:
        """First of those whose weights' gradients wait."""
        return 3 * self.kinds

    def at(self, moment: str) -> int:
        """First of those of layers at one of `pass_turns.MOMENTS`, beside another pass."""
        return (4 + MOMENTS.index(moment)) * self.kinds

    @property
    def ends(self) -> int:
        """First of `END_COLUMNS`."""
        return (4 + len(MOMENTS)) * self.kinds

    def end(self, name: str) -> int:
        """Column of one of `END_COLUMNS`."""
        return self.ends + END_COLUMNS.index(name)

    @property
    def size(self) -> int:
        """Columns of activations."""
        return self.ends + len(END_COLUMNS)

    @property
    def state_size(self) -> int:
        """Columns of states: layers by kind, `STATE_COLUMNS`, and stages by the set of their layers."""
        return self.kinds + len(STATE_COLUMNS) + (2 << self.kinds)

    def state(self, name: str) -> int:
        """Column of one of `STATE_COLUMNS`."""
        return self.kinds + STATE_COLUMNS.index(name)

    @property
    def sets(self) -> int:
        """First of the columns of stages by the set of kinds of their layers, as bits; the last bit: further ones."""
        return self.kinds + len(STATE_COLUMNS)


END_COLUMNS = (
    "embedding", "head", "further", "logits", "postponed_head", "postponed_further", "hidden", "in_transit",
)  # fmt: skip
"""What the ends of the model keep, and hidden states that are sent or awaited."""
STATE_COLUMNS = ("embedding", "head", "further", "second_embedding", "following_embedding", "stage")


def columns_of(shape: ModelShape) -> Columns:
    """Those of a model."""
    kinds = shape.kinds
    routed = (i for i, kind in enumerate(kinds) if kind.feed_forward is not None and kind.feed_forward.kind == "moe")
    return Columns(len(kinds), tuple(routed))


def undominated(rows: Counts) -> Counts:
    """Leave out rows that nowhere have more than another one, [rows, columns]."""
    # Those with most first: only one before it can outdo a row. Columns in which all have the same decide nothing.
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    left, at, start = rows.T[(rows != rows[0]).any(axis=0)], np.arange(len(rows)), 0
    while start < len(at):
        block, rest = left[:, start : start + AT_ONCE], left[:, start:]
        is_before = np.arange(rest.shape[1])[:, None] > np.arange(block.shape[1])
        stays = ~((rest[:, :, None] <= block[:, None, :]).all(axis=0) & is_before).any(axis=1)
        left = np.concatenate([left[:, :start], rest[:, stays]], axis=1)
        at = np.concatenate([at[:start], at[start:][stays]])
        start += int(stays[: block.shape[1]].sum())
    found: Counts = rows[at]
    return found
