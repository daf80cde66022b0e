"""Planner for samples of documents: prices every fold under each way to share attention. Torch-free."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from math import inf

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.planner.cost_model.step import CostModel
from moefold.planner.lengths.balance import DocumentLoads
from moefold.planner.lengths.strategy import AttentionStrategy
from moefold.planner.mapping import ParallelMapping
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.search.search import PlannedMapping

TIE_TOLERANCE = 1e-9
"""Relative difference of the seconds of two mappings that are equally fast; sums in another order differ by less."""


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
        make_planner: builds the planner of one strategy.
    """

    def __init__(self, request: PlanRequest, make_planner: Callable[[PlanRequest], Planner] = Planner) -> None:
        super().__init__(request)
        self._make_planner = make_planner

    @cached_property
    def planners(self) -> dict[AttentionStrategy, Planner]:
        """Planners by strategy, the recipe's own first; strategies that the runtime refuses are left out."""
        found = {}
        for strategy in candidate_strategies(self._loads.strategy):
            try:
                planner = self._make_planner(self._request_with(strategy))
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
        return _best_by_fold(chain.from_iterable(self._marked(s, p.plans) for s, p in self.planners.items()))

    def top_plans(self, count: int) -> list[PlannedMapping]:
        """See base class."""
        if not self.space.folds:
            return super().top_plans(count)
        if count > self._num_requested:
            self._num_requested = count
            self._top_plans = self._search_all(count)[:count]
        return self._top_plans[:count] or self.plans[:count]

    def num_faster(self, seconds: float) -> int:
        """See base class."""
        return sum(plan.time.total_s < seconds for plan in self._search_all(limit_s=seconds))

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
        return DocumentPlanner(self.request.with_num_gpus(num_gpus), self._make_planner)

    def _search_all(self, count: int | None = None, limit_s: float = inf) -> list[PlannedMapping]:
        """Search under all strategies at once, always the one that may have the fastest mapping next.

        So a mapping is priced under a strategy only if it may be one of those that are returned.

        Args:
            count: folds to find; None: all below the limit.
            limit_s: seconds of a step that no mapping to find exceeds.

        Returns:
            The best plans that fit, of different folds, best first: at least `count` if there are as many.
        """
        searches = [planner.steps() for planner in self.planners.values()]
        queue = [(0.0, i) for i in range(len(searches))]
        found: list[list[ParallelMapping]] = [[] for _ in searches]
        seconds_of_fold: dict[tuple[int, ...], float] = {}
        while queue:
            bound, i = heappop(queue)
            if bound > limit_s * (1 + TIE_TOLERANCE):
                break
            step = next(searches[i], None)
            if step is None:
                continue
            seconds, mapping = step
            heappush(queue, (max(bound, seconds), i))
            if mapping is None:
                continue
            found[i].append(mapping)
            seconds_of_fold.setdefault(_fold_of(mapping), seconds)
            if count is not None and len(seconds_of_fold) >= count:
                # Mappings that take equally long are found too, so that the recipe's own strategy wins ties.
                limit_s = min(limit_s, sorted(seconds_of_fold.values())[count - 1])
        plans = [
            replace(planner.price(mapping), attention=strategy)
            for (strategy, planner), mappings in zip(self.planners.items(), found, strict=True)
            for mapping in mappings
        ]
        return _best_by_fold(plans)

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


def _best_by_fold(plans: Iterable[PlannedMapping]) -> list[PlannedMapping]:
    """Return the best plan of each fold, best first; of equal ones the first."""
    best: dict[tuple[int, ...], PlannedMapping] = {}
    for plan in plans:
        fold = _fold_of(plan.mapping)
        if fold not in best or plan.sort_key < best[fold].sort_key:
            best[fold] = plan
    return sorted(best.values(), key=lambda plan: plan.sort_key)


def _fold_of(m: ParallelMapping) -> tuple[int, ...]:
    return m.tp, m.cp, m.dp, m.pp, m.ep, m.etp, m.edp
