"""Planner: answers a plan request with the fastest mappings that fit.

`moefold plan` and `parallel = "auto"` use it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moefold.config.base.part import Part
from moefold.config.base.part_registry import kinds_with
from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.presets import preset_names
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.tables.tree import parsed_value
from moefold.cost.hardware import Device, SiteLink, device_names, load_device
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.memory.budget import MemoryModel
from moefold.planner.model_spec import ModelSpec, load_model_spec
from moefold.planner.search.constraints import AXIS_KEYS, FOLDED, METHODS, MappingConstraints, Restriction
from moefold.planner.search.document_search import DocumentSearch, candidate_strategies
from moefold.planner.search.memory_filter import MemoryFilter
from moefold.planner.search.search import PlannedMapping, Search, SearchTarget
from moefold.planner.search.space import MappingSpace, explain_illegal
from moefold.planner.sites import SitePlan, plan_sites
from moefold.planner.stage_splitter import RecipeStageSplitter
from moefold.recipe import load_config
from moefold.units import GIB

MAX_GPUS = 65536
"""Upper limit of the search for a number of GPUs on which the model fits."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, a batch, and the GPUs to run it on."""

    base_config: Config
    """The recipe. Its mapping gives only world_size and the keys that no search changes (orders, context, layout)."""
    model_spec: ModelSpec
    device: Device
    workload: TrainingWorkload
    restriction: Restriction = Restriction()
    reserve_gib: float = 0.0
    """Memory that a mapping has to leave free on each device, in GiB."""
    site_link: SiteLink | None = None
    """Connection to the other sites, to plan their rounds. None: no rounds are planned."""
    assumed: Mapping[str, int] = field(default_factory=dict)
    """Options that were not given, with the values that stand for them."""

    @property
    def usable_device(self) -> Device:
        """The device with the memory that a mapping may use."""
        return replace(self.device, memory_gib=self.device.memory_gib - self.reserve_gib)

    @property
    def num_gpus(self) -> int:
        """World size."""
        return self.base_config.parallel.world_size

    def with_num_gpus(self, num_gpus: int) -> "PlanRequest":
        """Return the same request for another number of GPUs."""
        return replace(
            self,
            base_config=replace(self.base_config, parallel=replace(self.base_config.parallel, world_size=num_gpus)),
        )


def legal_context(model: ModelConfig, parallel: ParallelConfig) -> str | Part:
    """Return the kind of context parallelism to search with: the recipe's, or a kind that sparse attention allows.

    Without context parallelism `parallel.context` has no effect.
    """
    is_sparse = model.attention.selector is not None and model.has_softmax_attention
    context = chosen_in(parallel, ContextPart)
    is_illegal = is_sparse and not (context.takes_selected_keys or context.is_planned)
    return kinds_with(ContextPart.group, "takes_selected_keys")[0] if is_illegal else parallel.context


class Planner:
    """Searches the legal mappings of one request.

    Raises:
        ConfigError: the recipe cannot run under any mapping.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.space = MappingSpace(MappingConstraints(request.base_config), request.restriction)
        self._num_requested = 0
        self._top_plans: list[PlannedMapping] = []
        """The best `_num_requested` plans found so far."""

    @cached_property
    def search(self) -> Search | DocumentSearch:
        """The search over all legal mappings, for samples of documents under each way to share attention."""
        q = self.request
        loads = q.workload.attention
        if loads is None:
            return self.own_search
        searches: dict[ContextPart, Search] = {}
        for strategy in candidate_strategies(loads.strategy):
            cfg = replace(q.base_config, parallel=replace(q.base_config.parallel, context=strategy))
            workload = replace(q.workload, attention=replace(loads, strategy=strategy))
            try:
                planner = Planner(replace(q, base_config=cfg, workload=workload))
            except ConfigError:
                # The runtime would refuse the recipe with this strategy, whatever the mapping.
                continue
            if planner.space.num_folds:
                searches[strategy] = planner.own_search
        return DocumentSearch(searches)

    @cached_property
    def own_search(self) -> Search:
        """The search under the recipe's own way to share attention."""
        q = self.request
        # With the rank order of the request's mapping method.
        workload = replace(q.workload, is_coupled=not METHODS[q.restriction.method].ep_may_span_cp)
        loads = workload.attention
        split = RecipeStageSplitter(q.base_config, q.model_spec)
        memory = MemoryModel(q.model_spec, workload, q.usable_device, q.base_config, split)
        cost_model = CostModel(q.model_spec, q.device, workload, memory.activation_memory, split)
        return Search(cost_model, MemoryFilter(self.space, memory), loads.strategy if loads else None)

    def search_of(self, plan: PlannedMapping) -> Search:
        """Return the search that found a plan."""
        found = self.search
        if isinstance(found, Search):
            return found
        assert plan.attention is not None, "a search for samples of documents names the strategy of each plan"
        return found.searches[plan.attention]

    @property
    def num_folds(self) -> int:
        """Number of legal folds."""
        return self.space.num_folds

    def top_plans(self, count: int) -> list[PlannedMapping]:
        """Return the first `count` plans that fit, best first, or only the plan of least memory if none fits.

        Raises:
            ConfigError: no mapping is legal.
        """
        if not self.space.num_folds:
            raise ConfigError(self.infeasible_reason())
        if count > self._num_requested:
            self._num_requested = count
            self._top_plans = self.search.find([SearchTarget(count)])[0] or [self.search.smallest_plan()]
        return self._top_plans[:count]

    def find(self, targets: Sequence[SearchTarget], count: int = 0) -> list[list[PlannedMapping]]:
        """Return the best mappings of each target, see `Search.find`.

        Args:
            count: the same search finds this many plans for `top_plans`.
        """
        if count <= self._num_requested:
            return self.search.find(targets)
        *found, top = self.search.find([*targets, SearchTarget(count)])
        if top:
            self._num_requested = count
            self._top_plans = top
        return found

    def best(self) -> PlannedMapping:
        """Return the fastest mapping that fits.

        Raises:
            ConfigError: no mapping is legal, or none fits. The message proposes what to change.
        """
        best = self.top_plans(1)[0]
        if not best.memory.fits:
            raise ConfigError(self.infeasible_reason())
        return best

    def config_for(self, plan: PlannedMapping) -> Config:
        """Return the recipe with a planned mapping. Uneven pipeline stages are balanced."""
        from moefold.planner.export_recipe import config_with_mapping

        return config_with_mapping(self.search_of(plan).space.constraints, plan.mapping)

    @cached_property
    def site_plan(self) -> SitePlan | None:
        """Rounds between sites under the best mapping, or None where the request has no link between sites.

        Raises:
            ConfigError: no mapping is legal, or none fits.
        """
        link = self.request.site_link
        if link is None:
            return None
        best = self.best()
        return plan_sites(self.config_for(best), link, best.time.total_s)

    def infeasible_reason(self) -> str:
        """Return in one line why no mapping is legal, or why none fits, and a way out."""
        return self._nothing_fits_message() if self.space.num_folds else self._nothing_legal_message()

    def _nothing_legal_message(self) -> str:
        q = self.request
        fixed = " ".join(f"{axis}={format_axis_value(value)}" for axis, value in q.restriction.fixed.items())
        within = f" with {fixed}" if fixed else ""
        within += f" of method {q.restriction.method!r}" if q.restriction.method != FOLDED else ""
        text = (
            f"no mapping of {q.num_gpus} GPUs{within} is legal for {q.model_spec.name} with train.seq_len="
            f"{q.workload.seq_len} and train.global_batch_size={q.workload.global_batch_size}: "
            f"{explain_illegal(self.space.constraints, q.restriction)}"
        )
        others = [
            n
            for n in _nearby_gpu_counts(q.num_gpus)
            if MappingSpace(MappingConstraints(q.with_num_gpus(n).base_config), q.restriction).num_folds
        ]
        options = [f"{n} GPUs" for n in others[:3]]
        options += ["fewer fixed axes"] if fixed else []
        return f"{text}; or choose {', or '.join(options or ['another batch or number of GPUs'])}"

    def _nothing_fits_message(self) -> str:
        q = self.request
        smallest = self.search.smallest_plan()
        reserve = f" ({q.device.memory_gib:g} less {q.reserve_gib:.1f} kept free)" if q.reserve_gib else ""
        text = (
            f"no mapping of {q.model_spec.name} on {q.num_gpus} GPUs fits into "
            f"{q.usable_device.memory_bytes / GIB:.0f} GiB of {q.device.name}{reserve}: the least is "
            f"{smallest.memory.total / GIB:.0f} GiB with {format_mapping(smallest)}"
        )
        num_gpus = self.smallest_num_gpus()
        options = [f"{num_gpus} GPUs"] if num_gpus else []
        options += [f"{name} ({size:.0f} GiB)" for name, size in self._larger_devices(smallest)]
        if not options:
            return f"{text}; choose a smaller model, or a shorter {Setting('--seq-len')}"
        return f"{text}; it would fit with {', or '.join(options)}"

    def smallest_num_gpus(self) -> int | None:
        """Return the smallest number of GPUs on which a mapping fits: a power of two, or 9 to 15 sixteenths of it.

        None: no power of two up to MAX_GPUS.
        """
        powers = (2**k for k in range(MAX_GPUS.bit_length()))
        enough = next(filter(self._fits_on, powers), None)
        if enough is None:
            return None
        step = max(1, enough // 16)
        between = range(enough // 2 + step, enough, step)
        return next(filter(self._fits_on, between), enough)

    def _fits_on(self, num_gpus: int) -> bool:
        """Return whether some mapping on this number of GPUs fits into memory with recomputed layers."""
        constraints = MappingConstraints(self.request.with_num_gpus(num_gpus).base_config)
        space = MappingSpace(constraints, self.request.restriction)
        return MemoryFilter(space, self.own_search.memory_model).fits_frugally

    def _larger_devices(self, smallest: PlannedMapping) -> list[tuple[str, float]]:
        q = self.request
        share = q.reserve_gib / q.device.memory_gib
        sizes = {name: load_device(name).memory_gib for name in device_names() if name != "cpu"}
        enough = {name: size for name, size in sizes.items() if size * (1 - share) * GIB >= smallest.memory.total}
        return sorted(enough.items(), key=lambda item: item[1])[:2]


def format_axis_value(value: Any) -> str:
    """Format a value of an axis as `--fix` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ("+".join(value) or "none") if isinstance(value, tuple) else str(value)


def format_mapping(plan: PlannedMapping) -> str:
    """Format a mapping as `--explain` takes it."""
    m = plan.mapping
    words = [f"tp={m.tp} cp={m.cp} pp={m.pp} ep={m.ep} etp={m.etp} mbs={m.mbs} zero={m.zero}"]
    if m.pp > 1:
        words.append(f"schedule={m.schedule} vpp={m.vpp}")
    words.append(f"dispatcher={m.dispatcher.kind}")
    if m.recompute:
        words.append(f"recompute={'+'.join(m.recompute)}")
    if m.offload:
        words.append(f"offload={'+'.join(m.offload)}")
    if m.overlap:
        words.append("overlap=on")
    return " ".join(words)


def read_model(name: str, overrides: Sequence[str] = ()) -> tuple[Config, ModelSpec]:
    """Load the recipe and the model spec of a model that a user names.

    Args:
        name: a preset, a recipe (.toml), or a Hugging Face config.json or its folder.
        overrides: settings `section.key=value` that override the recipe, or the defaults of a model without one.

    Raises:
        ConfigError: the model is unknown, the runtime cannot train it, or an override is wrong or has no effect.
    """
    _check_overrides(overrides)
    if name.endswith(".toml"):
        cfg = load_config(Path(name), overrides)
        return cfg, ModelSpec(cfg.model.preset or Path(name).stem, cfg.model)
    model_spec = load_model_spec(name)
    if overrides and model_spec.name in preset_names():
        if other := next((word for word in overrides if word.startswith("model.preset=")), ""):
            raise ConfigError(f"{other} and MODEL {name} name two models; give the one to plan as MODEL")
        cfg = load_config(None, [f"model.preset={model_spec.name}", *overrides])
        return cfg, replace(model_spec, config=cfg.model)
    for word in overrides:
        if word.startswith("model."):
            raise ConfigError(f"{word}: {name} has the model; change it there, or name a preset or a recipe")
    return replace(
        load_config(None, overrides) if overrides else config_from_dict({}), model=model_spec.config
    ), model_spec


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse settings that the search chooses, whatever the recipe has."""
    axes = {f"{section}.{key}": axis for axis, (section, key) in AXIS_KEYS.items()}
    for word in overrides:
        key, _, text = word.partition("=")
        if axis := axes.get(key.removesuffix(".kind")):
            value = parsed_value(text)
            value = value.get("kind", text) if isinstance(value, dict) else value
            value = tuple(map(str, value)) if isinstance(value, list) else value
            axis, value = ("offload", "optimizer") if axis == "moments" else (axis, value)
            fixed = f"{axis}={format_axis_value(value)}"
            raise ConfigError(f"{word} has no effect: the search chooses it; fix it with {Setting('--fix')} {fixed}")


def _nearby_gpu_counts(num_gpus: int) -> Iterator[int]:
    """Yield numbers of GPUs near `num_gpus`, nearest first: powers of two, whole nodes and numbers up to 8."""
    candidates = {2**k for k in range(17)} | {8 * k for k in range(1, 65)} | set(range(1, 9))
    yield from sorted((n for n in candidates if n != num_gpus), key=lambda n: (abs(n - num_gpus), n))[:24]
