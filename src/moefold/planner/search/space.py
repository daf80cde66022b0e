"""Space of all legal mappings of a recipe over a number of ranks, level by level.

A mapping is a fold (tp cp pp ep etp, which give dp and edp), a micro-batch size, a schedule with its virtual stages, a
dispatcher and overlap of the expert all-to-all. It also has a ZeRO stage, the placement of the optimizer's moments, and
the parts to recompute or offload. The runtime's rules on each level read that level and those above it, so the legal
mappings are the sum over folds and micro-batch sizes of products of short lists. Counting and search use this
structure. Where no mapping is legal, `explain_illegal` and its helpers name the runtime's error for the nearest legal
mapping.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from math import prod
from typing import Any

from moefold.config.base.part import Part, kind_or_part
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.chosen import part_of_kind
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.keys.paths import choices_of
from moefold.config.schema import Config
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.recompute_parts import COMMON_PARTS, recompute_parts
from moefold.errors import ConfigError
from moefold.planner.mapping import PipelineVariant
from moefold.planner.memory.activations import MemoryStrategies, MemoryStrategy
from moefold.planner.search.constraints import (
    AXIS_KEYS,
    FOLD_DEGREES,
    FOLDED,
    METHODS,
    Fold,
    MappingConstraints,
    Restriction,
)
from moefold.topology.layout import divisors
from moefold.topology.pipeline_layout import LayoutSyntaxError, expand_layout
from moefold.topology.schedules import DEFAULT_SCHEDULE, schedule_named
from moefold.validate.config import check_config

HOST = "host"
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Virtual stages that are searched unless they are fixed: numbers between them differ little in time and memory."""
MAX_LISTED_SIZES = 6
"""With up to this many micro-batch sizes all are searched, else the powers of two and the largest one."""
NON_LAYER_STAGE_PARTS = ("E", "L")
"""Parts other than layers that may be a stage in a balanced layout."""


def _complexity(schedule: str | Part) -> tuple[bool, int, int]:
    """Return the order of trying schedules. The first is chosen of those that take equally long."""
    part = schedule_named(schedule)
    return part.splits_backward, part.virtual_stage_bounds[0], part.min_micro_batches_per_rank


@dataclass(frozen=True, eq=False)
class AttentionView:
    """The degrees of attention, with the micro-batch sizes and pipelines that are legal with them.

    A space has one object for each view, which caches are keyed by.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    pipelines_by_mbs: tuple[tuple[int, tuple[PipelineVariant, ...]], ...]
    """Each legal micro-batch size, ascending, with its legal pipelines. There is at least one of each."""


class MappingSpace:
    """The legal mappings of one recipe, by level."""

    def __init__(self, constraints: MappingConstraints, restriction: Restriction | None = None) -> None:
        self.constraints = constraints
        self._cfg = constraints.base_config
        self.restriction = (restriction or Restriction()).with_parts_of(self._cfg.parallel)

    @cached_property
    def views(self) -> tuple[AttentionView, ...]:
        """Every attention view with a legal micro-batch size and schedule."""
        return tuple(self._iterate_views())

    @cached_property
    def folds(self) -> tuple[tuple[Fold, AttentionView], ...]:
        """Every fold with a legal mapping, and its attention view."""
        return tuple((fold, view) for view in self.views for fold in self.folds_of(view))

    @cached_property
    def num_folds(self) -> int:
        """Number of folds with a legal mapping."""
        return sum(len(self.experts_of(view)) for view in self.views)

    def folds_of(self, view: AttentionView) -> tuple[Fold, ...]:
        """Return the folds of an attention view with a legal mapping."""
        return tuple(self.fold_of(view, at) for at in self.experts_of(view))

    def fold_of(self, view: AttentionView, at: int) -> Fold:
        """Return the fold of an attention view with a pair of `expert_degrees`."""
        ep, etp = self.expert_degrees[at]
        return Fold(view.tp, view.cp, view.dp, view.pp, ep, etp, view.tp * view.cp * view.dp // (ep * etp))

    def _experts_key(self, view: AttentionView) -> tuple[int, ...]:
        sizes = (size for size, _ in view.pipelines_by_mbs)
        return (*((view.tp, view.cp) if self._reads_tp_and_cp else (view.tp * view.cp,)), view.dp, view.pp, *sizes)

    @cached_property
    def _reads_tp_and_cp(self) -> bool:
        """True if tp and cp, and not only tp*cp, may decide which degrees of the experts are legal."""
        is_restricted = self.restriction.method != FOLDED or not self.restriction.fixed.keys().isdisjoint(FOLD_DEGREES)
        return is_restricted or self._cfg.is_rl or not self._cfg.parallel.order.startswith("pp")

    @memoised(_experts_key)
    def experts_of(self, view: AttentionView) -> tuple[int, ...]:
        """Return the indices of the `expert_degrees` that have a legal mapping with an attention view."""
        if not self._has_strategy:
            return ()
        stage = view.tp * view.cp * view.dp
        return tuple(
            at
            for at, (ep, etp) in enumerate(self.expert_degrees)
            if stage % (ep * etp) == 0 and self._is_legal(self.fold_of(view, at), view)
        )

    @cached_property
    def _has_strategy(self) -> bool:
        has_memory = next(self._legal_strategies(), None) is not None and bool(self.optimizer_placements)
        return has_memory and bool(self.zero_stages)

    @cached_property
    def zero_stages(self) -> tuple[int, ...]:
        """The legal ZeRO stages without overlap."""
        stages = (zero for zero in choices_of(*AXIS_KEYS["zero"]) if self.restriction.allows("zero", zero))
        return tuple(zero for zero in stages if self.constraints.allows("zero", {"zero": zero}))

    @cached_property
    def recompute_sets(self) -> tuple[tuple[str, ...], ...]:
        """Every legal set of parts to recompute, the empty one first."""
        subsets = chain.from_iterable(combinations(recompute_parts(), n) for n in range(len(recompute_parts()) + 1))
        return tuple(
            parts
            for parts in subsets
            if self.restriction.allows("recompute", parts)
            and self.constraints.allows("recompute", {"recompute": parts})
        )

    @cached_property
    def strategies(self) -> MemoryStrategies:
        """Every legal pair of parts to recompute and parts to offload."""
        return MemoryStrategies(self._legal_strategies())

    def _legal_strategies(self) -> Iterator[MemoryStrategy]:
        subsets = [parts for n in range(len(COMMON_PARTS) + 1) for parts in combinations(COMMON_PARTS, n)]
        return (
            (recompute, offload)
            for recompute in self.recompute_sets
            for offload in subsets
            if (self.searches_offload or not offload)
            and self.restriction.allows("offload", offload)
            and self.constraints.allows("offload", {"recompute": recompute, "offload": offload, "moments": "none"})
        )

    @cached_property
    def optimizer_placements(self) -> tuple[str, ...]:
        """Placements of the optimizer's moments: on the device, or in host memory."""
        placements = ("none", HOST) if self.searches_offload else ("none",)
        return tuple(placement for placement in placements if self.restriction.allows("moments", placement))

    @cached_property
    def has_host_memory(self) -> bool:
        """True if offload to host memory is priced: a CPU has none, and disks have no price."""
        return self._cfg.run.device != "cpu" and self._cfg.train.offload_to == HOST

    @cached_property
    def searches_offload(self) -> bool:
        """True if offload is searched: the restriction, a fixed axis or the recipe asks for offload."""
        train = self._cfg.train
        fixed = self.restriction.fixed
        is_asked = self.restriction.offload or fixed.get("offload") or fixed.get("moments") == HOST
        return self.has_host_memory and bool(is_asked or train.offload or train.offload_optimizer == HOST)

    def legal_zero_stages(
        self, fold: Fold, mbs: int, schedule: str | Part, dispatcher: DispatcherPart, overlap: bool
    ) -> tuple[int, ...]:
        """Return the legal ZeRO stages. There are none if the expert all-to-all cannot overlap as requested."""
        if overlap not in self._allowed_overlaps:
            return ()
        if not overlap:
            return self.zero_stages
        return self._legal_overlapped_zero_stages(fold, mbs, schedule) if self._may_overlap(fold, dispatcher) else ()

    def legal_pipelines(
        self, fold: Fold, mbs: int, pipelines: tuple[PipelineVariant, ...], dispatcher: DispatcherPart, overlap: bool
    ) -> tuple[PipelineVariant, ...]:
        """Return the pipelines that are legal with a dispatcher and overlap."""
        return tuple(p for p in pipelines if self.legal_zero_stages(fold, mbs, p.schedule, dispatcher, overlap))

    @memoised(lambda self, fold, dispatcher: (fold.ep, fold.etp, dispatcher))
    def _may_overlap(self, fold: Fold, dispatcher: DispatcherPart) -> bool:
        """Return whether a dispatcher can overlap its all-to-all."""
        values = {"ep": fold.ep, "etp": fold.etp, "dispatcher": dispatcher, "overlap": True}
        return self.constraints.allows("kernels", values)

    @memoised(lambda self, fold, mbs, schedule: (fold.ep * fold.etp > 1, fold.dp * mbs, schedule))
    def _legal_overlapped_zero_stages(self, fold: Fold, mbs: int, schedule: str | Part) -> tuple[int, ...]:
        values = {**fold.values, "mbs": mbs, "schedule": schedule, "overlap": True}
        return tuple(zero for zero in self.zero_stages if self.constraints.allows("overlap", {**values, "zero": zero}))

    @cached_property
    def _allowed_overlaps(self) -> tuple[bool, ...]:
        return tuple(overlap for overlap in (False, True) if self.restriction.allows("overlap", overlap))

    @cached_property
    def searched_dispatchers(self) -> dict[DispatcherPart, str | Part]:
        """Dispatchers that the restriction allows, the local one first, with their names in a recipe.

        A dispatcher with `is_searched` false is included only if no other is allowed.

        A kind of another package is loaded only if the recipe or the restriction names it.
        """
        names = [name for name in built_in_kinds(DispatcherPart.group) if self.restriction.allows("dispatcher", name)]
        named = self.restriction.fixed.get("dispatcher", kind_or_part(self._cfg.parallel.dispatcher))
        values = names if named in names or not self.restriction.allows("dispatcher", named) else [*names, named]
        parts = {
            part_of_kind(self._cfg, DispatcherPart, value) if isinstance(value, str) else value: value
            for value in values
        }
        found = [part for part in parts if not part.resolves_to and (part.is_searched or len(parts) == 1)]
        return {part: parts[part] for part in sorted(found, key=lambda part: part.spreads_experts)}

    @memoised(lambda self, fold, mbs: (fold.ep, fold.etp, mbs / (fold.tp * fold.cp)))
    def dispatchers(self, fold: Fold, mbs: int) -> tuple[DispatcherPart, ...]:
        """Return the legal dispatchers."""
        allows = self.constraints.allows
        plain = {**fold.values, "mbs": mbs, "overlap": False}
        tried = ((part, {**plain, "dispatcher": part}) for part in self.searched_dispatchers)
        return tuple(part for part, values in tried if allows("kernels", values) and allows("dispatcher", values))

    def count(self) -> int:
        """Return the number of legal mappings."""
        return sum(self.count_by_fold())

    def count_by_fold(self) -> list[int]:
        """Return the number of legal mappings of each fold."""
        each = len(self.strategies) * len(self.optimizer_placements)
        return [each * self._count_runs(fold, view) for fold, view in self.folds]

    # Rules that read several levels read only tp*cp and dp of the attention degrees.
    @memoised(lambda self, f, view: (f.ep, f.etp, f.dp, f.tp * f.cp, *(size for size, _ in view.pipelines_by_mbs)))
    def _count_runs(self, fold: Fold, view: AttentionView) -> int:
        """Return the number of mappings of a fold without a memory strategy."""
        total = 0
        for size, pipelines in view.pipelines_by_mbs:
            schedules = Counter(pipeline.schedule for pipeline in pipelines).items()
            for dispatcher, overlap in product(self.dispatchers(fold, size), self._allowed_overlaps):
                for schedule, number in schedules:
                    total += number * len(self.legal_zero_stages(fold, size, schedule, dispatcher, overlap))
        return total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every legal mapping as the values of its axes, for small worlds."""
        for fold, view in self.folds:
            for run, zeros in self._iterate_runs(fold, view):
                for zero, moments, strategy in product(zeros, self.optimizer_placements, self.strategies):
                    yield {**run, "zero": zero, "recompute": strategy[0], "offload": strategy[1], "moments": moments}

    def sample_mappings(self, fold: Fold, view: AttentionView) -> Iterator[dict[str, Any]]:
        """Yield a legal mapping of a fold for each schedule with each dispatcher."""
        recompute, offload = next(self._legal_strategies())
        rest = {"recompute": recompute, "offload": offload, "moments": self.optimizer_placements[0]}
        known = set()
        for run, zeros in self._iterate_runs(fold, view):
            key = run["schedule"], run["dispatcher"]
            if zeros and key not in known:
                known.add(key)
                yield {**run, "zero": zeros[0], **rest}

    def _iterate_runs(self, fold: Fold, view: AttentionView) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """Yield every micro-batch size, pipeline, dispatcher and overlap of a fold, with the legal ZeRO stages."""
        for size, pipelines in view.pipelines_by_mbs:
            for pipeline, dispatcher, overlap in product(pipelines, self.dispatchers(fold, size), (False, True)):
                run = {
                    **fold.values,
                    "mbs": size,
                    "schedule": pipeline.schedule,
                    "vpp": pipeline.vpp,
                    "dispatcher": self.searched_dispatchers[dispatcher],
                    "overlap": overlap,
                }
                yield run, self.legal_zero_stages(fold, size, pipeline.schedule, dispatcher, overlap)

    def _is_legal(self, fold: Fold, view: AttentionView) -> bool:
        """Return whether a fold is legal under some dispatcher and overlap."""
        if not (self.restriction.allows_fold(fold) and self.constraints.can_fold(fold.values)):
            return False
        return any(
            self.legal_zero_stages(fold, size, schedule, dispatcher, overlap)
            for size, pipelines in view.pipelines_by_mbs
            for dispatcher in self.dispatchers(fold, size)
            for overlap in self._allowed_overlaps
            for schedule in dict.fromkeys(pipeline.schedule for pipeline in pipelines)
        )

    def _iterate_views(self) -> Iterator[AttentionView]:
        """Yield the attention views. Each axis is checked by its own rules before it is combined."""
        world = self._cfg.parallel.world_size
        for pp in divisors(world):
            for tp in divisors(world // pp):
                if not self.constraints.allows("tp", {"tp": tp}):
                    continue
                for cp in divisors(world // (pp * tp)):
                    values = {"tp": tp, "cp": cp, "pp": pp}
                    if not self.constraints.allows("cp", values):
                        continue
                    batches = tuple(self._legal_micro_batches(values))
                    if batches:
                        yield AttentionView(tp, cp, world // (pp * tp * cp), pp, batches)

    @cached_property
    def expert_degrees(self) -> tuple[tuple[int, int], ...]:
        """Every legal pair of ep and etp."""
        world = self._cfg.parallel.world_size
        return tuple(
            (ep, etp)
            for ep in divisors(world)
            for etp in divisors(world // ep)
            if self.constraints.allows("experts", {"ep": ep, "etp": etp})
        )

    def _legal_micro_batches(self, values: dict[str, int]) -> Iterator[tuple[int, tuple[PipelineVariant, ...]]]:
        """Yield the legal micro-batch sizes, divisors of a replica's samples, with their pipelines."""
        dp = self._cfg.parallel.world_size // prod(values.values())
        samples, rest = divmod(self._cfg.train.global_batch_size, dp)
        for size in self._listed_sizes(samples) if not rest and samples else ():
            tried = {**values, "mbs": size}
            if not self.restriction.allows("mbs", size) or not self.constraints.allows("batch", tried):
                continue
            if pipelines := self._legal_pipelines(tried):
                yield size, pipelines

    def _listed_sizes(self, samples: int) -> list[int]:
        """Return the micro-batch sizes to search, divisors of a replica's samples."""
        sizes = list(divisors(samples))
        if "mbs" in self.restriction.fixed or len(sizes) <= MAX_LISTED_SIZES:
            return sizes
        return [size for size in sizes if size & (size - 1) == 0 or size == samples]

    @memoised(lambda self, values: (values["tp"] * values["cp"], values["pp"], values["mbs"]))
    def _legal_pipelines(self, values: dict[str, Any]) -> tuple[PipelineVariant, ...]:
        allows = self.constraints.allows
        return tuple(
            pipeline
            for schedule, pipelines in self._pipeline_variants(values["pp"]).items()
            if allows("pipeline", {**values, "schedule": schedule})
            for pipeline in pipelines
        )

    @memoised(all_arguments)
    def _pipeline_variants(self, pp: int) -> dict[str | Part, list[PipelineVariant]]:
        """Return the virtual stages of each schedule, whatever the batch."""
        return {
            schedule: [
                PipelineVariant(schedule, chunks)
                for chunks in self._listed_virtual_stages
                if chunks * pp <= self._max_stages
                and self.constraints.allows("stages", {"pp": pp, "schedule": schedule, "vpp": chunks})
            ]
            for schedule in self._schedules()
            if not schedule_named(schedule).is_for_one_mapping
        }

    @cached_property
    def _listed_virtual_stages(self) -> tuple[int, ...]:
        """Virtual stages to search: the fixed ones, the count of the recipe's own stages, or `VIRTUAL_STAGES`."""
        if "vpp" in self.restriction.fixed:
            return (self.restriction.fixed["vpp"],)
        has_own_stages = self._cfg.parallel.pipeline_layout not in ("", "auto")
        return tuple(range(1, self._max_stages + 1)) if has_own_stages else VIRTUAL_STAGES

    @cached_property
    def _max_stages(self) -> int:
        """Maximum number of stages of a layout: each has a layer, the embedding or the loss, or is written out."""
        text = self._cfg.parallel.pipeline_layout
        layers = self._cfg.model.num_layers
        if text in ("", "auto"):
            return layers + len(NON_LAYER_STAGE_PARTS)
        try:
            return 1 + sum(part.kind == "|" for part in expand_layout(text))
        except LayoutSyntaxError:
            return layers

    def _schedules(self) -> list[str | Part]:
        """Return the schedules to try, simplest first: built-in ones, and the recipe's, which may be of a package."""
        asked = self.restriction.fixed.get("schedule", kind_or_part(self._cfg.parallel.schedule))
        named = dict.fromkeys((*choices_of("parallel", "schedule"), asked))
        return sorted((value for value in named if self.restriction.allows("schedule", value)), key=_complexity)


MAX_SAMPLED_FOLDS = 8
"""Number of folds that a fixed value is tried on, evenly spaced over the folds that are legal without it."""


def explain_illegal(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Explain in one line why a part of the space is empty.

    A mapping that is legal without one of the fixed axes is given that axis's value. The runtime's error is the reason.
    If no single axis is the cause, the fixed axes are tried with few other degrees.
    """
    return (
        _unsearchable_reason(MappingSpace(constraints, restriction), restriction)
        or _sampling_reason(constraints, restriction)
        or _single_axis_reason(constraints, restriction)
        or _fixed_axes_reason(constraints, restriction)
        or _derived_degree_reason(constraints, restriction)
        or f"no such mapping is of method {restriction.method!r}, or it needs other axes than those given"
    )


def _unsearchable_reason(space: MappingSpace, restriction: Restriction) -> str:
    """Return why the search prices no such mapping, although the runtime may allow it."""
    fixed = restriction.fixed
    method = METHODS[restriction.method]
    zero = fixed.get("zero", method.zero)
    if method.zero not in (None, zero):
        return f"zero={zero} is not of method {restriction.method!r}, which has zero={method.zero}"
    if not space.has_host_memory and (fixed.get("offload") or fixed.get("moments") == HOST):
        axis = "offload" if fixed.get("offload") else "moments"
        value = "+".join(fixed[axis]) if axis == "offload" else fixed[axis]
        return f"{axis}={value} needs a GPU and train.offload_to='host': no other memory is priced"
    return ""


def _sampling_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return why rollouts cannot be sampled next to a mapping that can train, or "" if none can train."""
    cfg = constraints.base_config
    trains = MappingConstraints(replace(cfg, rl=replace(cfg.rl, group_size=0)))
    return next((constraints.sampling_error(fold.values) for fold, _ in MappingSpace(trains, restriction).folds), "")


def _single_axis_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return the error of mappings that are legal without one fixed value and illegal with it.

    Among several errors, it is the error that names most of the fixed keys, then the most frequent error.
    """
    keys = [AXIS_KEYS[axis] for axis in restriction.fixed if axis in AXIS_KEYS]
    ranked: dict[str, tuple[int, float]] = {}
    for axis, value in restriction.fixed.items():
        if axis not in AXIS_KEYS:
            continue
        space = MappingSpace(constraints, _drop_axis(restriction, axis))
        tried = [
            _validation_errors(constraints.config_with({**values, axis: value}))
            for fold, view in space.folds[:: 1 + len(space.folds) // MAX_SAMPLED_FOLDS]
            for values in space.sample_mappings(fold, view)
        ]
        # If the runtime accepts such a mapping, the restriction excludes it, not a rule.
        refused = tried if all(tried) else []
        for error, count in Counter(error for errors in refused for error in errors).items():
            rank = sum(f"{section}.{key}" in error for section, key in keys), count / len(tried)
            ranked[error] = max(rank, ranked.get(error, rank))
    return max(ranked, key=lambda error: ranked[error], default="")


def _drop_axis(restriction: Restriction, axis: str) -> Restriction:
    return replace(restriction, fixed={name: value for name, value in restriction.fixed.items() if name != axis})


def _fixed_axes_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return the error of only the fixed axes, all other degrees 1, that recurs most often with one more degree."""
    values: dict[str, Any] = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "mbs"), 1)
    values |= {axis: value for axis, value in restriction.fixed.items() if axis in AXIS_KEYS}
    if values.get("vpp", 1) > 1 and "schedule" not in values:
        values["schedule"] = schedule_named(DEFAULT_SCHEDULE).with_other_virtual_stages
    world = constraints.base_config.parallel.world_size
    others = [{**values, axis: world} for axis in ("pp", "tp", "cp") if axis not in restriction.fixed]
    found = Counter(error for degrees in others for error in _validation_errors(constraints.config_with(degrees)))
    return max(_validation_errors(constraints.config_with(values)), key=lambda error: found[error], default="")


def _derived_degree_reason(constraints: MappingConstraints, restriction: Restriction) -> str:
    """Return why a fixed dp or edp contradicts the other degrees."""
    for axis in ("dp", "edp"):
        folds = MappingSpace(constraints, _drop_axis(restriction, axis)).folds if axis in restriction.fixed else ()
        if folds:
            may_be = " or ".join(map(str, sorted({getattr(fold, axis) for fold, _ in folds})))
            return (
                f"{axis}={may_be} follows from the other degrees on {constraints.base_config.parallel.world_size} "
                f"GPUs, not {restriction.fixed[axis]}"
            )
    return ""


def _validation_errors(cfg: Config) -> list[str]:
    """Return the errors of the runtime's checks, with stages that the planner writes where the recipe has none."""
    p = cfg.parallel
    if p.pp > 1 and not p.pipeline_layout:
        cfg = replace(cfg, parallel=replace(p, pipeline_layout="auto"))
    try:
        check_config(cfg)
    except ConfigError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        # Several errors are listed one a line, after a line that counts them.
        return lines[1:] or lines
    return []
