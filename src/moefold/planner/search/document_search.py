"""Search for samples of documents: finds the best mappings under each way to share attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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

    def __init__(self, searches: Mapping[ContextPart | None, Search]) -> None:
        self.searches = searches

    def find(self, targets: Sequence[SearchTarget]) -> list[list[PlannedMapping]]:
        """See `Search.find`; a search looks only for mappings that may beat the best so far."""
        found: dict[ContextPart | None, list[list[PlannedMapping]]] = {}
        best: list[list[PlannedMapping]] = [[] for _ in targets]
        # Planned attention takes least, so that the other searches end early.
        for strategy in sorted(self.searches, key=lambda one: one is None or not one.is_planned):
            found[strategy] = self.searches[strategy].find(list(map(_limited, targets, best)))
            best = [
                self._best_of_folds([found[one][i] if one in found else [] for one in self.searches])[: target.count]
                for i, target in enumerate(targets)
            ]
        return best

    def plans_below(self, limit_s: float, *target: Any, is_beam: bool = False) -> list[PlannedMapping]:
        """See `Search.plans_below`."""
        found = [search.plans_below(limit_s, *target, is_beam=is_beam) for search in self.searches.values()]
        return self._best_of_folds(found)

    def smallest_plan(self) -> PlannedMapping:
        """See `Search.smallest_plan`."""
        return min((one.smallest_plan() for one in self.searches.values()), key=lambda plan: plan.memory.total)

    @property
    def gap(self) -> float:
        """See `Search.gap`."""
        return max((search.gap for search in self.searches.values()), default=0.0)

    def _best_of_folds(self, found: Sequence[Sequence[PlannedMapping]]) -> list[PlannedMapping]:
        """Return the best plan of each fold over all searches, best first."""
        searches = zip(self.searches, found, strict=True)
        marked = [replace(plan, attention=strategy) for strategy, plans in searches for plan in plans]
        best: dict[Fold, PlannedMapping] = {}
        for plan in sorted(marked, key=lambda plan: plan.sort_key):
            best.setdefault(plan.fold, plan)
        return list(best.values())


def _limited(target: SearchTarget, best: Sequence[PlannedMapping]) -> SearchTarget:
    """Return a target without the mappings that take longer than its best ones so far, with rounding."""
    is_found = len(best) >= target.count
    return replace(target, limit_s=best[target.count - 1].time.total_s * (1 + 1e-9)) if is_found else target
