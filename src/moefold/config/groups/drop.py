"""Token dropping: the tokens that share a capacity, and the order of the tokens that an expert keeps."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.base.part import Part
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig
    from moefold.config.sections.moe import MoEConfig

QueueEntry = tuple[float, int, tuple[int, int, int]]
"""Routed token of an expert: probability, index of the token in the micro-batch; sample, position and choice."""


@dataclass(frozen=True, kw_only=True)
class DropPart(Part):
    """Order in which an expert keeps tokens up to its capacity."""

    group: ClassVar[str] = "drop"
    key: ClassVar[str] = "moe.drop_policy"

    def order(self, ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
        """Return the routed tokens sorted by expert, and for each expert in the order in which it keeps them.

        Args:
            ids: expert of each routed token, int64 [T*K].
            probs: their routing probabilities, [T*K].
            by_index: their order by the index of their tokens, int64 [T*K].
        """
        raise NotImplementedError

    def formula(self) -> Callable[[list[QueueEntry]], list[QueueEntry]] | None:
        """Return a function that sorts the queue of an expert, or None if it has no formula."""
        return None

    def check(self, model: "ModelConfig", moe: "MoEConfig") -> Iterator[Problem]:
        """Yield problems of the capacity: tokens without an expert, no drops, or padding without a capacity."""
        part = model.routed
        if part is None or part.top_k > part.num_experts:
            return
        for key in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(moe, key)
            enough = part.num_choices / part.top_k
            if factor > 0 and factor * part.top_k < 1:
                rule = (
                    f"with model.ffn.moe.top_k={part.top_k} gives all experts together a capacity below the number "
                    "of tokens, "
                    "so some would reach no expert"
                )
                minimum = math.ceil(100 / part.top_k) / 100
                yield Problem(f"moe.{key}", factor, rule, f"choose {minimum} or more, or 0.0 (dropless)")
            elif factor >= enough and not moe.pad_to_capacity:
                rule = "lets every expert take every token, and so drops nothing"
                way_out = f"choose less than num_experts/top_k={enough:g}, or 0.0 (dropless)"
                yield Problem(f"moe.{key}", factor, rule, way_out)
        if moe.pad_to_capacity and moe.capacity_factor == 0:
            rule = "needs a capacity, and moe.capacity_factor=0.0 sets none"
            way_out = "set moe.capacity_factor=1.0 or more, or pad_to_capacity=false"
            yield Problem("moe.pad_to_capacity", True, rule, way_out)


Positions = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class DropScopePart(Part):
    """Tokens that share the capacity of an expert. The default is all tokens of a micro-batch."""

    group: ClassVar[str] = "drop_scope"
    key: ClassVar[str] = "moe.drop_scope"
    is_shared: ClassVar[bool] = True
    """True if the ranks of a micro-batch share a capacity; else each rank drops only its own tokens."""

    def formula(self) -> Callable[[int, Positions], Positions] | None:
        """Return the positions of each capacity, from the length of a sample and the positions of each rank."""
        return None
