"""Least-loaded expert parallelism (arXiv:2601.17111): an all-to-all that relieves overloaded ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import at_least
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.dispatcher import DispatcherPart, DispatchSizes
from moefold.config.model import ModelConfig
from moefold.message_text import Problem, Setting

if TYPE_CHECKING:
    from moefold.comm.groups import MoEGroups
    from moefold.config.sections.moe import MoEConfig
    from moefold.config.sections.parallel import ParallelConfig
    from moefold.config.sections.train import TrainConfig
    from moefold.parts.dispatcher.leastloaded.module import LeastLoadedDispatcher


@dataclass(frozen=True, kw_only=True)
class LeastLoadedDispatcherPart(DispatcherPart):
    """Send routed tokens of a busy expert, with a copy of its weights, to a rank with less load."""

    threshold: Annotated[float, at_least(1)] = 1.3
    """Move routed tokens if the busiest ep rank has more than this times the mean load."""
    capacity: Annotated[float, at_least(1)] = 1.1
    """Target load of a rank after the move, as a multiple of the mean load."""
    min_tokens: Annotated[int, at_least(1)] = 64
    """Minimum number of routed tokens for which an expert's weights are sent, about 1024 on a GPU."""

    moves_experts: ClassVar[bool] = True

    def check(
        self, model: ModelConfig, parallel: "ParallelConfig", moe: "MoEConfig", train: "TrainConfig"
    ) -> Iterator[Problem]:
        """Yield errors for one ep rank, for equal loads, and for thresholds that cannot apply."""
        p = parallel
        if not model.has_moe_layers:
            return
        if p.ep == 1:
            yield self._problem(
                f"moves routed tokens between the ranks of ep, and {Setting('parallel.ep', 1)}",
                "choose 'alltoall', or ep of 2 or more",
            )
            return
        if moe.pad_to_capacity:
            yield Problem(
                "moe.pad_to_capacity",
                True,
                f"gives every rank the same load, so {self.key}={self.kind!r} would move nothing",
                "choose pad_to_capacity=false, or dispatcher='alltoall'",
            )
        if self.threshold >= p.ep:
            yield Problem(
                f"{self.key}.threshold",
                self.threshold,
                f"must be below {Setting('parallel.ep', p.ep)}, the most mean loads that one rank can have",
                "the published value is 1.3",
            )
        if self.capacity > self.threshold:
            yield Problem(
                f"{self.key}.capacity",
                self.capacity,
                f"must be at most threshold={self.threshold}: a smaller load needs no relief",
                f"choose 1.0 to {self.threshold}",
            )
        ranks = p.ep * p.etp
        tokens = train.seq_len * train.micro_batch_size * ranks // (p.cp * p.tp)
        largest = min(tokens, ceil(self.capacity * tokens * model.experts.top_k / p.ep))
        if self.min_tokens > largest:
            yield Problem(
                f"{self.key}.min_tokens",
                self.min_tokens,
                f"must be at most {largest}, the most routed tokens of one expert that a rank could take over of the "
                f"{tokens} tokens of ep*etp={ranks} ranks",
                f"choose 1 to {largest}",
            )

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part without a minimum of tokens: the experts of a small recipe have fewer."""
        return replace(self, min_tokens=1)

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> "LeastLoadedDispatcher":
        """Return the dispatcher."""
        from moefold.parts.dispatcher.leastloaded.module import LeastLoadedDispatcher, RebalanceRule

        rule = RebalanceRule(self.threshold, self.capacity, self.min_tokens)
        return LeastLoadedDispatcher(groups, sizes.num_experts, rule, fp8_dispatch=sizes.fp8_dispatch)
