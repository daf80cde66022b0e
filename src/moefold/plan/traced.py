"""Planning under the routing of a real run: every ep is priced with the load that it would have had."""

from dataclasses import replace
from functools import cached_property

from moefold.plan.planner import Planner, Question
from moefold.plan.restriction import Restriction
from moefold.plan.routing_load import RoutingLoad
from moefold.plan.search import Plan
from moefold.plan.step_time import Pricer


class TracedPlanner(Planner):
    """Answers a question under recorded routing.

    Args:
        question: the question; its imbalance is replaced by what was recorded.
        load: the recorded routing.
    """

    def __init__(self, question: Question, load: RoutingLoad) -> None:
        super().__init__(question)
        self.load = load

    @cached_property
    def plans(self) -> list[Plan]:
        """As of the planner; every fold with the imbalance of its ep."""
        if not self.space.folds:
            return super().plans
        q = self.question
        found: list[Plan] = []
        for ep in sorted({fold.ep for fold, _ in self.space.folds}):
            found += Planner(self.question_at(ep, q.restriction)).plans
        return sorted(found, key=lambda plan: plan.order)

    def first(self, count: int) -> list[Plan]:
        """As of the planner."""
        return self.plans[:count]

    def num_faster(self, seconds: float) -> int:
        """As of the planner."""
        return sum(plan.memory.fits and plan.time.total_s < seconds for plan in self.plans)

    def pricer_of(self, plan: Plan) -> Pricer:
        """As of the planner; that of the plan's ep."""
        return Planner(self.question_at(plan.mapping.ep, self.question.restriction)).search.pricer

    def on(self, num_gpus: int) -> "TracedPlanner":
        """As of the planner, under the same routing."""
        return TracedPlanner(self.question.on(num_gpus), self.load)

    def question_at(self, ep: int, restriction: Restriction) -> Question:
        """The question for one ep."""
        workload = replace(self.question.workload, imbalance=max(1.0, self.load.imbalance(ep)))
        fixed = replace(restriction, fixed={**restriction.fixed, "ep": ep})
        return replace(self.question, workload=workload, restriction=fixed)
