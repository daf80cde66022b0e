"""Files of a timeline: events and arrows for Perfetto, and lanes, bars and legend of the picture."""

import json
import re
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import pytest

from moefold.cli.timeline_file import TRACKS, chrome_trace, write_timeline
from moefold.errors import ConfigError
from moefold.planner.cost_model.block import CostItem
from moefold.planner.simulator.simulate import StageSegments, StepTail, simulate
from moefold.planner.simulator.timeline import COMMUNICATION, COMPUTE, SEND, subtract_spans
from moefold.topology.schedules import schedule_rows

SVG = "{http://www.w3.org/2000/svg}"
CHAIN = (CostItem("attention", 2.0), CostItem("ep_comm", 1.0), CostItem("experts", 3.0))
WORK = StageSegments(forward=CHAIN, backward=CHAIN * 2, input_gradient=CHAIN, weight_gradient=CHAIN[:1], p2p_s=0.25)


def step(schedule="interleaved", chunks=2, micro_batches=4, *, overlap=False):
    rows = schedule_rows(schedule, 2, chunks, micro_batches, overlap=overlap)
    return simulate(rows, [WORK] * 2 * chunks, overlap=overlap, tail=StepTail(1.0, 0.5))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_has_every_event_where_perfetto_looks_for_it(overlap):
    timeline = step(overlap=overlap)
    events = json.loads(json.dumps(chrome_trace(timeline)))
    slices = [event for event in events if event["ph"] == "X"]
    streams = [event for event in slices if event["tid"] >= TRACKS.index(COMPUTE)]
    expected = [
        (e.rank, TRACKS.index(e.stream), e.part, e.start_s * 1e6, (e.end_s - e.start_s) * 1e6) for e in timeline.events
    ]
    assert sorted((e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in streams) == sorted(expected)
    passes = [event for event in slices if event["tid"] < TRACKS.index(COMPUTE)]
    assert len(passes) == 2 * 4 * 4
    assert {event["args"]["action"] for event in passes} == {
        f"{s}{k}{m}" for s in range(4) for k in "FB" for m in range(4)
    }
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "pipeline rank 0"), (1, "pipeline rank 1")}
    # Slices of a track may hold each other, but never cross.
    for pid in range(2):
        for tid in range(len(TRACKS)):
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == (pid, tid))
            for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
                assert start >= end - 1e-3


def test_an_arrow_leads_from_every_message_to_the_pass_that_reads_it():
    timeline = step()
    events = chrome_trace(timeline)
    sends = [event for event in timeline.events if event.stream == SEND]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert len(starts) == len(ends) == len(sends) == 4 * 6
    for number, end in ends.items():
        assert end["ts"] >= starts[number]["ts"] + 0.25e6 - 1e-3
        assert end["pid"] != starts[number]["pid"]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_picture_has_a_lane_for_each_rank_and_a_bar_for_each_pass(tmp_path, overlap):
    path = tmp_path / "step.svg"
    timeline = step(overlap=overlap)
    with mpl.rc_context({"svg.fonttype": "none"}):
        write_timeline(timeline, path)
    tree = ElementTree.parse(path)
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("pp rank")] == ["pp rank 0", "pp rank 1"]
    # Each micro-batch is written once in each of its passes of four stages; the axis adds numbers of its own.
    assert all(texts.count(str(m)) >= 8 for m in range(1, 4))
    assert any(text and re.match(r"step .* s, bubble .*% of the work", text) for text in texts)


def test_the_legend_names_the_shown_parts(tmp_path):
    path = tmp_path / "step.svg"
    found = {}
    for schedule, stages in (("1f1b", 1), ("zero-bubble", 1)):
        with mpl.rc_context({"svg.fonttype": "none"}):
            write_timeline(step(schedule, stages), path)
        found[schedule] = {element.text for element in ElementTree.parse(path).iter(f"{SVG}text")}
    assert "backward" in found["1f1b"]
    assert not {"gradients of inputs", "gradients of weights"} & found["1f1b"]
    assert {"gradients of inputs", "gradients of weights"} <= found["zero-bubble"]
    assert "backward" not in found["zero-bubble"]


def test_the_passes_of_a_long_step_have_no_number(tmp_path):
    path = tmp_path / "step.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        write_timeline(step("1f1b", 1, 200), path)
    texts = [element.text for element in ElementTree.parse(path).iter(f"{SVG}text")]
    assert not {"1", "101", "199"} & set(texts)


def test_a_png_is_drawn(tmp_path):
    path = tmp_path / "step.png"
    write_timeline(step("zero-bubble", 1), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_exposed_communication_lies_where_nothing_is_computed():
    computed = [(0.0, 1.0), (1.5, 3.0), (4.0, 5.0), (9.0, 12.0), (13.0, 14.0)]
    assert subtract_spans([(2.0, 10.0), (10.5, 13.5)], computed) == [(3.0, 4.0), (5.0, 9.0), (12.0, 13.0)]
    assert subtract_spans([(2.0, 10.0)], []) == [(2.0, 10.0)]
    timeline = step(overlap=True)
    for rank in range(2):
        busy = timeline.spans(rank, COMMUNICATION)
        compute = timeline.spans(rank, COMPUTE)
        exposed = timeline.exposed(rank)
        assert 0 < timeline.exposed_s(rank) < sum(end - start for start, end in busy)
        # The rest of the collectives is hidden by compute, and compute hides nothing of the exposed ones.
        assert subtract_spans(subtract_spans(busy, exposed), compute) == []
        assert subtract_spans(exposed, compute) == exposed


@pytest.mark.parametrize("name", ["step", "step.gif", "step.txt"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"must end in \.json, for Perfetto, or in \.png, \.svg or \.pdf"):
        write_timeline(step(), tmp_path / name)


@pytest.mark.parametrize("name", ["step.json", "step.png"])
def test_an_unwritable_file_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        write_timeline(step(), tmp_path / name)
