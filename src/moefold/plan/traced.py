"""Planning under the routing of a real run: every ep is priced with the load that it would have had."""

from dataclasses import replace
from functools import cached_property

from moefold.plan.planner import Planner, PlanRequest
from moefold.plan.restriction import Restriction
from moefold.plan.routing_load import RecordedRouting
from moefold.plan.search import PlannedMapping
from moefold.plan.step_time import CostModel


class TracedPlanner(Planner):
    """Answers a question under recorded routing.

    Args:
        request: the question; its imbalance is replaced by what was recorded.
        routing: the recorded routing.
    """

    def __init__(self, request: PlanRequest, routing: RecordedRouting) -> None:
        super().__init__(request)
        self.routing = routing

    @cached_property
    def plans(self) -> list[PlannedMapping]:
        """As of the planner; every fold with the imbalance of its ep."""
        if not self.space.folds:
            return super().plans
        q = self.request
        found: list[PlannedMapping] = []
        for ep in sorted({fold.ep for fold, _ in self.space.folds}):
            found += Planner(self.request_for_ep(ep, q.restriction)).plans
        return sorted(found, key=lambda plan: plan.sort_key)

    def top_plans(self, count: int) -> list[PlannedMapping]:
        """As of the planner."""
        return self.plans[:count]

    def num_faster(self, seconds: float) -> int:
        """As of the planner."""
        return sum(plan.memory.fits and plan.time.total_s < seconds for plan in self.plans)

    def cost_model_for(self, plan: PlannedMapping) -> CostModel:
        """As of the planner; that of the plan's ep."""
        return Planner(self.request_for_ep(plan.mapping.ep, self.request.restriction)).search.cost_model

    def with_num_gpus(self, num_gpus: int) -> "TracedPlanner":
        """As of the planner, under the same routing."""
        return TracedPlanner(self.request.with_num_gpus(num_gpus), self.routing)

    def request_for_ep(self, ep: int, restriction: Restriction) -> PlanRequest:
        """The question for one ep."""
        workload = replace(self.request.workload, imbalance=max(1.0, self.routing.imbalance(ep)))
        fixed = replace(restriction, fixed={**restriction.fixed, "ep": ep})
        return replace(self.request, workload=workload, restriction=fixed)
