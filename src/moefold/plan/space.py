"""All legal mappings of a recipe over a number of ranks, level by level. Torch-free.

A mapping is a fold (tp cp pp ep etp, and dp edp that follow), a micro-batch size, a schedule with its virtual stages,
a dispatcher, whether the experts' exchange hides under another micro-batch (overlap), what is sharded over the
data-parallel ranks (zero), where the optimizer's moments live, and what is made again in the backward pass or leaves
memory until then. The
runtime's rules on each level read that level and those above it, so the legal mappings are the sum over folds and
micro-batch sizes of products of short lists. They are counted so, and the search prices them so.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, product
from math import prod
from typing import Any, NamedTuple, get_args

from moefold.config.checks_offload import OFFLOAD_PARTS
from moefold.config.keys import key_types
from moefold.config.pipeline_layout import LayoutSyntaxError, spell_out
from moefold.config.schema import RECOMPUTE_PARTS
from moefold.parallel.layout import divisors
from moefold.plan.kept import Saver, Savers
from moefold.plan.legality import (
    AXES,
    BATCH_RULES,
    CP_RULES,
    DISPATCH_RULES,
    EXCHANGE_RULES,
    EXPERT_RULES,
    OFFLOAD_RULES,
    OVERLAP_RULES,
    PIPELINE_RULES,
    RECOMPUTE_RULES,
    STAGE_RULES,
    TP_RULES,
    Legality,
)
from moefold.plan.restriction import DEGREES, Restriction

FILE_SCHEDULE = "csv"
"""Reads a file that is written for one mapping: legal, but nothing to search."""
ALIAS = "auto"
"""The dispatcher that stands for another one."""
HOST = "host"
UNCUT = ("E", "L")
"""What a balanced layout may give a stage of its own, beside each layer."""


class Fold(NamedTuple):
    """The degrees of both views, in the order of `DEGREES`."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in DEGREES)

    @property
    def values(self) -> dict[str, int]:
        """The degrees that are set; dp and edp follow."""
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep, "etp": self.etp}


class Pipeline(NamedTuple):
    """A schedule with the chunks of each rank."""

    schedule: str
    vpp: int


@dataclass(frozen=True)
class AttentionView:
    """The degrees of attention, with what may run on them whatever the experts' degrees are."""

    tp: int
    cp: int
    dp: int
    pp: int
    batches: tuple[tuple[int, tuple[Pipeline, ...]], ...]
    """Each legal micro-batch size, ascending, with its legal pipelines; neither is empty."""


class MappingSpace:
    """The legal mappings of one recipe, by level.

    Args:
        legality: the runtime's answers for the recipe.
        restriction: the part of the space that is wanted.
    """

    def __init__(self, legality: Legality, restriction: Restriction | None = None) -> None:
        self.legality = legality
        self.restriction = restriction or Restriction()
        self._cfg = legality.base
        self._chunks: dict[int, dict[str, list[Pipeline]]] = {}
        self._pipelines: dict[tuple[int, ...], tuple[Pipeline, ...]] = {}
        self._dispatchers: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._hiding: dict[tuple[int | str, ...], bool] = {}
        self._overlapped: dict[tuple[int | str, ...], tuple[int, ...]] = {}

    @cached_property
    def views(self) -> tuple[AttentionView, ...]:
        """Every way to map attention that some micro-batch size and schedule goes with."""
        return tuple(self._attention_views())

    @cached_property
    def folds(self) -> tuple[tuple[Fold, AttentionView], ...]:
        """Every fold that a legal mapping has, with the view of attention that it shares."""
        if next(self._legal_savers(), None) is None or not self.moment_homes:
            return ()
        return tuple((fold, view) for fold, view in self._foldings() if self._has_mapping(fold, view))

    @cached_property
    def zeros(self) -> tuple[int, ...]:
        """What is sharded over the data-parallel ranks; no rule reads it."""
        return tuple(self._choices("zero"))

    @cached_property
    def recomputes(self) -> tuple[tuple[str, ...], ...]:
        """Every set of parts that may be made again, the empty one first."""
        subsets = chain.from_iterable(combinations(RECOMPUTE_PARTS, n) for n in range(len(RECOMPUTE_PARTS) + 1))
        return tuple(
            parts
            for parts in subsets
            if self.restriction.wants("recompute", parts)
            and self.legality.allows(RECOMPUTE_RULES, {"recompute": parts})
        )

    @cached_property
    def savers(self) -> Savers:
        """Every set of parts that may be made again with every set whose activations may leave memory with it."""
        return Savers(self._legal_savers())

    def _legal_savers(self) -> Iterator[Saver]:
        subsets = [parts for n in range(len(OFFLOAD_PARTS) + 1) for parts in combinations(OFFLOAD_PARTS, n)]
        return (
            (recompute, offload)
            for recompute in self.recomputes
            for offload in subsets
            if (self.has_host or not offload)
            and self.restriction.wants("offload", offload)
            and self.legality.allows(OFFLOAD_RULES, {"recompute": recompute, "offload": offload, "moments": "none"})
        )

    @cached_property
    def moment_homes(self) -> tuple[str, ...]:
        """Where the moments of the optimizer may live: with the weights, or in memory of the host."""
        homes = ("none", HOST) if self.has_host else ("none",)
        return tuple(home for home in homes if self.restriction.wants("moments", home))

    @cached_property
    def has_host(self) -> bool:
        """Whether there is another memory that is priced: a CPU has none, and disks have no price."""
        return self._cfg.run.device != "cpu" and self._cfg.train.offload_to == HOST

    def zeros_of(self, fold: Fold, size: int, schedule: str, dispatcher: str, overlap: bool) -> tuple[int, ...]:
        """What may be sharded; empty where the experts' exchange cannot hide under another micro-batch as asked."""
        if overlap not in self._overlaps:
            return ()
        if not overlap:
            return self.zeros
        return self._overlapped_zeros(fold, size, schedule) if self._may_overlap(fold, dispatcher) else ()

    def _may_overlap(self, fold: Fold, dispatcher: str) -> bool:
        """Whether a dispatcher can hide its exchange."""
        key = (fold.ep, fold.etp, dispatcher)
        if key not in self._hiding:
            values = {"ep": fold.ep, "etp": fold.etp, "dispatcher": dispatcher, "overlap": True}
            self._hiding[key] = self.legality.allows(EXCHANGE_RULES, values)
        return self._hiding[key]

    def _overlapped_zeros(self, fold: Fold, size: int, schedule: str) -> tuple[int, ...]:
        key = (fold.ep * fold.etp > 1, fold.dp * size, schedule)
        if key not in self._overlapped:
            values = {**fold.values, "mbs": size, "schedule": schedule, "overlap": True}
            self._overlapped[key] = tuple(
                zero for zero in self.zeros if self.legality.allows(OVERLAP_RULES, {**values, "zero": zero})
            )
        return self._overlapped[key]

    @cached_property
    def _overlaps(self) -> tuple[bool, ...]:
        return tuple(overlap for overlap in (False, True) if self.restriction.wants("overlap", overlap))

    def dispatchers(self, fold: Fold, size: int) -> tuple[str, ...]:
        """The legal ways of tokens to their experts."""
        key = (fold.ep, fold.etp, fold.tp * fold.cp, size)
        if key not in self._dispatchers:
            values = {**fold.values, "mbs": size, "overlap": False}
            self._dispatchers[key] = tuple(
                name
                for name in self._choices("dispatcher")
                if name != ALIAS and self.legality.allows(DISPATCH_RULES, {**values, "dispatcher": name})
            )
        return self._dispatchers[key]

    def count(self) -> int:
        """How many legal mappings there are."""
        return sum(self.count_by_fold())

    def count_by_fold(self) -> list[int]:
        """How many legal mappings each of `folds` has."""
        counts, known = [], {}
        for fold, view in self.folds:
            # Of the degrees of attention, rules between levels read tp*cp and dp alone.
            key = (fold.ep, fold.etp, fold.dp, fold.tp * fold.cp, tuple(size for size, _ in view.batches))
            if key not in known:
                known[key] = self._count_of(fold, view) * len(self.moment_homes)
            counts.append(known[key])
        return counts

    def _count_of(self, fold: Fold, view: AttentionView) -> int:
        plain = len(self.zeros) if False in self._overlaps else 0
        total = 0
        for size, pipelines in view.batches:
            dispatchers = self.dispatchers(fold, size)
            total += len(pipelines) * len(dispatchers) * plain
            hiding = sum(self._may_overlap(fold, name) for name in dispatchers) if True in self._overlaps else 0
            for schedule, number in Counter(pipeline.schedule for pipeline in pipelines).items() if hiding else ():
                total += hiding * number * len(self._overlapped_zeros(fold, size, schedule))
        return total * len(self.savers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every legal mapping by itself, as the values of its axes; of use for small worlds."""
        for fold, view in self.folds:
            for run, zeros in self._runs_of(fold, view):
                for zero, moments, saver in product(zeros, self.moment_homes, self.savers):
                    yield {**run, "zero": zero, "recompute": saver[0], "offload": saver[1], "moments": moments}

    def samples_of(self, fold: Fold, view: AttentionView) -> Iterator[dict[str, Any]]:
        """A legal mapping of a fold for each schedule with each dispatcher."""
        recompute, offload = next(self._legal_savers())
        rest = {"recompute": recompute, "offload": offload, "moments": self.moment_homes[0]}
        known = set()
        for run, zeros in self._runs_of(fold, view):
            key = run["schedule"], run["dispatcher"]
            if zeros and key not in known:
                known.add(key)
                yield {**run, "zero": zeros[0], **rest}

    def _runs_of(self, fold: Fold, view: AttentionView) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """Every micro-batch size, pipeline, dispatcher and overlap of a fold, and what may be sharded with them."""
        for size, pipelines in view.batches:
            for pipeline, dispatcher, overlap in product(pipelines, self.dispatchers(fold, size), (False, True)):
                run = {
                    **fold.values,
                    "mbs": size,
                    "schedule": pipeline.schedule,
                    "vpp": pipeline.vpp,
                    "dispatcher": dispatcher,
                    "overlap": overlap,
                }
                yield run, self.zeros_of(fold, size, pipeline.schedule, dispatcher, overlap)

    def _has_mapping(self, fold: Fold, view: AttentionView) -> bool:
        """Whether what the two views allow by themselves goes together under some dispatcher and overlap."""
        return any(
            self.zeros_of(fold, size, schedule, dispatcher, overlap)
            for size, pipelines in view.batches
            for dispatcher in self.dispatchers(fold, size)
            for overlap in self._overlaps
            for schedule in dict.fromkeys(pipeline.schedule for pipeline in pipelines)
        )

    def _attention_views(self) -> Iterator[AttentionView]:
        """Every axis is tried on its own rules before it is combined."""
        world = self._cfg.parallel.world_size
        for pp in divisors(world):
            for tp in divisors(world // pp):
                if not self.legality.allows(TP_RULES, {"tp": tp}):
                    continue
                for cp in divisors(world // (pp * tp)):
                    values = {"tp": tp, "cp": cp, "pp": pp}
                    if not self.legality.allows(CP_RULES, values):
                        continue
                    batches = tuple(self._batches(values))
                    if batches:
                        yield AttentionView(tp, cp, world // (pp * tp * cp), pp, batches)

    def _foldings(self) -> Iterator[tuple[Fold, AttentionView]]:
        world = self._cfg.parallel.world_size
        experts = [
            (ep, etp)
            for ep in divisors(world)
            for etp in divisors(world // ep)
            if self.legality.allows(EXPERT_RULES, {"ep": ep, "etp": etp})
        ]
        for view in self.views:
            stage = world // view.pp
            for ep, etp in experts:
                if stage % (ep * etp):
                    continue
                fold = Fold(view.tp, view.cp, view.dp, view.pp, ep, etp, stage // (ep * etp))
                if self.restriction.wants_fold(fold) and self.legality.folds(fold.values):
                    yield fold, view

    def _batches(self, values: dict[str, int]) -> Iterator[tuple[int, tuple[Pipeline, ...]]]:
        """`batch_faults` refuses all sizes but divisors of the samples of a replica."""
        dp = self._cfg.parallel.world_size // prod(values.values())
        samples, rest = divmod(self._cfg.train.global_batch_size, dp)
        for size in divisors(samples) if not rest and samples else ():
            tried = {**values, "mbs": size}
            if not self.restriction.wants("mbs", size) or not self.legality.allows(BATCH_RULES, tried):
                continue
            key = (dp, values["pp"], size)
            if key not in self._pipelines:
                self._pipelines[key] = tuple(self._legal_pipelines(tried))
            if self._pipelines[key]:
                yield size, self._pipelines[key]

    def _legal_pipelines(self, values: dict[str, Any]) -> Iterator[Pipeline]:
        for schedule, pipelines in self._chunkings(values["pp"]).items():
            if self.legality.allows(PIPELINE_RULES, {**values, "schedule": schedule}):
                yield from pipelines

    def _chunkings(self, pp: int) -> dict[str, list[Pipeline]]:
        """The virtual stages that go with each schedule, whatever the batch."""
        if pp not in self._chunks:
            self._chunks[pp] = {
                schedule: [
                    Pipeline(schedule, chunks)
                    for chunks in range(1, self._most_stages // pp + 1)
                    if self.restriction.wants("vpp", chunks)
                    and self.legality.allows(STAGE_RULES, {"pp": pp, "schedule": schedule, "vpp": chunks})
                ]
                for schedule in self._choices("schedule")
                if schedule != FILE_SCHEDULE
            }
        return self._chunks[pp]

    @cached_property
    def _most_stages(self) -> int:
        """More stages than this no layout has: a stage has a layer, the embedding or the loss, or is spelled out."""
        text, layers = self._cfg.parallel.pipeline_layout, self._cfg.model.num_layers
        if text in ("", "auto"):
            return layers + len(UNCUT)
        try:
            return 1 + sum(part.kind == "|" for part in spell_out(text))
        except LayoutSyntaxError:
            return layers

    def _choices(self, axis: str) -> list[Any]:
        """The wanted values of a key that has a few."""
        section, key = AXES[axis]
        return [value for value in get_args(key_types(section)[key]) if self.restriction.wants(axis, value)]
