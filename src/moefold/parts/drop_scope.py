"""Tokens that share a capacity."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.drop import DropScopePart, Positions
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig
    from moefold.config.sections.moe import MoEConfig
    from moefold.config.sections.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class DropOverMicroBatch(DropScopePart, kind="full_sequence"):
    """All tokens of a micro-batch share the capacity, so that every mapping drops the same tokens."""

    def check(self, model: "ModelConfig", parallel: "ParallelConfig", moe: "MoEConfig") -> Iterator[Problem]:
        """Yield an error for padding to a capacity that ranks share."""
        p = parallel
        if moe.pad_to_capacity and p.cp * p.tp > 1 and model.moe_layer_numbers:
            rule = (
                f"with moe.drop_scope={self.kind!r} would pad to cp*tp={p.cp * p.tp} times the rows: the ranks share "
                "one capacity, and each would need a buffer for all of it"
            )
            way_out = "choose drop_scope='sub_sequence', or pad_to_capacity=false"
            yield Problem("moe.pad_to_capacity", True, rule, way_out)

    def formula(self) -> Callable[[int, Positions], Positions]:
        """Return the function to the drop scopes of a sample: one, with all positions."""
        return lambda length, chunks: [range(length)]


@dataclass(frozen=True, kw_only=True)
class DropOverRank(DropScopePart, kind="sub_sequence"):
    """Each rank drops among its own tokens, without communication (the default of arXiv:2504.14960)."""

    is_shared: ClassVar[bool] = False

    def formula(self) -> Callable[[int, Positions], Positions]:
        """Return the positions of each rank."""
        return lambda length, chunks: chunks
