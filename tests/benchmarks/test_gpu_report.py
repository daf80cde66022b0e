"""docs/gpu.md is the output of its script, and results fill its cells."""

import json

import pytest
import torch

from benchmarks import gpu_stages
from benchmarks.gpu_half_hour import suite_stages
from benchmarks.gpu_report import EMPTY, PAGE, PREDICTIONS, render
from moefold.cost.hardware import load_device

STORED = json.loads(PREDICTIONS.read_text())
ROW = {"stage": "rates", "name": "copy", "unit": "GB/s", "low": 10, "high": 20, "derivation": "a guess"}
PLAN = {"name": "a step", "h200_ms": 12.5}
PREDICTED = {"stages": [{"name": "rates", "seconds": 9, "proves": "rates"}], "rows": [ROW], "plans": [PLAN]}


def _results(*rows, stage="rates"):
    machine = {"device": "an abacus", "torch": "2.11.0", "python": "3.12", "sizes": "full"}
    entry = {"status": "passed", "seconds": 3.5, "rows": list(rows)}
    return {"machine": machine, "stages": {stage: entry}}


def test_the_page_is_the_output_of_its_script():
    assert PAGE.read_text() == render(STORED, EMPTY), "python -m benchmarks.gpu_report --write"


def test_a_page_without_results_has_empty_cells():
    page = render(PREDICTED, EMPTY)
    assert "Nothing of moefold has run on a GPU yet" in page
    assert "| rates | rates | 9 |  |  |" in page
    assert "| rates | copy | 10 to 20 GB/s | a guess |  |" in page
    assert page.endswith("## Other measurements\nNone yet.\n")


@pytest.mark.parametrize(("value", "cell"), [(9.5, "9.5 (below)"), (15.0, "15"), (21.0, "21 (above)")])
def test_results_fill_the_cells(value, cell):
    other = {"name": "triton", "value": "3.6.0", "unit": ""}
    page = render(PREDICTED, _results({"name": "copy", "value": value, "unit": "GB/s"}, other))
    assert "Measured on an abacus, torch 2.11.0, Python 3.12." in page
    assert "Nothing of moefold" not in page
    assert "| rates | rates | 9 | passed | 3.5 |" in page
    assert f"| rates | copy | 10 to 20 GB/s | a guess | {cell} |" in page
    assert "| rates | triton | 3.6.0  |" in page
    assert page.count("| copy |") == 1


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"sizes": "tiny"}])
def test_a_rehearsal_is_no_measurement(change):
    results = _results()
    results["machine"] |= change
    page = render(PREDICTED, results)
    assert "A rehearsal on" in page
    assert "Measured on" not in page


def test_reports_of_the_bench_are_rows_of_the_page():
    rows = [{"name": "moefold", "median_s": 0.0125}]
    report = {"kind": "comparison", "rows": rows, "pieces": [{"name": "router", "seconds": 0.001}]}
    page = render(PREDICTED, _results(report, stage="bench-x"))
    assert "| bench-x | moefold | 12.5 ms |" in page
    assert "| bench-x | part: router | 1 ms |" in page


def test_a_step_is_next_to_its_plan():
    assert "| a step | 12.5 |  |  |  |" in render(PREDICTED, EMPTY)
    planned = {"name": "a step, planned", "value": 8.0, "unit": "ms", "planned_over_measured": 0.8}
    page = render(PREDICTED, _results({"name": "a step", "value": 10.0, "unit": "ms"}, planned, stage="step"))
    assert "| a step | 12.5 | 8 | 10 | 0.80 |" in page
    assert page.endswith("None yet.\n")


def test_the_report_of_the_probe_is_rows_of_the_page():
    one = {"name": "GEMM bfloat16", "measured_s": 2e-3, "predicted_s": 1e-3}
    page = render(PREDICTED, _results({"predictions": [one]}, stage="probe"))
    assert "| probe | GEMM bfloat16 | 2 ms |" in page
    assert "| probe | GEMM bfloat16, fitted | 1 ms |" in page


def test_the_stored_plans_are_those_of_the_planner(tmp_path):
    stage = gpu_stages.Stage(torch.device("cuda", 0), is_tiny=False, rows=tmp_path / "rows.jsonl")
    device = load_device("h200")
    planned = {
        case[0]: round(gpu_stages.planned_step_s(gpu_stages.step_config(stage, case), device) * 1e3, 1)
        for case in gpu_stages.STEPS
    }
    assert {plan["name"]: plan["h200_ms"] for plan in STORED["plans"]} == planned


def test_predictions_are_of_rows_and_stages_that_exist(tmp_path):
    stages = suite_stages("proof", "cuda", tmp_path, is_tiny=False)
    assert [stage["name"] for stage in STORED["stages"]] == [stage.name for stage in stages]
    assert all(entry["seconds"] <= stage.limit_s for entry, stage in zip(STORED["stages"], stages, strict=True))
    cases = {f"{preset} {tokens} {routing}, moefold" for preset, tokens in gpu_stages.LAYERS
             for routing in ("balanced", "natural")}  # fmt: skip
    known = {("layer", name + what) for name in cases for what in ("", ", host waits")}
    known |= {("step", name + ", host waits") for name, *_ in gpu_stages.STEPS}
    for seq_len, heads, groups, qk_size, v_size in gpu_stages.ATTENTION_CASES:
        for backend in ("default", "cuDNN", "flash", "ring block"):
            known.add(("attention", f"S {seq_len}, {heads}/{groups} heads of {qk_size}/{v_size}, {backend}, forward"))
    path = tmp_path / "rows.jsonl"
    gpu_stages.main(["rates", "--rows", str(path), "--device", "cpu", "--tiny"])
    known |= {("rates", json.loads(line)["name"]) for line in path.read_text().splitlines()}
    predicted = {(row["stage"], row["name"]) for row in STORED["rows"]}
    assert predicted - known == set()
    assert len(predicted) == len(STORED["rows"])
    assert all(row["low"] <= row["high"] for row in STORED["rows"])


def test_predicted_layers_agree_with_the_estimate_of_the_kernels():
    """The tables of benchmarks/gpu_roofline.py in docs/kernels.md, for the same layers."""
    estimates = {}
    for line in (PAGE.parent / "kernels.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[3].endswith("%"):
            preset, _, tokens = cells[0].partition(", ")
            estimates[f"{preset} {tokens.replace(',', '')} balanced, moefold"] = (float(cells[2]), cells[3])
    rows = [row for row in STORED["rows"] if row["stage"] == "layer" and row["unit"] == "ms"]
    assert len(rows) == len(gpu_stages.LAYERS)
    for row in rows:
        estimate_ms, share = estimates[row["name"]]
        assert row["low"] <= estimate_ms <= row["high"], row["name"]
        assert f"{share.replace('%', ' %')} by benchmarks/gpu_roofline.py" in row["derivation"]
