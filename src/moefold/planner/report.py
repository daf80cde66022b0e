"""Plan report: an offline HTML page with views, ranking, memory, time, timeline, sensitivity and scaling."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from jinja2 import Environment
from markupsafe import Markup

from moefold import __version__
from moefold.cost.hardware import GIB, Device
from moefold.errors import ConfigError
from moefold.planner.cost_model.step import CostModel, StepTime
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import (
    ParallelMapping,
    describe_strategy,
    format_compact_degrees,
    format_rate,
    format_seconds,
)
from moefold.planner.memory.budget import MEMORY_PARTS
from moefold.planner.model_spec import ModelSpec
from moefold.planner.simulator.simulate import Noise, simulate_mapping
from moefold.planner.simulator.timeline import Timeline
from moefold.planner.svg_chart import (
    MEMORY_COLOURS,
    TIME_COLOURS,
    Curve,
    StackedBar,
    axis_choices,
    build_drawn_views,
    line_chart,
    pipeline_chart,
    stacked_bars,
    view_chart,
)
from moefold.planner.validation import STATED_ERROR
from moefold.topology.layout import Layout, fold

BANDWIDTH_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
IMBALANCES = (1.0, 1.2, 1.5, 2.0, 3.0)
GPU_COUNT_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
MAX_SHOWN_PLANS = 10
FIRST_COLOUR = "var(--first)"
SECOND_COLOUR = "var(--second)"
"""Colours of curves, which differ on a dark page."""
NEAR_LIMIT = 0.9
OVER_LIMIT = 0.95
"""Shares of a GPU's memory above which a total is marked as near its limit, and as over it."""
MAX_DRAWN_GPUS = 1024
"""Maximum number of GPUs in the picture, which repeats itself beyond."""


class MemoryEstimateProtocol(Protocol):
    """Bytes of the fullest rank, with an attribute for each of MEMORY_PARTS."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        ...

    @property
    def fits(self) -> bool:
        """True if the device has this much memory."""
        ...


class PlannedMappingProtocol(Protocol):
    """A mapping with its predicted time and memory."""

    @property
    def mapping(self) -> ParallelMapping:
        """The degrees."""
        ...

    @property
    def time(self) -> StepTime:
        """Time of one step."""
        ...

    @property
    def memory(self) -> MemoryEstimateProtocol:
        """Memory of the fullest rank."""
        ...


@dataclass(frozen=True)
class PlanReport:
    """The request, and the plans that the search found."""

    model: str
    gpu: Device
    num_gpus: int
    workload: TrainingWorkload
    model_spec: ModelSpec
    plans: Sequence[PlannedMappingProtocol]
    """Best first."""
    replan: Callable[[int], PlannedMappingProtocol | None]
    """Returns the best plan for another number of GPUs, None if nothing is legal or fits."""
    noise: Noise | None = None
    """Noise of the simulated step."""
    reserve_gib: float = 0.0
    """Memory that a mapping leaves free on each GPU, in GiB."""
    source: "ReportSource | None" = None


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """Provenance of a page, for its footer and its copy button."""

    command: str
    """Command that wrote the page."""
    date: str
    recipe: str = ""
    """Recipe of the best mapping; empty if none can be written."""


def write_report(report: PlanReport, path: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: the file does not end in .html or cannot be written, or there is no plan to show.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--report {path} must end in .html")
    if not report.plans:
        raise ConfigError(f"--report {path}: no mapping is legal, so there is nothing to show")
    page = render_report(report)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}") from None


def render_report(report: PlanReport) -> str:
    """Render the page as text."""
    best = report.plans[0]
    cost_model = CostModel(report.model_spec, report.gpu, report.workload)
    timeline = simulate_mapping(cost_model, best.mapping, report.noise)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("moefold.planner") / "report.html").read_text(encoding="utf-8"))
    shown = report.plans[:MAX_SHOWN_PLANS]
    scaling = list(_scaling_points(report))
    return template.render(
        study=report,
        source=report.source,
        version=__version__,
        stated_error=STATED_ERROR,
        best=best,
        best_name=format_compact_mapping(best.mapping),
        level=memory_limit_level(best, report.gpu),
        step=format_seconds(best.time.total_s),
        tokens=format_rate(best.time.tokens_per_s_per_gpu),
        binding=best.time.bottleneck.replace("_", " "),
        rows=list(_ranking_rows(shown, report.gpu)),
        views=list(_view_charts(report, best.mapping)),
        memory=_memory_bars(report, shown),
        time=stacked_bars(
            [
                StackedBar(
                    name=format_compact_degrees(plan.mapping),
                    subtitle=describe_strategy(plan.mapping),
                    parts=plan.time.parts,
                )
                for plan in shown
            ],
            "s",
            TIME_COLOURS,
            format_value=format_seconds,
        ),
        timeline=pipeline_chart(timeline),
        measured=_simulated_metrics(timeline),
        charts=list(_sensitivity_charts(report, best.mapping)),
        scaling=scaling,
        scaling_chart=_scaling_chart(scaling),
        data=_embedded_json(report, shown),
    )


def format_compact_mapping(mapping: ParallelMapping) -> str:
    """Format a mapping in one line, without default values."""
    return ", ".join(filter(None, (format_compact_degrees(mapping), describe_strategy(mapping))))


def memory_parts_gib(memory: MemoryEstimateProtocol) -> dict[str, float]:
    """Return the memory of a rank by part, in GiB."""
    return {part: getattr(memory, part) / GIB for part in MEMORY_PARTS}


def memory_limit_level(plan: PlannedMappingProtocol, gpu: Device) -> str:
    """Return `over` if a mapping takes nearly all memory of a GPU or more, `near` if it takes much of it."""
    share = plan.memory.total / gpu.memory_bytes
    return "over" if share > OVER_LIMIT or not plan.memory.fits else "near" if share > NEAR_LIMIT else ""


def _memory_bars(report: PlanReport, plans: Sequence[PlannedMappingProtocol]) -> Markup:
    gpu = report.gpu
    limits = [(gpu.memory_gib, f"{gpu.memory_gib:.1f} GiB: all of a GPU")]
    if report.reserve_gib:
        usable = gpu.memory_gib - report.reserve_gib
        limits.insert(0, (usable, f"{usable:.1f} GiB: what a mapping may use"))
    bars = [
        StackedBar(
            name=format_compact_degrees(plan.mapping),
            subtitle=describe_strategy(plan.mapping),
            parts=memory_parts_gib(plan.memory),
            limit_level=memory_limit_level(plan, gpu),
        )
        for plan in plans
    ]
    return stacked_bars(bars, "GiB", MEMORY_COLOURS, limits=limits, format_value="{:.1f}".format)


def _ranking_rows(plans: Sequence[PlannedMappingProtocol], gpu: Device) -> Iterator[dict[str, object]]:
    for place, plan in enumerate(plans, 1):
        time = plan.time
        yield {
            "place": place,
            "mapping": plan.mapping,
            "recompute": " + ".join(plan.mapping.recompute) or "–",
            "offload": " + ".join(plan.mapping.offload) or "–",
            "step_s": format_seconds(time.total_s),
            "mfu": f"{time.mfu:.0%}",
            "tokens": format_rate(time.tokens_per_s_per_gpu),
            "tflops": f"{time.tflops_per_gpu:.0f}",
            "memory": f"{plan.memory.total / GIB:.1f}",
            "level": memory_limit_level(plan, gpu),
            "binding": time.bottleneck.replace("_", " "),
        }


def _view_charts(report: PlanReport, mapping: ParallelMapping) -> Iterator[dict[str, object]]:
    coupled = report.workload.is_coupled
    layout = _drawn_layout(mapping, mapping.tp * mapping.cp * mapping.ep if coupled else mapping.ep * mapping.etp)
    note = ""
    if layout.world_size < mapping.world_size:
        note = f"the first {layout.world_size} of {mapping.world_size} GPUs of the same mapping with fewer replicas"
    for name, view in zip(("attention", "experts"), build_drawn_views(layout, coupled=coupled), strict=True):
        axes, first = axis_choices(view)
        chart = view_chart(name, view, min(report.gpu.nvlink_domain_size, layout.world_size) or layout.world_size)
        yield {"name": name, "axes": axes, "first": first, "chart": chart, "note": note}


def _drawn_layout(mapping: ParallelMapping, block_size: int) -> Layout:
    """Return the layout with as many replicas as fit into the picture, in whole blocks of ranks with all experts."""
    m = mapping
    dp = mapping.dp
    while m.tp * m.cp * m.pp * dp > MAX_DRAWN_GPUS and dp % 2 == 0 and (m.tp * m.cp * dp // 2) % block_size == 0:
        dp //= 2
    return fold(world_size=m.tp * m.cp * m.pp * dp, tp=m.tp, cp=m.cp, pp=m.pp, ep=m.ep, etp=m.etp)


def _simulated_metrics(timeline: Timeline) -> list[tuple[str, str]]:
    ranks = range(timeline.num_ranks)
    exposed = max(timeline.exposed_s(rank) for rank in ranks)
    in_flight = max(timeline.max_in_flight(rank) for rank in ranks)
    return [
        ("simulated step", f"{format_seconds(timeline.total_s)} s"),
        ("bubble over work", f"{timeline.bubble:.1%}"),
        ("pipeline ranks idle", f"{timeline.idle_share:.1%}"),
        ("exposed collectives", f"{format_seconds(exposed)} s"),
        ("micro-batches in flight", f"{in_flight}"),
    ]


def _sensitivity_charts(report: PlanReport, mapping: ParallelMapping) -> Iterator[Markup]:
    def step_s(gpu: Device, workload: TrainingWorkload, changed: ParallelMapping) -> float:
        return CostModel(report.model_spec, gpu, workload).step_time(changed).total_s

    size = (460, 280)
    inside = tuple(
        (x, step_s(_scale_link_bandwidth(report.gpu, x, 1.0), report.workload, mapping)) for x in BANDWIDTH_FACTORS
    )
    between = tuple(
        (x, step_s(_scale_link_bandwidth(report.gpu, 1.0, x), report.workload, mapping)) for x in BANDWIDTH_FACTORS
    )
    yield line_chart(
        "Bandwidth",
        "bandwidth, times the device's",
        "s a step",
        [
            Curve(f"within {report.gpu.links[0].level}", inside, FIRST_COLOUR),
            Curve("beyond it", between, SECOND_COLOUR),
        ],
        size=size,
    )
    loads = tuple((x, step_s(report.gpu, replace(report.workload, imbalance=x), mapping)) for x in IMBALANCES)
    yield line_chart(
        "Imbalance of the experts",
        "busiest expert-parallel rank over the mean",
        "s a step",
        [Curve("the best mapping", loads, FIRST_COLOUR)],
        size=size,
    )


def _scale_link_bandwidth(gpu: Device, innermost_factor: float, outer_factor: float) -> Device:
    first, *others = gpu.links
    return replace(
        gpu,
        links=(
            replace(first, bytes_per_s=first.bytes_per_s * innermost_factor),
            *(replace(link, bytes_per_s=link.bytes_per_s * outer_factor) for link in others),
        ),
    )


@dataclass(frozen=True)
class ScalingPoint:
    """One number of GPUs, with its best mapping, and with the page's best mapping at other dp."""

    num_gpus: int
    planned: PlannedMappingProtocol | None
    """None if nothing is legal or fits."""
    replicated: StepTime | None
    """Step of the page's best mapping with more or fewer replicas; None if they do not divide."""

    @property
    def name(self) -> str:
        """The best mapping for this number of GPUs."""
        return format_compact_mapping(self.planned.mapping) if self.planned else "nothing is legal or fits"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Step time, MFU and tokens per second of the best mapping, and tokens per second of the page's mapping."""
        best = self.planned.time if self.planned else None
        found = (
            ("–", "–", "–")
            if best is None
            else (format_seconds(best.total_s), f"{best.mfu:.0%}", format_rate(best.tokens_per_s_per_gpu))
        )
        return (*found, format_rate(self.replicated.tokens_per_s_per_gpu) if self.replicated else "–")


def _scaling_points(report: PlanReport) -> Iterator[ScalingPoint]:
    """Yield the points from a quarter to four times the GPUs: replanned, and with the same mapping."""
    best = report.plans[0]
    for times in GPU_COUNT_FACTORS:
        count = report.num_gpus * times
        if count % 1 or count < 1:
            continue
        plan = best if times == 1.0 else report.replan(int(count))
        planned = plan if plan is not None and plan.memory.fits else None
        yield ScalingPoint(int(count), planned, _step_with_more_replicas(report, best.mapping, times))


def _step_with_more_replicas(report: PlanReport, mapping: ParallelMapping, replica_factor: float) -> StepTime | None:
    """Return the step with `replica_factor` times the replicas; None if batch or experts do not divide."""
    dp = mapping.dp * replica_factor
    edp = mapping.edp * replica_factor
    if dp % 1 or edp % 1 or report.workload.global_batch_size % (mapping.mbs * int(dp)):
        return None
    changed = replace(mapping, dp=int(dp), edp=int(edp))
    if changed.num_micro_batches(report.workload.global_batch_size) < mapping.pp * (1 + (mapping.vpp > 1)):
        return None
    return CostModel(report.model_spec, report.gpu, report.workload).step_time(changed)


def _scaling_chart(points: Sequence[ScalingPoint]) -> Markup:
    planned = tuple((s.num_gpus, s.planned.time.tokens_per_s_per_gpu) for s in points if s.planned)
    same = tuple((s.num_gpus, s.replicated.tokens_per_s_per_gpu) for s in points if s.replicated)
    curves = [Curve("planned for each number", planned, FIRST_COLOUR)]
    curves += [Curve("the same mapping, other replicas", same, SECOND_COLOUR, is_dashed=True)] if same else []
    return line_chart("Speed of a GPU", "GPUs", "tokens/s/GPU", curves, size=(460, 300), is_log=True)


def _embedded_json(report: PlanReport, plans: Sequence[PlannedMappingProtocol]) -> Markup:
    """Return the numbers of the page as JSON for other programs."""
    rows = [
        plan.mapping.as_dict()
        | {"step_time_s": plan.time.total_s, "mfu": plan.time.mfu, "memory_gib": plan.memory.total / GIB}
        for plan in plans
    ]
    text = json.dumps({"model": report.model, "gpu": report.gpu.name, "num_gpus": report.num_gpus, "mappings": rows})
    # Inside a script element, only a closing tag can end the text early.
    return Markup(text.replace("<", "\\u003c"))
