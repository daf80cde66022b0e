"""The page of a plan: what is on it as text, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from moefold import __version__
from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.planner.cost_model.step import CostModel, StepTime
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.budget import MEMORY_PARTS, MemoryEstimate, MemoryModel
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.report import PlanReport, ReportSource, format_compact_mapping, render_report, write_report
from moefold.planner.validation import STATED_ERROR
from moefold.recipe import load_config

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
SECTIONS = ("views", "ranking", "memory-bars", "time-bars", "timeline", "sensitivity", "scaling")
WORKLOAD = TrainingWorkload(seq_len=4096, global_batch_size=256)
BEST = ParallelMapping(tp=2, dp=8, pp=4, vpp=2, ep=8, edp=2, schedule="interleaved")
OTHERS = (replace(BEST, vpp=1, schedule="1f1b"), replace(BEST, vpp=1, schedule="zero-bubble", recompute=("layer",)))


@dataclass(frozen=True)
class Plan:
    mapping: ParallelMapping
    time: StepTime
    memory: MemoryEstimate


@pytest.fixture(scope="module")
def study() -> PlanReport:
    gpu, shape = load_device("h100"), model_spec_from_config(load_config(None, ["model.preset=mixtral-8x7b"]).model)
    pricer, memory = CostModel(shape, gpu, WORKLOAD), MemoryModel(shape, WORKLOAD, gpu)

    def plan(mapping: ParallelMapping) -> Plan:
        return Plan(mapping, pricer.step_time(mapping), memory.estimate(mapping))

    def replan(num_gpus: int) -> Plan | None:
        return None if num_gpus not in (32, 128) else plan(replace(BEST, dp=num_gpus // 8, edp=num_gpus // 32))

    plans = [plan(mapping) for mapping in (BEST, *OTHERS)]
    return PlanReport("mixtral <8x7b>", gpu, 64, WORKLOAD, shape, plans, replan)


@pytest.fixture(scope="module")
def page(study) -> str:
    return render_report(study)


class Page(HTMLParser):
    """Collects tags, and the texts of the cells of each table."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.rows, self.texts = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in ("circle",):
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()
        self.texts.append(data)


def read(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    return parser


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def bars_of(page: str, section: str) -> list[tuple[dict[str, float], str]]:
    """Widths of the parts of each bar in percent, by name, and the sum that is written to the right of it."""
    part = re.search(rf'id="{section}">(.*?)<h2', page, re.DOTALL)[1]
    found = []
    for bar in part.split('<div class="bar">')[1:]:
        pieces = re.findall(r'class="part" style="width:([\d.]+)%;background:#\w+" title="(.*?): ', bar)
        found.append(({name: float(width) for width, name in pieces}, re.search(r'class="sum[^>]*>(.*?)<', bar)[1]))
    return found


def views_of(page: str) -> dict[str, list[dict[str, str]]]:
    """By view the attributes of each GPU."""
    views: dict[str, list[dict[str, str]]] = {}
    for tag, attributes in read(page).tags:
        if "data-view" in attributes:
            cells = views[attributes["data-view"]] = []
        if tag == "g" and attributes.get("class") == "gpu":
            cells.append(attributes)
    return views


def test_the_page_has_all_parts_and_asks_nothing_of_the_network(page, study):
    parts = [attributes.get("id") for tag, attributes in read(page).tags if tag == "h2"]
    assert parts == list(SECTIONS)
    assert "mixtral &lt;8x7b&gt; on 64 x h100" in page
    assert "<8x7b>" not in page
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)
    # Nodes of two views, passes, two sensitivities, scaling.
    assert len(drawings(page)) == 2 * 8 + 1 + 2 + 1
    assert '<meta name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page
    # Nothing is copied where there is no recipe.
    assert 'id="copy"' not in page


def test_the_foot_names_command_version_and_date_and_a_button_copies_the_recipe(study):
    source = ReportSource(
        command="moefold plan 'a <b>' --gpu h100", date="2026-01-02", recipe='[model]\npreset = "<x>"\n'
    )
    page = render_report(replace(study, source=source))
    foot = page[page.index("<footer>") :]
    assert "moefold plan &#39;a &lt;b&gt;&#39; --gpu h100" in foot
    assert f"moefold {__version__}, 2026-01-02" in foot
    assert "never checked on a GPU" in foot
    assert str(STATED_ERROR) in foot
    assert '<pre id="recipe">[model]\npreset = &#34;&lt;x&gt;&#34;\n</pre>' in page
    assert 'id="copy"' in page


def test_the_table_ranks_the_mappings(page, study):
    rows = [row for row in read(page).rows if len(row) > 15]
    assert len(rows) == 1 + len(study.plans)
    column = {name: i for i, name in enumerate(rows[0])}
    for row, plan in zip(rows[1:], study.plans, strict=True):
        m = plan.mapping
        for key in ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "mbs", "zero", "schedule"):
            assert row[column[key]] == str(getattr(m, key))
        assert row[column["recompute"]] == (" + ".join(m.recompute) or "–")
        assert float(row[column["step, s"]]) == pytest.approx(plan.time.total_s, rel=0.005)
        assert row[column["MFU"]] == f"{plan.time.mfu:.0%}"


def test_memory_near_the_limit_is_marked(study):
    total = study.plans[0].memory.total
    for share, level in ((0.8, ""), (0.92, "near"), (0.97, "over")):
        gpu = replace(study.gpu, memory_gib=total / share / 2**30)
        page = render_report(replace(study, gpu=gpu, plans=study.plans[:1], replan=lambda count: None))
        assert f'<b id="memory" class="{level}">' in page
        assert f'<span class="sum {level}">' in page


def test_every_gpu_is_in_both_views_with_its_groups(page, study):
    views = views_of(page)
    assert list(views) == ["attention", "experts"]
    for (name, cells), axes in zip(views.items(), (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")), strict=True):
        assert len(cells) == 64
        for axis in axes:
            sizes = [[cell.get(f"data-{axis}") for cell in cells].count(str(group)) for group in range(64)]
            assert set(sizes) <= {0, getattr(BEST, axis)}, name
    nodes = [svg for svg in drawings(page) if svg.get("class") == "node"]
    assert [next(svg.iter("text")).text for svg in nodes] == 2 * [f"node {i}" for i in range(8)]
    for svg in nodes:
        places = [(rect.get("x"), rect.get("y")) for rect in svg.iter("rect")]
        assert len(set(places)) == len(places) == 8


@pytest.mark.parametrize("coupled", [False, True])
def test_the_experts_of_a_coupled_method_lie_within_data_parallelism(study, coupled):
    mapping = ParallelMapping(tp=2, cp=2, dp=4, pp=2, ep=2, etp=2, edp=4)
    workload = replace(WORKLOAD, is_coupled=coupled)
    plan = replace(
        study.plans[0], mapping=mapping, time=CostModel(study.model_spec, study.gpu, workload).step_time(mapping)
    )
    page = render_report(replace(study, workload=workload, plans=[plan], replan=lambda count: None))
    cells = views_of(page)["experts"]

    def members(axis: str) -> list[int]:
        """The group of rank 1."""
        return [rank for rank, cell in enumerate(cells) if cell.get(f"data-{axis}") == cells[1].get(f"data-{axis}")]

    assert members("etp") == [0, 1]
    assert members("pp") == [1, 17]
    # Coupled, the ranks of tp and cp lie between experts' neighbours, as `layer_time.ep_stride` prices it.
    assert members("ep") == ([1, 5] if coupled else [1, 3])
    assert members("edp") == ([1, 3, 9, 11] if coupled else [1, 5, 9, 13])
    titles = re.findall(r"<title>(rank .*?)</title>", page.partition('data-view="experts"')[2])
    assert titles[11] == ("rank 11: pp 0, edp 3, ep 0, etp 1" if coupled else "rank 11: pp 0, edp 2, ep 1, etp 1")
    assert re.search(r'data-axis="edp"[^>]*>edp 4</button>', page)


def test_bars_are_as_long_as_their_parts(page, study):
    for section, parts_of, unit in (
        ("memory-bars", lambda plan: {part: getattr(plan.memory, part) / 2**30 for part in MEMORY_PARTS}, "GiB"),
        ("time-bars", lambda plan: plan.time.parts, "s"),
    ):
        bars = bars_of(page, section)
        wanted = [{n.replace("_", " "): v for n, v in parts_of(plan).items() if v > 0} for plan in study.plans]
        scale = sum(sum(widths.values()) for widths, _ in bars) / sum(sum(parts.values()) for parts in wanted)
        for (widths, said), parts in zip(bars, wanted, strict=True):
            assert widths == pytest.approx({name: value * scale for name, value in parts.items()}, abs=0.01)
            assert sum(widths.values()) <= 100.01
            number, of = said.split()
            assert (float(number), of) == (pytest.approx(sum(parts.values()), rel=0.01), unit)


def test_lines_of_the_limits_are_where_the_memory_ends(study):
    page = render_report(replace(study, reserve_gib=7.91, plans=study.plans[:1], replan=lambda count: None))
    full, usable = (re.findall(rf'class="line {kind}" style="left:([\d.]+)%', page) for kind in ("hard", "soft"))
    assert float(usable[0]) / float(full[0]) == pytest.approx(0.9, abs=1e-4)
    assert "71.2 GiB: what a mapping may use" in page
    assert "7.9 are kept free" in page
    assert 'class="line soft"' not in render_report(replace(study, plans=study.plans[:1], replan=lambda count: None))


def test_the_timeline_has_a_bar_for_every_pass(page):
    svg = next(svg for svg in drawings(page) if svg.get("aria-label") == "passes of each pipeline rank")
    passes = [rect for rect in svg.iter("rect") if rect.get("class") == "pass"]
    assert len(passes) == 2 * 8 * BEST.num_micro_batches(256)
    assert [text.text for text in svg.iter("text") if text.text.startswith("pp rank")] == [
        f"pp rank {i}" for i in range(4)
    ]


def test_the_curves_show_the_best_mapping_under_other_conditions(page, study):
    *_, bandwidth, imbalance, scaling = drawings(page)
    best = study.plans[0].time
    titles = [title.text for svg in (bandwidth, imbalance, scaling) for title in svg.iter("title")]
    assert f"within nvlink: {best.total_s:.4g} s a step at 1" in titles
    assert f"the best mapping: {best.total_s:.4g} s a step at 1" in titles
    slow = [float(title.split(": ")[1].split()[0]) for title in titles if title.startswith("beyond it")]
    assert slow == sorted(slow, reverse=True)
    uneven = [float(title.text.split(": ")[1].split()[0]) for title in imbalance.iter("title")]
    assert uneven == sorted(uneven)
    assert uneven[-1] > uneven[0]
    # Chart and table have the same numbers of GPUs; on 16 and on 256 nothing was found.
    planned = [title.text.split()[-1] for title in scaling.iter("title") if title.text.startswith("planned")]
    same = [title.text.split()[-1] for title in scaling.iter("title") if title.text.startswith("the same")]
    assert planned == ["32", "64", "128"]
    rows = [row for row in read(page).rows if len(row) == 6][1:]
    assert [row[0] for row in rows] == ["16", "32", "64", "128", "256"]
    assert [row[0] for row in rows if row[2] != "–"] == planned
    assert [row[0] for row in rows if row[5] != "–"] == same
    assert [row[1] for row in rows if row[2] == "–"] == ["nothing is legal or fits"] * 2
    assert f"planned for each number: {best.tokens_per_s_per_gpu:.4g} tokens/s/GPU at 64" in titles


def test_the_numbers_are_there_for_programs(page, study):
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    data = json.loads(text)
    assert data["model"] == study.model
    assert [row["step_time_s"] for row in data["mappings"]] == [plan.time.total_s for plan in study.plans]


def test_names_say_what_is_unusual():
    assert format_compact_mapping(ParallelMapping()) == "tp1 pp1 ep1 dp1 z1"
    assert (
        format_compact_mapping(ParallelMapping(cp=2, etp=4, mbs=2, vpp=3, pp=2)) == "tp1 pp2x3 cp2 ep1 etp4 dp1 z1 mbs2"
    )
    mapping = ParallelMapping(
        pp=4, vpp=2, schedule="zbv", zero=3, recompute=("norms", "moe"), offload=("optimizer",), overlap=True
    )
    saved = "zbv, recompute: norms + moe, offload: optimizer, expert all-to-all overlapped"
    assert format_compact_mapping(mapping) == f"tp1 pp4x2 ep1 dp1 z3, {saved}"


def test_wrong_files_and_empty_plans_are_refused(study, tmp_path):
    with pytest.raises(ConfigError, match=r"report\.pdf must end in \.html"):
        write_report(study, tmp_path / "report.pdf")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_report(study, tmp_path / "nowhere" / "report.html")
    with pytest.raises(ConfigError, match="no mapping is legal"):
        write_report(replace(study, plans=[]), tmp_path / "report.html")


def test_thousands_of_gpus_are_drawn_in_part(study):
    mapping = replace(BEST, dp=256, edp=64, mbs=1)
    plan = replace(study.plans[0], mapping=mapping)
    page = render_report(
        replace(study, num_gpus=2048, plans=[plan], workload=replace(WORKLOAD, global_batch_size=2048))
    )
    assert "the first 1024 of 2048 GPUs" in page
    assert page.count('class="gpu"') == 2 * 1024


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip(f"no browser to look with: none of {', '.join(BROWSERS)} is on the PATH")
    return found


def look(browser: str, path: Path, *words: str) -> str:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--window-size=1260,2800"]
    done = subprocess.run(
        [browser, *flags, *words, path.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_a_browser_shows_the_page(browser, study, tmp_path):
    path, picture = tmp_path / "report.html", tmp_path / "report.png"
    write_report(study, path)
    shown = look(browser, path, "--dump-dom")
    # The script has run: every GPU has a colour, and as many colours as there are groups along the first axis.
    for view, groups in (("attention", 32), ("experts", 8)):
        part = re.search(rf'data-view="{view}".*?</div>', shown, re.DOTALL)[0]
        cells = re.findall(r'<rect [^>]*style="fill: ([^"]*?);?"[^>]*></rect><text[^>]*>(\d+)<', part)
        assert len(cells) == 64
        assert len(set(cells)) == len({number for _, number in cells}) == groups
    for section in SECTIONS:
        assert f'id="{section}"' in shown
    look(browser, path, f"--screenshot={picture}")
    pixels = imread(picture)[..., :3]
    assert pixels.shape[1] >= 1200
    inked = (pixels.min(axis=-1) < 0.85).mean(axis=1)
    # The window is longer than the page. Each fifth down to the last line has ink, and none is covered by it.
    height = int(inked.nonzero()[0][-1])
    assert height > 1500
    for part in range(5):
        assert 0.003 < inked[part * height // 5 : (part + 1) * height // 5].mean() < 0.6
