"""Search for samples of documents: finds the best mappings under each way to share attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from moefold.config.base.part import make_part
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.groups.context import ContextPart
from moefold.planner.search.constraints import Fold
from moefold.planner.search.search import PlannedMapping, Search, SearchTarget


def candidate_strategies(own: ContextPart) -> list[ContextPart]:
    """Return the recipe's own strategy, and then the variants of it and of the other built-in kinds."""
    others = (make_part(own.group, kind) for kind in built_in_kinds(own.group) if kind != own.kind)
    return list(dict.fromkeys([own, *chain.from_iterable(part.variants() for part in (own, *others))]))


class DocumentSearch:
    """Search that chooses context, placement and the ranks that compute attention for each fold.

    Args:
        searches: the search under each strategy, the recipe's own first. Strategies that the runtime refuses are left
            out.
    """

    def __init__(self, searches: Mapping[ContextPart, Search]) -> None:
        self.searches = searches

    @cached_property
    def joint_searches(self) -> list[Search]:
        """A search for the strategies with equal lower bounds and an equal space: with planned attention, or without.

        Planned attention takes least, so its searches are first, and the others end early.
        """
        groups: list[list[Search]] = []
        for strategy, search in sorted(self.searches.items(), key=lambda item: not item[0].is_planned):
            equal = (own for own in groups if strategy.is_planned and _pairs_of(own[0]) == _pairs_of(search))
            group = next(equal, None)
            if group is None:
                groups.append([search])
            else:
                group.append(search)
        return [Search(own[0].cost_model, own[0].memory, variants=own) for own in groups]

    def find(self, targets: Sequence[SearchTarget]) -> list[list[PlannedMapping]]:
        """Find as `Search.find` does, but look only for mappings that may beat the best so far."""
        best: list[list[PlannedMapping]] = [[] for _ in targets]
        for search in self.joint_searches:
            found = search.find(list(map(_limited, targets, best)))
            best = [
                self._best_of_folds([*before, *own])[: target.count]
                for target, before, own in zip(targets, best, found, strict=True)
            ]
        return best

    def plans_below(self, limit_s: float, *target: Any, is_beam: bool = False) -> list[PlannedMapping]:
        """See `Search.plans_below`."""
        found = (search.plans_below(limit_s, *target, is_beam=is_beam) for search in self.joint_searches)
        return self._best_of_folds(list(chain.from_iterable(found)))

    def folds_below(self, limit_s: float) -> set[Fold]:
        """See `Search.folds_below`."""
        return set().union(*(search.folds_below(limit_s) for search in self.joint_searches))

    def smallest_plan(self) -> PlannedMapping:
        """See `Search.smallest_plan`."""
        return min((one.smallest_plan() for one in self.searches.values()), key=lambda plan: plan.memory.total)

    @property
    def gap(self) -> float:
        """See `Search.gap`."""
        return max((search.gap for search in self.joint_searches), default=0.0)

    def _best_of_folds(self, plans: Sequence[PlannedMapping]) -> list[PlannedMapping]:
        """Return the best plan of each fold, best first, and of equal ones the one whose strategy is first."""
        order: list[ContextPart | None] = [*self.searches]
        best: dict[Fold, PlannedMapping] = {}
        for plan in sorted(plans, key=lambda plan: (plan.sort_key, order.index(plan.attention))):
            best.setdefault(plan.fold, plan)
        return list(best.values())


def _pairs_of(search: Search) -> list[object]:
    """Return what two searches must have in common to share their lower bounds: folds, sizes and dispatchers."""
    space = search.space
    views = [(view.tp, view.cp, view.dp, view.pp, view.pipelines_by_mbs, space.folds_of(view)) for view in space.views]
    return [*space.searched_dispatchers, *search.memory.placements, *views]


def _limited(target: SearchTarget, best: Sequence[PlannedMapping]) -> SearchTarget:
    """Return a target without the mappings that take longer than its best ones so far, with rounding."""
    is_found = len(best) >= target.count
    return replace(target, limit_s=best[target.count - 1].time.total_s * (1 + 1e-9)) if is_found else target
