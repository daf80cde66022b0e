"""The page of a plan: its table, pictures, recipe and numbers."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO

import pytest
from matplotlib.image import imread

from moefold import __version__
from moefold.cost.hardware import load_device
from moefold.errors import ConfigError
from moefold.planner.colours import MEMORY_COLOURS
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.budget import MemoryModel
from moefold.planner.model_spec import model_spec_from_config
from moefold.planner.planner import PlanRequest
from moefold.planner.report import (
    PlanReport,
    draw_bars,
    format_compact_mapping,
    render_report,
    write_report,
)
from moefold.planner.search.search import PlannedMapping
from moefold.planner.simulator.simulate import simulate_mapping
from moefold.planner.validation import STATED_ERROR
from moefold.recipe import load_config

SECTIONS = ("ranking", "memory-bars", "time-bars", "timeline")
WORKLOAD = TrainingWorkload(seq_len=4096, global_batch_size=256)
BEST = ParallelMapping(tp=2, dp=8, pp=4, vpp=2, ep=8, edp=2, schedule="interleaved")
OTHERS = (replace(BEST, vpp=1, schedule="1f1b"), replace(BEST, vpp=1, schedule="zero-bubble", recompute=("layer",)))


@pytest.fixture(scope="module")
def study() -> PlanReport:
    cfg = load_config(None, ["model.preset=mixtral-8x7b", "parallel.world_size=64"])
    gpu, shape = load_device("h100"), replace(model_spec_from_config(cfg.model), name="mixtral <8x7b>")
    pricer, memory = CostModel(shape, gpu, WORKLOAD), MemoryModel(shape, WORKLOAD, gpu)
    plans = [PlannedMapping(m, pricer.step_time(m), memory.estimate(m)) for m in (BEST, *OTHERS)]
    request = PlanRequest(cfg, shape, gpu, WORKLOAD)
    return PlanReport(request=request, workload=WORKLOAD, plans=plans, timeline=simulate_mapping(pricer, BEST))


@pytest.fixture(scope="module")
def page(study) -> str:
    return render_report(study)


class Page(HTMLParser):
    """Collects headings and the texts of the cells of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.sections, self.rows, self.in_cell = [], [], False

    def handle_starttag(self, tag, attrs):
        if tag == "h2":
            self.sections.append(dict(attrs)["id"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell &= tag not in ("td", "th")

    def handle_data(self, data):
        if self.in_cell:
            self.rows[-1][-1] += data


def read(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    return parser


def test_the_page_has_all_parts_and_asks_nothing_of_the_network(page):
    assert tuple(read(page).sections) == SECTIONS
    assert "mixtral &lt;8x7b&gt; on 64 x h100" in page
    assert "<8x7b>" not in page
    assert not re.search(r"https?://|href=|@import|url\(", page)
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == page.count("src=") == 3
    for picture in pictures:
        pixels = imread(BytesIO(base64.b64decode(picture)))[..., :3]
        assert pixels.shape[1] > 1000
        assert 0.01 < (pixels.min(axis=-1) < 0.85).mean() < 0.9


def test_the_foot_names_command_version_and_date_and_the_page_has_the_recipe(study):
    recipe = '[model]\npreset = "<x>"\n'
    command = "moefold plan 'a <b>' --gpu h100"
    page = render_report(replace(study, command=command, date="2026-01-02", recipe=recipe))
    foot = page[page.index("<footer>") :]
    assert "moefold plan &#39;a &lt;b&gt;&#39; --gpu h100" in foot
    assert f"moefold {__version__}, 2026-01-02" in foot
    assert "never checked on a GPU" in foot
    assert str(STATED_ERROR) in foot
    assert "<pre>[model]\npreset = &#34;&lt;x&gt;&#34;\n</pre>" in page


def test_the_table_ranks_the_mappings(page, study):
    head, *rows = read(page).rows
    column = {name: i for i, name in enumerate(head)}
    for row, plan in zip(rows, study.plans, strict=True):
        assert row[column["mapping"]] == format_compact_mapping(plan.mapping)
        assert row[column["MFU"]] == f"{plan.time.mfu:.0%}"
        assert float(row[column["step, s"]]) == pytest.approx(plan.time.total_s, rel=0.005)
        assert float(row[column["GiB"]]) == pytest.approx(plan.memory.total / 2**30, abs=0.05)


def test_memory_near_the_limit_is_marked(study):
    total = study.plans[0].memory.total
    for share, is_marked in ((0.9, False), (0.97, True)):
        gpu = replace(study.request.device, memory_gib=total / share / 2**30)
        page = render_report(replace(study, request=replace(study.request, device=gpu), plans=study.plans[:1]))
        assert ('<td class="over">' in page) == is_marked


def test_bars_are_as_long_as_their_parts(study):
    parts = [plan.memory_parts for plan in study.plans]
    names = [format_compact_mapping(plan.mapping) for plan in study.plans]
    (axes,) = draw_bars(names, parts, MEMORY_COLOURS, "bytes", {"all": 8e10}).axes
    for place, own in enumerate(parts):
        ends = [bar.get_x() + bar.get_width() for bars in axes.containers for bar in [bars[place]]]
        assert max(ends) == pytest.approx(sum(own.values()))
        widths = {bars.get_label(): bars[place].get_width() for bars in axes.containers}
        assert widths == pytest.approx({name: own[name] for name in widths})
    assert [line.get_xdata()[0] for line in axes.lines] == [8e10]


def test_the_numbers_are_there_for_programs(page, study):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["model"] == study.request.model_spec.name
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


def test_a_file_that_cannot_be_written_is_refused(study, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_report(study, tmp_path / "nowhere" / "report.html")
