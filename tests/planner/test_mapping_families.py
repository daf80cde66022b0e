"""The families of a plan: the best mapping of each, the nearest measurement, and the mapping that is taken."""

import csv
import io
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.measured_mappings import MEASURED_COLUMNS, measured_rows
from moefold.cli.main import main
from moefold.cli.plan_table import print_families
from moefold.cli.screen import open_console
from moefold.cost.hardware import DECIDING_CONSTANTS
from moefold.planner.mapping import ParallelMapping, format_compact_degrees
from moefold.planner.mapping_families import (
    FAMILIES,
    STATED_ERROR,
    FamilyBest,
    NearestMeasurement,
    best_of_families,
    choose_family,
    nearest_measured,
)
from moefold.planner.plan_request import PlanOptions, plan_request
from moefold.planner.planner import Planner
from moefold.planner.search.search import PlannedMapping
from tests.slow import slow

SMALL = ["plan", "tiny", "--gpu", "h100", "--num-gpus", "8", "--seq-len", "64", "--global-batch-size", "16"]
TABLE = Path(__file__).parent / "published" / "calibration.csv"


def planner_of(
    model: str,
    num_gpus: int,
    fix: dict | None = None,
    *,
    offload: bool = False,
    gpu: str = "h100",
    seq_len: int = 4096,
    batch: int = 64,
) -> Planner:
    options = PlanOptions(num_gpus=num_gpus, seq_len=seq_len, global_batch_size=batch, fix=fix or {}, offload=offload)
    return Planner(plan_request(model, gpu, options))


@pytest.mark.parametrize(("model", "num_gpus"), [("olmoe-1b-7b", 8), *slow([("tiny", 8), ("mixtral-8x7b", 32)])])
def test_every_family_is_the_best_of_its_part_of_the_space(model, num_gpus):
    groups = [*FAMILIES.values()]
    fixed = {"cp": 1, "pp": 1}
    together = planner_of(model, num_gpus, fixed).search.find(groups)
    for group, found in zip(groups, together, strict=True):
        zeros = group.zero_stages
        alone = [planner_of(model, num_gpus, fixed | {"zero": zero}).search.find([group])[0] for zero in zeros]
        assert bool(found) == any(alone)
        if found:
            assert found[0].time.total_s == pytest.approx(min(p[0].time.total_s for p in alone if p), rel=1e-12)
    families = {one.name: one.plan for one in best_of_families(planner_of(model, num_gpus, fixed))}
    assert families
    fastest_s = min(found[0].time.total_s for found in together if found)
    for (name, plan), found in zip(families.items(), filter(None, together), strict=True):
        m = plan.mapping
        assert plan.memory.fits
        assert (m.zero == 3) == (name == "fsdp")
        assert name != "coupled" or (m.etp == m.tp and (m.dp * m.cp) % m.ep == 0)
        # A mapping with measured degrees may stand for a faster one within the error.
        limit_s = max(fastest_s, found[0].time.total_s) * (1 + STATED_ERROR.tie_pct / 100)
        assert found[0].time.total_s * (1 - 1e-12) <= plan.time.total_s <= limit_s


PAPER = {
    "zero": 1,
    "mbs": 1,
    "dispatcher": "alltoall",
    "overlap": False,
    "recompute": (),
    "offload": (),
}


@pytest.mark.parametrize(
    ("question", "degrees"),
    [
        # Mappings that fit at three snapshots of the step, and not at another one, are faster than all that fit.
        (("qwen2-57b-a14b", 64, "h200", 4096, 256), {"tp": 1, "pp": 2, "ep": 8}),
        # Hundreds of mappings without a pipeline have lower bounds, and do not fit.
        (("mixtral-8x22b", 1024, "h100", 131072, 128), {"tp": 8, "cp": 8, "pp": 8, "ep": 8}),
    ],
    ids=["a mapping that fits almost", "a long context"],
)
def test_the_beam_contains_the_result_of_an_exhaustive_search(question, degrees):
    """A search of a part of the space, small enough to be exact, has nothing that the search of all of it lacks."""
    model, num_gpus, gpu, seq_len, batch = question
    found = [
        planner_of(model, num_gpus, PAPER | fixed, gpu=gpu, seq_len=seq_len, batch=batch) for fixed in ({}, degrees)
    ]
    part = found[1].search.plans_below(float("inf"))
    assert found[0].best().time.total_s <= min(plan.time.total_s for plan in part)


def test_offload_is_searched_where_it_is_asked_for():
    assert not {moments for _, moments in planner_of("tiny", 2).search.memory.placements} - {"none"}
    assert not any(offload for _, offload in planner_of("tiny", 2).space.strategies)
    assert any(offload for _, offload in planner_of("tiny", 2, offload=True).space.strategies)
    fixed = planner_of("tiny", 2, {"offload": ("core_attention",), "moments": "host"})
    assert {offload for _, offload in fixed.space.strategies} == {("core_attention",)}


def test_a_measured_mapping_is_its_own_nearest_one():
    request = planner_of("mixtral-8x22b", 128).request
    measured = ParallelMapping(tp=2, dp=8, pp=8, ep=8, edp=2, mbs=1)
    assert nearest_measured(request, measured).differences == ()
    assert "mixtral-8x22b on 128 h100, 4096 tokens" in nearest_measured(request, measured).case
    far = nearest_measured(request, replace(measured, ep=2, edp=8, zero=3, offload=("layer",)))
    assert {text.split()[0] for text in far.differences} >= {"offload"}
    longer = replace(request, workload=replace(request.workload, seq_len=8192))
    assert nearest_measured(longer, measured).differences == ("seq_len 4096 -> 8192",)


@pytest.mark.parametrize("every", [4, *slow([(1,)])])
def test_the_shipped_mappings_equal_the_table(tmp_path, every):
    """One of four rows of the table in `make test`."""
    head, *lines = TABLE.read_text().splitlines(keepends=True)
    some = tmp_path / "some.csv"
    some.write_text(head + "".join(lines[::every]))
    text = (files("moefold.planner") / "measured.csv").read_text("utf-8")
    shipped = list(csv.DictReader(io.StringIO(text)))
    assert tuple(shipped[0]) == MEASURED_COLUMNS
    assert all(row["source"] for row in shipped)
    keys = {tuple(row[name] for name in MEASURED_COLUMNS[:-1]) for row in shipped}
    assert len(keys) == len(shipped)
    # Only the micro-batches, virtual stages and ZeRO stages that a source leaves open depend on prices.
    open_axes = ("mbs", "zero", "recompute")
    fixed = [name for name in MEASURED_COLUMNS[:-1] if name not in open_axes]
    table = {tuple(str(row[name]) for name in fixed) for row in measured_rows(some)}
    assert table
    assert table <= {tuple(row[name] for name in fixed) for row in shipped}


def family(name: str, seconds: float, differences: int, *, ep: int = 8, is_tie: bool = True) -> FamilyBest:
    plan = planner_of("tiny", 8).search.price(
        ParallelMapping(dp=8, ep=ep, edp=8 // ep, zero=3 if name == "fsdp" else 1)
    )
    plan = PlannedMapping(plan.mapping, replace(plan.time, total_s=seconds), plan.memory)
    return FamilyBest(name, plan, NearestMeasurement("", "", ("axis",) * differences), is_tie, plan)


def test_the_nearest_to_a_measurement_of_equal_families_is_taken():
    near, fast = family("folded", 1.03, 1), family("fsdp", 1.0, 2)
    assert choose_family([near, fast]) is near
    assert choose_family([near, fast], "fsdp") is fast
    assert choose_family([replace(near, is_tie=False), fast]) is fast
    assert choose_family([near, fast], "coupled") is None
    # Families without any measurement come last.
    unmeasured = family("fsdp", 1.0, 0, ep=1)
    assert unmeasured.unmeasured == ("ZeRO-3 with ep 1",)
    assert choose_family([near, unmeasured]) is near


def test_a_family_names_its_fastest_mapping_which_the_ranking_has(capsys, monkeypatch):
    """A slower mapping with measured degrees stands for it; without its name the two tables would disagree."""
    planner = planner_of("mixtral-8x7b", 32)
    families = best_of_families(planner)
    best = planner.top_plans(1)[0]
    assert min(one.fastest.time.total_s for one in families) == pytest.approx(best.time.total_s, rel=1e-12)
    folded = families[0]
    assert folded.plan.time.total_s > 1.001 * folded.fastest.time.total_s
    monkeypatch.setenv("COLUMNS", "80")
    print_families(open_console(), families, folded, planner.request.device)
    words = " ".join(capsys.readouterr().out.split())
    less = 1 - folded.fastest.time.total_s / folded.plan.time.total_s
    assert f"{format_compact_degrees(folded.fastest.mapping)} takes {less:.1%} less" in words


def test_the_command_shows_the_families_and_writes_the_chosen_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    recipe = tmp_path / "planned.toml"
    few = [*SMALL, "--fix", "cp=1,pp=1"]
    assert main([*few, "--take", "fsdp", "--recipe", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if not line.startswith("next:")) <= 80
    assert "Megatron-Bridge counts half: x" in " ".join(out.split())
    assert " from " in out
    assert "zero = 3" in recipe.read_text()
    assert main([*few, "--json", "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unmeasured_constants"] == list(DECIDING_CONSTANTS)
    families = found["families"]
    assert set(families) <= set(FAMILIES)
    assert all(one["nearest_source"] for one in families.values())
    assert main([*few, "zero=1", "--take", "fsdp"]) == 2
    assert "--take fsdp: no such mapping is legal and fits" in capsys.readouterr().err


def test_a_plan_says_which_deciding_constants_are_unmeasured_on_the_device(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    head = 'base = "h100"\nname = "mine"\nexposed_zero3_fraction = 0.1\nexposed_offload_fraction = 0.1\n'
    head += "[sources]\n"
    mark = "constants: unmeasured on mine:"
    for measured, missing in ((list(DECIDING_CONSTANTS)[1:], ["host_launch_s"]), (list(DECIDING_CONSTANTS), [])):
        path = tmp_path / f"{len(measured)}.toml"
        path.write_text(head + "".join(f'{key} = "make gpu"\n' for key in measured))
        command = [*SMALL[:3], str(path), *SMALL[4:], "--fix", "zero=1,cp=1,pp=1,tp=1,etp=1"]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert max(len(line) for line in out.splitlines() if not line.startswith("next:")) <= 80
        names = "".join(f"{mark} {DECIDING_CONSTANTS[key]}; make gpu measures them (docs/gpu.md)." for key in missing)
        assert names in " ".join(out.split())
        assert (mark in out) == bool(missing)
        assert main([*command, "--json", "--top", "1"]) == 0
        assert json.loads(capsys.readouterr().out)["unmeasured_constants"] == missing
