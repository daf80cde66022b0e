"""Families of mappings: the best of each, and how far it is from a measured mapping."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log2

from moefold.cost.hardware import BLACKWELL, HOPPER
from moefold.package_table import package_text
from moefold.planner.mapping import OFFLOADED_OPTIMIZER, ParallelMapping
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.search.constraints import COUPLED_WITH_CP, METHODS, Fold
from moefold.planner.search.search import PlannedMapping, SearchTarget
from moefold.topology.layout import DEGREES

NUMBER_AXES = ("seq_len", *DEGREES, "mbs")


FAMILIES = {
    "folded": SearchTarget(zero_stages=(0, 1, 2), title="folded"),
    "coupled": SearchTarget(1, METHODS[COUPLED_WITH_CP].accepts, (0, 1, 2), "ETP = TP"),
    "fsdp": SearchTarget(zero_stages=(3,), title="ZeRO-3 (FSDP)"),
}
"""By the word in `--take`: any folding with ZeRO 0 to 2, its part without folding, and ZeRO-3 with any folding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedError:
    """Error of predicted throughput on rows that a fit did not see, in percent, rounded up from docs/cost-model.md."""

    unseen_mean_pct: int = 10
    """Published rows, each under a fit without its source."""
    unseen_median_pct: int = 5
    new_mean_pct: int = 15
    """The same for rows of August 2025 to August 2026, many by third parties or from untuned recipes."""
    new_median_pct: int = 10
    tie_pct: int = 5
    """Median error of the ratio of two mappings of one case."""
    tie_most_pct: int = 17
    """Error that eight of ten such ratios stay below."""

    def __str__(self) -> str:
        return (
            f"published runs that a fit did not see are missed by {self.unseen_mean_pct} % on average "
            f"({self.unseen_median_pct} % median), new runs of 2026 by {self.new_mean_pct} % ({self.new_median_pct} % "
            f"median), the ratio of two mappings of one case by {self.tie_pct} % (median; 8 of 10 within "
            f"{self.tie_most_pct} %): docs/cost-model.md; treat mappings that differ by less than {self.tie_pct} % as "
            "equal."
        )


STATED_ERROR = StatedError()


@dataclass(frozen=True)
class NearestMeasurement:
    """The measured mapping that is nearest to a planned one."""

    case: str
    """Model, number of GPUs, GPU and sequence length."""
    source: str
    differences: tuple[str, ...]
    """Axes that differ, such as `ep 8 -> 1`."""


@dataclass(frozen=True)
class FamilyBest:
    """The best mapping of a family."""

    name: str
    """The family's word in `--take`."""
    plan: PlannedMapping
    nearest: NearestMeasurement
    is_tie: bool
    """True if the step of the family is within the error of the fastest family's."""
    fastest: PlannedMapping
    """The family's fastest mapping: the plan itself, or a mapping farther from any measurement."""

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Return the settings of the mapping without a published measurement."""
        m = self.plan.mapping
        found = ["ZeRO-3 with ep 1"] if m.zero == 3 and m.ep == m.etp == 1 and m.world_size > 1 else []
        return (*found, *(["offload"] if m.offload else []))

    def sort_key(self) -> tuple[int, int, float]:
        """Return the sort key: nearest to a measurement first, of equally near ones the fastest."""
        return len(self.unmeasured), len(self.nearest.differences), self.plan.time.total_s


def best_of_families(planner: Planner, count: int = 0) -> list[FamilyBest]:
    """Return the best mapping that fits of every family, in the order of `FAMILIES`.

    The candidates are the fastest mapping, and the mappings with measured degrees that take equally long within the
    error. The best candidate is the nearest to a measurement.

    Args:
        count: the same search finds this many plans for `Planner.top_plans`.
    """
    request = planner.request
    local_rows = [row for row in _measured() if row["model"] == request.model_spec.name]
    degrees = {tuple(int(row[axis]) for axis in DEGREES) for row in local_rows}
    plans = planner.find([*FAMILIES.values()], count)
    least_s = min((own[0].time.total_s for own in plans if own), default=0.0)
    found = []
    for (name, family), own in zip(FAMILIES.items(), plans, strict=True):
        if not own:
            continue
        # If a family is within the error of the fastest, its mapping must be too.
        limit_s = _tie_limit_s(least_s if own[0].time.total_s <= _tie_limit_s(least_s) else own[0].time.total_s)
        accepts = _accepts_both(family.accepts, degrees)
        measured = planner.search.plans_below(limit_s, family.zero_stages, accepts, is_beam=True)
        candidates = []
        for plan in (own[0], *measured):
            is_tie = plan.time.total_s <= _tie_limit_s(least_s)
            candidates.append(FamilyBest(name, plan, nearest_measured(request, plan.mapping), is_tie, own[0]))
        found.append(min(candidates, key=FamilyBest.sort_key))
    return found


def _tie_limit_s(seconds: float) -> float:
    """Return the longest step time that equals this one within the error of the planner."""
    return seconds * (1 + STATED_ERROR.tie_pct / 100)


def _accepts_both(accepts: Callable[[Fold], bool], degrees: set[tuple[int, ...]]) -> Callable[[Fold], bool]:
    return lambda fold: (fold.tp, fold.cp, fold.pp, fold.ep, fold.etp) in degrees and accepts(fold)


def choose_family(families: list[FamilyBest], name: str | None = None) -> FamilyBest | None:
    """Return the family of a name, or without a name the family within the error that is nearest to a measurement."""
    named = [one for one in families if (one.is_tie if name is None else one.name == name)]
    return min(named, key=FamilyBest.sort_key, default=None)


def nearest_measured(request: PlanRequest, mapping: ParallelMapping) -> NearestMeasurement:
    """Return the published mapping, of the same model if any, with the fewest axes between it and a planned one.

    Among several, it is the mapping with the fewest doublings.
    """
    own = measured_axes(mapping, request.device.name, request.model_spec.name, request.workload.seq_len)
    ranked = ((list(_differences(row, own)), row) for row in _measured())
    differences, row = min(
        ranked,
        key=lambda entry: (entry[1]["model"] != own["model"], len(entry[0]), sum(steps for _, steps in entry[0])),
    )
    case = f"{row['model']} on {row['num_gpus']} {row['gpu']}, {row['seq_len']} tokens"
    return NearestMeasurement(case, row["source"], tuple(text for text, _ in differences))


def measured_axes(mapping: ParallelMapping, gpu: str, model: str, seq_len: int) -> dict[str, object]:
    """Return the axes that a planned and a measured mapping are compared by."""
    m = mapping
    recompute = "none"
    if m.recompute:
        recompute = "full" if {"layer", "moe"} & set(m.recompute) else "selective"
    return {
        "model": model,
        "gpu": gpu,
        "seq_len": seq_len,
        **{axis: getattr(m, axis) for axis in NUMBER_AXES if axis != "seq_len"},
        "zero": m.zero,
        "recompute": recompute,
        "offload": any(part != OFFLOADED_OPTIMIZER for part in m.offload),
    }


def _differences(row: Mapping[str, str], own: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the axes that differ, with the doublings between the values, or 2 for values that are not numbers."""
    for axis, value in own.items():
        before = row[axis]
        if axis == "gpu" and _generation(before) == _generation(str(value)):
            continue
        if axis == "zero" and (before == "3") == (value == 3):
            # ZeRO 0 to 2 reduce the same gradients; 3 gathers weights in both passes.
            continue
        if before != str(value):
            steps = abs(log2(float(str(value)) / float(before))) if axis in NUMBER_AXES else 2.0
            yield f"{'ZeRO' if axis == 'zero' else axis} {before} -> {value}", steps


def _generation(gpu: str) -> str:
    return "Hopper" if gpu in HOPPER else "Blackwell" if gpu in BLACKWELL else gpu


@lru_cache(maxsize=1)
def _measured() -> list[dict[str, str]]:
    text = package_text("planner/measured.csv")
    return list(csv.DictReader(io.StringIO(text)))
