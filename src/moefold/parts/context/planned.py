"""Planned attention: of packed documents, only visible pairs are computed and only the rows that they need are sent."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.context import PlannedPart
from moefold.config.problem import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig
    from moefold.config.rl import RLConfig
    from moefold.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PlannedContext(PlannedPart):
    """A plan for each round of micro-batches says which rank holds a token and which computes its attention."""

    def check(self, model: "ModelConfig", train: "TrainConfig", rl: "RLConfig") -> Iterator[Problem]:
        """Yield models without documents to plan for, a block that no document exceeds, and samples without hosts."""
        if model.selected_keys:
            rule = (
                f"does not go with model.attention.indexer.top_k={model.selected_keys}, which selects among the keys "
                "of the whole "
                "sequence"
            )
            way_out = "choose 'allgather' with parallel.cp=2 or more, or leave parallel.context out"
            yield Problem(self.key, self.kind, rule, way_out)
        if any(layer.chunk for layer in model.decoder_layers):
            rule = (
                f"plans attention within documents, and model.layers={model.layers!r} has layers "
                "'chunk', which divide them into chunks"
            )
            yield Problem(self.key, self.kind, rule, "choose parallel.context='ring'")
        if self.balances_hosts and rl.is_on:
            rule = "needs the documents of all ranks, and rollouts are packed on each rank alone"
            yield Problem(f"{self.key}.hosts", self.hosts, rule, "choose hosts='home'")
        # The default goes with shorter samples too.
        longest = max(train.seq_len, type(self)().block)
        if (self.balances_hosts or self.placement == "documents") and self.block > longest:
            seq_len = train.seq_len
            rule = f"must be at most train.seq_len={seq_len}, as no document of a sample is longer"
            yield Problem(f"{self.key}.block", self.block, rule, f"choose {seq_len} or less")
