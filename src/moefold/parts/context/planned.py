"""Planned attention: of packed documents, only visible pairs are computed and only the rows that they need are sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.groups.context import ContextPart
from moefold.config.part import FlatKey
from moefold.config.problem import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig
    from moefold.config.parallel import ParallelConfig
    from moefold.config.rl import RLConfig
    from moefold.config.train import TrainConfig

BALANCED = "balanced"


@dataclass(frozen=True, kw_only=True)
class PlannedContext(ContextPart):
    """A plan for each round of micro-batches says which rank holds a token and which computes its attention."""

    placement: Annotated[str, FlatKey("parallel.placement")]
    hosts: Annotated[str, FlatKey("parallel.attention_hosts")]
    tolerance: Annotated[float, FlatKey("parallel.attention_tolerance")]
    pool: Annotated[int, FlatKey("parallel.attention_pool")]
    block: Annotated[int, FlatKey("parallel.attention_block")]

    is_planned: ClassVar[bool] = True

    @property
    def balances_hosts(self) -> bool:
        """Return whether the hosts are balanced; see base class."""
        return self.hosts == BALANCED

    @property
    def moves_tokens(self) -> bool:
        """Return whether documents are placed; see base class."""
        return self.placement != "samples"

    @property
    def shares_work(self) -> bool:
        """Return whether hosts or documents are balanced over all ranks of a round; see base class."""
        return BALANCED in (self.hosts, self.placement)

    def check(
        self, model: "ModelConfig", parallel: "ParallelConfig", train: "TrainConfig", rl: "RLConfig"
    ) -> Iterator[Problem]:
        """Yield models without documents to plan for, a block that no document exceeds, and samples without hosts."""
        if model.selected_keys:
            rule = (
                f"does not go with model.attention.indexer.top_k={model.selected_keys}, which selects among the keys "
                "of the whole "
                "sequence"
            )
            way_out = "choose 'allgather' with parallel.cp=2 or more, or leave parallel.context out"
            yield Problem(self.key, self.kind, rule, way_out)
        if any(layer.chunk for layer in model.layers):
            rule = (
                f"plans attention within documents, and model.attention_pattern={model.attention_pattern!r} has layers "
                "of kind C, which divide them into chunks"
            )
            yield Problem(self.key, self.kind, rule, "choose parallel.context='ring'")
        if self.balances_hosts and rl.is_on:
            rule = "needs the documents of all ranks, and rollouts are packed on each rank alone"
            yield Problem("parallel.attention_hosts", self.hosts, rule, "choose parallel.attention_hosts='home'")
        # The default goes with shorter samples too.
        longest = max(train.seq_len, type(parallel)().attention_block)
        if (self.balances_hosts or self.placement == "documents") and self.block > longest:
            seq_len = train.seq_len
            rule = f"must be at most train.seq_len={seq_len}, as no document of a sample is longer"
            yield Problem("parallel.attention_block", self.block, rule, f"choose {seq_len} or less")
