"""Planned attention: for packed documents, only visible pairs are computed, and only the rows they need are sent."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Self, get_args

from moefold.config.base.part import UnusedKeys
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.context import BALANCED, AttentionHosts, ContextPart, MicroBatchSetPlan, TokenPlacement
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig
    from moefold.config.sections.data import DataConfig
    from moefold.config.sections.parallel import ParallelConfig
    from moefold.config.sections.rl import RLConfig
    from moefold.config.sections.train import TrainConfig

MAX_SMALL_BLOCK = 2
"""Maximum tokens of a block in a small recipe, whose documents have few tokens."""


@dataclass(frozen=True, kw_only=True)
class PlannedContext(MicroBatchSetPlan, ContextPart):
    """A plan for each micro-batch set assigns tokens, and the computation of their attention, to ranks.

    With documents, only visible pairs are computed, and only the rows that they need are sent (docs/documents.md).
    """

    @property
    def plan(self) -> MicroBatchSetPlan:
        """The part with the plan: this part."""
        return self

    def variants(self) -> Iterator[ContextPart]:
        """Yield each placement with each choice of compute ranks."""
        for placement, hosts in product(get_args(TokenPlacement), get_args(AttentionHosts)):
            yield replace(self, placement=placement, hosts=hosts)

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with divisible documents of few tokens and a legal pool, so that work still moves."""
        is_legal = self.pool and self.pool % small.cp == 0 and small.dp * small.cp % self.pool == 0
        return replace(self, block=min(self.block, MAX_SMALL_BLOCK), pool=self.pool if is_legal else 0)

    def unused_keys(self, data: "DataConfig", parallel: "ParallelConfig") -> Iterator[UnusedKeys]:
        """Yield settings without effect: of `hosts`, of split documents, or all where nothing is planned."""
        keys = " ".join(f"{self.key}.{setting.name}" for setting in fields(self))
        if not data.may_have_documents:
            reason = "every sample is one document, so the ranks have equal attention work"
            way_out = "set data.document_end or data.document_index, or a data.kind with documents such as 'sft'"
            yield UnusedKeys(keys, reason, way_out)
        if parallel.cp == 1:
            if parallel.world_size == parallel.tp * parallel.pp:
                reason = "dp*cp=1 rank has all tokens of a micro-batch set"
                yield UnusedKeys(keys, reason, "give the run more ranks in dp or cp")
            if self.placement == "documents":
                reason = "parallel.cp=1 leaves every sample whole on its rank"
                remedy = "set parallel.cp above 1, or parallel.context.placement='balanced'"
                yield UnusedKeys(f"{self.key}.placement", reason, remedy)
        if self.balances_compute_ranks:
            return
        reason, remedy = f"nothing reads it with {self.key}.hosts={self.hosts!r}", f"set {self.key}.hosts={BALANCED!r}"
        yield UnusedKeys(f"{self.key}.tolerance {self.key}.pool", reason, remedy)
        if self.placement != "documents":
            reason = f"{reason} and {self.key}.placement={self.placement!r}"
            yield UnusedKeys(f"{self.key}.block", reason, f"{remedy} or {self.key}.placement='documents'")

    def check(self, model: "ModelConfig", train: "TrainConfig", rl: "RLConfig") -> Iterator[Problem]:
        """Yield errors: attention that cannot be planned, a block that no document exceeds, rollouts."""
        if model.selected_keys:
            rule = (
                f"is incompatible with model.attention.indexer.top_k={model.selected_keys}, which selects among the "
                "keys of the whole "
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
        if self.balances_compute_ranks and rl.is_on:
            rule = "needs the documents of all ranks, and each rank packs only its own rollouts"
            yield Problem(f"{self.key}.hosts", self.hosts, rule, "choose hosts='home'")
        # The default is compatible with shorter samples too.
        longest = max(train.seq_len, type(self)().block)
        if (self.balances_compute_ranks or self.placement == "documents") and self.block > longest:
            seq_len = train.seq_len
            rule = f"must be at most train.seq_len={seq_len}, as no document of a sample is longer"
            yield Problem(f"{self.key}.block", self.block, rule, f"choose {seq_len} or less")
