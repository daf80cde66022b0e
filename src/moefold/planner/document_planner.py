"""Planner for samples of documents: prices every fold under each way to share attention. Torch-free."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.planner.cost_model.step import CostModel
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.strategy import AttentionStrategy
from moefold.planner.planner import Planner, PlanRequest, best_of_all
from moefold.planner.search.constraints import Fold
from moefold.planner.search.search import MappingGroup, PlannedMapping


def candidate_strategies(own: AttentionStrategy) -> list[AttentionStrategy]:
    """Return the recipe's own strategy, and then planned attention with each placement and choice of hosts."""
    planned = [
        replace(own, context="planned", placement=placement, hosts=hosts)
        for placement in ("samples", "documents", "balanced")
        for hosts in ("home", "balanced")
    ]
    return list(dict.fromkeys([own, *planned]))


class DocumentPlanner(Planner):
    """Planner that chooses context, placement and hosts of attention for each fold.

    Args:
        request: the request; its workload has the attention work of documents (`DocumentLoads`).
    """

    @cached_property
    def planners(self) -> dict[AttentionStrategy, Planner]:
        """Planners by strategy, the recipe's own first; strategies that the runtime refuses are left out."""
        found = {}
        for strategy in candidate_strategies(self._loads.strategy):
            try:
                planner = Planner(self._request_with(strategy))
            except ConfigError:
                # The runtime would refuse the recipe with this strategy, whatever the mapping.
                continue
            if planner.space.folds:
                found[strategy] = planner
        return found

    @cached_property
    def plans(self) -> list[PlannedMapping]:
        """The best mapping of every fold, each with its fastest strategy."""
        if not self.space.folds:
            return super().plans
        ranked = [[self._marked(s, p.plans)] for s, p in self.planners.items()]
        return best_of_all([MappingGroup(self.num_folds)], ranked)[0]

    def top_plans(self, count: int) -> list[PlannedMapping]:
        """See base class."""
        if not self.space.folds:
            return super().top_plans(count)
        if count > self._num_requested:
            self._num_requested = count
            self._top_plans = self.best_of([MappingGroup(count)])[0]
        return self._top_plans[:count] or self.plans[:count]

    def best_of(self, groups: Sequence[MappingGroup]) -> list[list[PlannedMapping]]:
        """See base class."""
        found = [[self._marked(s, plans) for plans in p.best_of(groups)] for s, p in self.planners.items()]
        return best_of_all(groups, found)

    def faster_folds(self, seconds: float) -> set[Fold]:
        """See base class."""
        return set().union(*(planner.faster_folds(seconds) for planner in self.planners.values()))

    def plans_below(
        self, limit_s: float, zero_stages: tuple[int, ...], accepts: Callable[[Fold], bool]
    ) -> list[PlannedMapping]:
        """See base class."""
        found = ((s, p.plans_below(limit_s, zero_stages, accepts)) for s, p in self.planners.items())
        return [plan for strategy, plans in found for plan in self._marked(strategy, plans)]

    @property
    def gap(self) -> float:
        """See base class."""
        return max((planner.gap for planner in self.planners.values()), default=0.0)

    def rank_all(self) -> None:
        """See base class."""
        _ = self.plans

    def cost_model_for(self, plan: PlannedMapping) -> CostModel:
        """Return the cost model of the plan's strategy."""
        return self._planner_of(plan).cost_model_for(plan)

    def config_for(self, plan: PlannedMapping) -> Config:
        """Return the recipe with the mapping and the strategy of a plan."""
        return self._planner_of(plan).config_for(plan)

    def with_num_gpus(self, num_gpus: int) -> "DocumentPlanner":
        """Return a planner of the same documents for another number of GPUs."""
        return DocumentPlanner(self.request.with_num_gpus(num_gpus))

    @property
    def _loads(self) -> DocumentLoads:
        loads = self.request.workload.attention
        assert isinstance(loads, DocumentLoads)
        return loads

    def _request_with(self, strategy: AttentionStrategy) -> PlanRequest:
        q = self.request
        return replace(
            q,
            base_config=replace(q.base_config, parallel=strategy.apply(q.base_config.parallel)),
            workload=replace(q.workload, attention=self._loads.with_strategy(strategy)),
        )

    def _marked(self, strategy: AttentionStrategy, plans: Iterable[PlannedMapping]) -> list[PlannedMapping]:
        return [replace(plan, attention=strategy) for plan in plans]

    def _planner_of(self, plan: PlannedMapping) -> Planner:
        assert plan.attention is not None
        return self.planners[plan.attention]
