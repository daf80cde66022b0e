"""The plan as one page that needs no network: views, ranking, memory, time, timeline, sensitivity and scaling."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from jinja2 import Environment
from markupsafe import Markup

from moefold import __version__
from moefold.errors import ConfigError
from moefold.parallel.layout import Layout, fold
from moefold.plan.chart import (
    MEMORY_COLOURS,
    TIME_COLOURS,
    Bar,
    Curve,
    line_chart,
    pipeline_chart,
    stacked_bars,
)
from moefold.plan.device import GIB, Device
from moefold.plan.mapping import Mapping
from moefold.plan.memory import MEMORY_PARTS
from moefold.plan.shape import ModelShape
from moefold.plan.simulate import Disturbance
from moefold.plan.stage_work import simulate_mapping
from moefold.plan.step_time import Pricer, StepTime
from moefold.plan.timeline import Timeline
from moefold.plan.views_chart import axis_choices, drawn_views, view_chart
from moefold.plan.wording import compact_name, rate_text, saver_words, seconds_text
from moefold.plan.workload import Workload

BANDWIDTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
IMBALANCES = (1.0, 1.2, 1.5, 2.0, 3.0)
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
SHOWN = 10
FIRST, SECOND = "var(--first)", "var(--second)"
"""Colours of curves, which differ on a dark page."""
NEAR, OVER = 0.9, 0.95
"""Shares of a GPU's memory from which a total is marked as near its limit, and as too near."""
MOST_NODES_GPUS = 1024
"""More GPUs than so many are drawn in part: the picture repeats itself."""


class Memory(Protocol):
    """Bytes of the fullest rank; it has an attribute for each of MEMORY_PARTS."""

    @property
    def total(self) -> float:
        """All of them."""
        ...

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        ...


class PricedPlan(Protocol):
    """A mapping with its price."""

    @property
    def mapping(self) -> Mapping:
        """The degrees."""
        ...

    @property
    def time(self) -> StepTime:
        """Of one step."""
        ...

    @property
    def memory(self) -> Memory:
        """Of the fullest rank."""
        ...


@dataclass(frozen=True)
class Study:
    """What was asked, and what the search found."""

    model: str
    gpu: Device
    num_gpus: int
    workload: Workload
    shape: ModelShape
    plans: Sequence[PricedPlan]
    """Best first."""
    replan: Callable[[int], PricedPlan | None]
    """The best for another number of GPUs, None where nothing is legal or fits."""
    disturbance: Disturbance | None = None
    """Of the simulated step."""
    reserve_gib: float = 0.0
    """Memory of each GPU that a mapping leaves free."""
    source: "Source | None" = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a page comes from, for its foot and its button."""

    command: str
    """That has written it."""
    date: str
    recipe: str = ""
    """Of the best mapping; empty where none can be written."""


def write_report(study: Study, path: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: the file does not end in .html or cannot be written, or there is no plan to show.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--report {path} must end in .html")
    if not study.plans:
        raise ConfigError(f"--report {path}: no mapping is legal, so there is nothing to show")
    page = report_html(study)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror}") from None


def report_html(study: Study) -> str:
    """The page as text."""
    best = study.plans[0]
    pricer = Pricer(study.shape, study.gpu, study.workload)
    timeline = simulate_mapping(pricer, best.mapping, study.disturbance)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("moefold.plan") / "report.html").read_text(encoding="utf-8"))
    shown = study.plans[:SHOWN]
    scaling = list(_scaling(study))
    return template.render(
        study=study,
        source=study.source,
        version=__version__,
        best=best,
        best_name=name_of(best.mapping),
        level=level_of(best, study.gpu),
        step=seconds_text(best.time.total_s),
        tokens=rate_text(best.time.tokens_per_s_per_gpu),
        binding=best.time.binding.replace("_", " "),
        rows=list(_rows(shown, study.gpu)),
        views=list(_views(study, best.mapping)),
        memory=_memory_bars(study, shown),
        time=stacked_bars(
            [
                Bar(name=compact_name(plan.mapping), note=saver_words(plan.mapping), parts=plan.time.parts)
                for plan in shown
            ],
            "s",
            TIME_COLOURS,
            text=seconds_text,
        ),
        timeline=pipeline_chart(timeline),
        measured=_measured(timeline),
        charts=list(_sensitivity(study, best.mapping)),
        scaling=scaling,
        scaling_chart=_scaling_chart(scaling),
        data=_data(study, shown),
    )


def name_of(mapping: Mapping) -> str:
    """A mapping in one line, without what is as usual."""
    return ", ".join(filter(None, (compact_name(mapping), saver_words(mapping))))


def memory_gib(memory: Memory) -> dict[str, float]:
    """The parts of a rank's memory."""
    return {part: getattr(memory, part) / GIB for part in MEMORY_PARTS}


def level_of(plan: PricedPlan, gpu: Device) -> str:
    """Return `over` where a mapping takes nearly all memory of a GPU or more, `near` where it takes much of it."""
    share = plan.memory.total / gpu.memory_bytes
    return "over" if share > OVER or not plan.memory.fits else "near" if share > NEAR else ""


def _memory_bars(study: Study, plans: Sequence[PricedPlan]) -> Markup:
    gpu = study.gpu
    limits = [(gpu.memory_gib, f"{gpu.memory_gib:.1f} GiB: all of a GPU")]
    if study.reserve_gib:
        usable = gpu.memory_gib - study.reserve_gib
        limits.insert(0, (usable, f"{usable:.1f} GiB: what a mapping may use"))
    bars = [
        Bar(
            name=compact_name(plan.mapping),
            note=saver_words(plan.mapping),
            parts=memory_gib(plan.memory),
            level=level_of(plan, gpu),
        )
        for plan in plans
    ]
    return stacked_bars(bars, "GiB", MEMORY_COLOURS, limits=limits, text="{:.1f}".format)


def _rows(plans: Sequence[PricedPlan], gpu: Device) -> Iterator[dict[str, object]]:
    for place, plan in enumerate(plans, 1):
        time = plan.time
        yield {
            "place": place,
            "mapping": plan.mapping,
            "recompute": " + ".join(plan.mapping.recompute) or "–",
            "offload": " + ".join(plan.mapping.offload) or "–",
            "step_s": seconds_text(time.total_s),
            "mfu": f"{time.mfu:.0%}",
            "tokens": rate_text(time.tokens_per_s_per_gpu),
            "tflops": f"{time.tflops_per_gpu:.0f}",
            "memory": f"{plan.memory.total / GIB:.1f}",
            "level": level_of(plan, gpu),
            "binding": time.binding.replace("_", " "),
        }


def _views(study: Study, mapping: Mapping) -> Iterator[dict[str, object]]:
    coupled = study.workload.coupled
    layout = _drawn_layout(mapping, mapping.tp * mapping.cp * mapping.ep if coupled else mapping.ep * mapping.etp)
    note = ""
    if layout.world_size < mapping.world_size:
        note = f"the first {layout.world_size} of {mapping.world_size} GPUs of the same mapping with fewer replicas"
    for name, view in zip(("attention", "experts"), drawn_views(layout, coupled=coupled), strict=True):
        axes, first = axis_choices(view)
        chart = view_chart(name, view, min(study.gpu.domain, layout.world_size) or layout.world_size)
        yield {"name": name, "axes": axes, "first": first, "chart": chart, "note": note}


def _drawn_layout(mapping: Mapping, block: int) -> Layout:
    """The layout, with as many replicas as fit into the picture and whole blocks of ranks with all experts."""
    m, dp = mapping, mapping.dp
    while m.tp * m.cp * m.pp * dp > MOST_NODES_GPUS and dp % 2 == 0 and (m.tp * m.cp * dp // 2) % block == 0:
        dp //= 2
    return fold(world_size=m.tp * m.cp * m.pp * dp, tp=m.tp, cp=m.cp, pp=m.pp, ep=m.ep, etp=m.etp)


def _measured(timeline: Timeline) -> list[tuple[str, str]]:
    ranks = range(timeline.num_ranks)
    exposed = max(timeline.exposed_s(rank) for rank in ranks)
    held = max(timeline.most_in_flight(rank) for rank in ranks)
    return [
        ("simulated step", f"{seconds_text(timeline.total_s)} s"),
        ("bubble over work", f"{timeline.bubble:.1%}"),
        ("pipeline ranks idle", f"{timeline.idle_share:.1%}"),
        ("exposed collectives", f"{seconds_text(exposed)} s"),
        ("micro-batches in flight", f"{held}"),
    ]


def _sensitivity(study: Study, mapping: Mapping) -> Iterator[Markup]:
    def step_s(gpu: Device, workload: Workload, changed: Mapping) -> float:
        return Pricer(study.shape, gpu, workload).step_time(changed).total_s

    size = (460, 280)
    inside = tuple((x, step_s(_linked(study.gpu, x, 1.0), study.workload, mapping)) for x in BANDWIDTHS)
    between = tuple((x, step_s(_linked(study.gpu, 1.0, x), study.workload, mapping)) for x in BANDWIDTHS)
    yield line_chart(
        "Bandwidth",
        "bandwidth, times the device's",
        "s a step",
        [
            Curve(f"within {study.gpu.links[0].level}", inside, FIRST),
            Curve("beyond it", between, SECOND),
        ],
        size=size,
    )
    loads = tuple((x, step_s(study.gpu, replace(study.workload, imbalance=x), mapping)) for x in IMBALANCES)
    yield line_chart(
        "Imbalance of the experts",
        "busiest expert-parallel rank over the mean",
        "s a step",
        [Curve("the best mapping", loads, FIRST)],
        size=size,
    )


def _linked(gpu: Device, inside: float, beyond: float) -> Device:
    first, *others = gpu.links
    return replace(
        gpu,
        links=(
            replace(first, bytes_per_s=first.bytes_per_s * inside),
            *(replace(link, bytes_per_s=link.bytes_per_s * beyond) for link in others),
        ),
    )


@dataclass(frozen=True)
class Scale:
    """One number of GPUs, with the mapping that is best there and the same mapping as on the GPUs of the page."""

    num_gpus: int
    planned: PricedPlan | None
    """None where nothing is legal or fits."""
    replicated: StepTime | None
    """Of the best mapping of the page with more or fewer replicas; None where they do not divide."""

    @property
    def name(self) -> str:
        """The mapping that is best there."""
        return name_of(self.planned.mapping) if self.planned else "nothing is legal or fits"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Step time, MFU and tokens per second of the best mapping, and tokens of the same one."""
        best = self.planned.time if self.planned else None
        found = (
            ("–", "–", "–")
            if best is None
            else (seconds_text(best.total_s), f"{best.mfu:.0%}", rate_text(best.tokens_per_s_per_gpu))
        )
        return (*found, rate_text(self.replicated.tokens_per_s_per_gpu) if self.replicated else "–")


def _scaling(study: Study) -> Iterator[Scale]:
    """From a quarter to four times the GPUs: what a new plan finds, and the same mapping."""
    best = study.plans[0]
    for times in SCALES:
        count = study.num_gpus * times
        if count % 1 or count < 1:
            continue
        plan = best if times == 1.0 else study.replan(int(count))
        planned = plan if plan is not None and plan.memory.fits else None
        yield Scale(int(count), planned, _same_mapping(study, best.mapping, times))


def _same_mapping(study: Study, mapping: Mapping, times: float) -> StepTime | None:
    """A step with so many times the replicas, where batch and experts divide."""
    dp, edp = mapping.dp * times, mapping.edp * times
    if dp % 1 or edp % 1 or study.workload.global_batch_size % (mapping.mbs * int(dp)):
        return None
    changed = replace(mapping, dp=int(dp), edp=int(edp))
    if changed.num_micro_batches(study.workload.global_batch_size) < mapping.pp * (1 + (mapping.vpp > 1)):
        return None
    return Pricer(study.shape, study.gpu, study.workload).step_time(changed)


def _scaling_chart(scales: Sequence[Scale]) -> Markup:
    planned = tuple((s.num_gpus, s.planned.time.tokens_per_s_per_gpu) for s in scales if s.planned)
    same = tuple((s.num_gpus, s.replicated.tokens_per_s_per_gpu) for s in scales if s.replicated)
    curves = [Curve("planned for each number", planned, FIRST)]
    curves += [Curve("the same mapping, other replicas", same, SECOND, is_dashed=True)] if same else []
    return line_chart("Speed of a GPU", "GPUs", "tokens/s/GPU", curves, size=(460, 300), is_log=True)


def _data(study: Study, plans: Sequence[PricedPlan]) -> Markup:
    """The numbers of the page for other programs."""
    rows = [
        plan.mapping.as_dict()
        | {"step_time_s": plan.time.total_s, "mfu": plan.time.mfu, "memory_gib": plan.memory.total / GIB}
        for plan in plans
    ]
    text = json.dumps({"model": study.model, "gpu": study.gpu.name, "num_gpus": study.num_gpus, "mappings": rows})
    # Inside a script element, only the closing tag could end the text early.
    return Markup(text.replace("<", "\\u003c"))
