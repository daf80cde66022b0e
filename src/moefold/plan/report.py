"""The plan as one page that needs no network: views, ranking, memory, time, timeline, sensitivity and scaling."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from jinja2 import Environment
from markupsafe import Markup

from moefold.errors import ConfigError
from moefold.parallel.layout import Layout, fold
from moefold.plan.chart import PALETTE, Curve, line_chart, pipeline_chart, stacked_bars
from moefold.plan.device import GIB, Device
from moefold.plan.mapping import Mapping
from moefold.plan.memory import MEMORY_PARTS
from moefold.plan.shape import ModelShape
from moefold.plan.simulate import Disturbance
from moefold.plan.stage_work import simulate_mapping
from moefold.plan.step_time import Pricer, StepTime
from moefold.plan.timeline import Timeline
from moefold.plan.views_chart import axis_choices, drawn_views, view_chart
from moefold.plan.workload import Workload

BANDWIDTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
IMBALANCES = (1.0, 1.2, 1.5, 2.0, 3.0)
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
SHOWN = 10
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
    return template.render(
        study=study,
        best=best,
        best_name=name_of(best.mapping),
        binding=best.time.binding.replace("_", " "),
        rows=list(_rows(shown)),
        views=list(_views(study, best.mapping)),
        memory=stacked_bars(
            [(f"{i}  {degrees_of(plan.mapping)}", memory_gib(plan.memory)) for i, plan in enumerate(shown, 1)],
            "GiB",
            limit=study.gpu.memory_bytes / GIB,
            digits=1,
        ),
        time=stacked_bars(
            [(f"{i}  {degrees_of(plan.mapping)}", plan.time.parts) for i, plan in enumerate(shown, 1)], "s", digits=3
        ),
        timeline=pipeline_chart(timeline),
        measured=_measured(timeline),
        charts=list(_sensitivity(study, best.mapping)),
        scaling=_scaling(study),
        data=_data(study, shown),
    )


def name_of(mapping: Mapping) -> str:
    """A mapping in one line, without what is as usual."""
    m, words = mapping, [degrees_of(mapping)]
    if m.pp > 1 and m.schedule != "1f1b":
        words.append(m.schedule)
    if m.zero != 1:
        words.append(f"zero{m.zero}")
    words += [f"-{part}" for part in m.recompute] + [f"offload {part}" for part in m.offload]
    return " ".join([*words, *(["overlap"] if m.overlap else [])])


def degrees_of(mapping: Mapping) -> str:
    """The degrees of both views, pp with its virtual stages."""
    m = mapping
    chunks = f"x{m.vpp}" if m.vpp > 1 else ""
    return f"tp{m.tp} cp{m.cp} dp{m.dp} pp{m.pp}{chunks} ep{m.ep} etp{m.etp} mbs{m.mbs}"


def memory_gib(memory: Memory) -> dict[str, float]:
    """The parts of a rank's memory."""
    return {part: getattr(memory, part) / GIB for part in MEMORY_PARTS}


def _rows(plans: Sequence[PricedPlan]) -> Iterator[dict[str, object]]:
    for place, plan in enumerate(plans, 1):
        m, time = plan.mapping, plan.time
        yield {
            "place": place,
            "mapping": m,
            "recompute": ", ".join(m.recompute) or "-",
            "step_s": f"{time.total_s:.3f}",
            "mfu": f"{time.mfu:.1%}",
            "tokens": f"{time.tokens_per_s_per_gpu:,.0f}",
            "tflops": f"{time.tflops_per_gpu:.0f}",
            "memory": f"{plan.memory.total / GIB:.1f}",
            "fits": plan.memory.fits,
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
        ("simulated step", f"{timeline.total_s:.3f} s"),
        ("bubble over work", f"{timeline.bubble:.1%}"),
        ("pipeline ranks idle", f"{timeline.idle_share:.1%}"),
        ("exposed collectives", f"{exposed:.3f} s"),
        ("micro-batches in flight", f"{held}"),
    ]


def _sensitivity(study: Study, mapping: Mapping) -> Iterator[Markup]:
    def step_s(gpu: Device, workload: Workload, changed: Mapping) -> float:
        return Pricer(study.shape, gpu, workload).step_time(changed).total_s

    size = (372, 260)
    inside = tuple((x, step_s(_linked(study.gpu, x, 1.0), study.workload, mapping)) for x in BANDWIDTHS)
    between = tuple((x, step_s(_linked(study.gpu, 1.0, x), study.workload, mapping)) for x in BANDWIDTHS)
    yield line_chart(
        "Bandwidth",
        "bandwidth, times the device's",
        "s a step",
        [
            Curve(f"within {study.gpu.links[0].level}", inside, PALETTE[0]),
            Curve("beyond it", between, PALETTE[1]),
        ],
        size=size,
    )
    loads = tuple((x, step_s(study.gpu, replace(study.workload, imbalance=x), mapping)) for x in IMBALANCES)
    yield line_chart(
        "Imbalance of the experts",
        "busiest expert-parallel rank over the mean",
        "s a step",
        [Curve("the best mapping", loads, PALETTE[4])],
        size=size,
    )
    counts = tuple(_same_mapping(study, mapping))
    yield line_chart(
        "Number of GPUs",
        "GPUs, by more or fewer replicas",
        "tokens/s/GPU",
        [Curve("the best mapping", counts, PALETTE[6])],
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


def _same_mapping(study: Study, mapping: Mapping) -> Iterator[tuple[float, float]]:
    """Tokens a second and GPU with other numbers of replicas, where batch and experts divide."""
    for times in SCALES:
        dp, edp = mapping.dp * times, mapping.edp * times
        if dp % 1 or edp % 1 or study.workload.global_batch_size % (mapping.mbs * int(dp)):
            continue
        changed = replace(mapping, dp=int(dp), edp=int(edp))
        if changed.num_micro_batches(study.workload.global_batch_size) < mapping.pp * (1 + (mapping.vpp > 1)):
            continue
        price = Pricer(study.shape, study.gpu, study.workload).step_time(changed)
        yield study.num_gpus * times, price.tokens_per_s_per_gpu


def _scaling(study: Study) -> Markup:
    """Tokens a second of the best mapping from a quarter to four times the GPUs, each planned anew."""
    best = study.plans[0]
    points, names = [], []
    for times in SCALES:
        count = study.num_gpus * times
        if count % 1 or count < 1:
            continue
        plan = best if times == 1.0 else study.replan(int(count))
        if plan is not None and plan.memory.fits:
            points.append((count, plan.time.tokens_per_s_per_gpu * count))
            names.append((int(count), name_of(plan.mapping), plan.time))
    per_gpu = best.time.tokens_per_s_per_gpu
    ideal = tuple((count, per_gpu * count) for count, _ in points)
    curves = [
        Curve("planned anew", tuple(points), PALETTE[0]),
        Curve("as many tokens a GPU as now", ideal, PALETTE[12], is_dashed=True),
    ]
    chart = line_chart("Scaling", "GPUs", "tokens/s", curves, size=(560, 320))
    rows = Markup("").join(
        Markup("<tr><td>{}</td><td class='name'>{}</td><td>{:.3f}</td><td>{:.1%}</td></tr>").format(
            count, name, time.total_s, time.mfu
        )
        for count, name, time in names
    )
    head = Markup("<tr><th>GPUs</th><th class='left'>best mapping</th><th>step, s</th><th>MFU</th></tr>")
    return Markup("<div class='beside'>{}<table class='scaling'>{}{}</table></div>").format(chart, head, rows)


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
