"""docs/gpu.md is the output of its script, and results fill its cells."""

import json

import pytest
import torch

from benchmarks import gpu_stages
from benchmarks.gpu_report import EMPTY, KINDS, PAGE, render
from benchmarks.gpu_suites import PREDICTIONS, suite_stages
from moefold.cost.hardware import load_device
from tests.gpu_static.uninterpreted import trace_uninterpreted

STORED = json.loads(PREDICTIONS.read_text())
COPY = {"stage": "rates", "name": "copy", "unit": "GB/s", "h100": [10, 20], "h200": [20, 40], "copy": 0, "gemm": 0,
        "derivation": "a guess"}  # fmt: skip
GEMM = COPY | {"name": "bfloat16 GEMM", "unit": "TFLOP/s", "h100": [90, 110], "h200": [90, 110]}
LAYER = COPY | {"stage": "layer", "name": "a layer", "unit": "ms", "h100": [8, 12], "h200": [6, 9], "copy": 0.5,
                "gemm": 0.25}  # fmt: skip
WAITS = COPY | {"stage": "layer", "name": "waits", "unit": "", "h100": [1, 1], "h200": [1, 1]}
PLAN = {"name": "a step", "h100_ms": 13.5, "h200_ms": 12.5}
PREDICTED = {
    "stages": [{"name": "rates", "seconds": 9, "proves": "rates"}],
    "rows": [COPY, GEMM, LAYER, WAITS],
    "plans": [PLAN],
}
MACHINE = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "triton": "3.6.0 cp312", "python": "3.12",
           "sizes": "full"}  # fmt: skip


def _row(name, value, unit=""):
    return {"name": name, "value": value, "unit": unit}


def _machine(stages, **machine):
    entries = {name: {"status": "passed", "seconds": 3.5, "rows": rows} for name, rows in stages.items()}
    return {"machine": MACHINE | machine, "stages": entries}


def _results(*rows, stage="rates"):
    return {"machines": [_machine({stage: list(rows)})]}


def _line(page, beginning):
    (line,) = [line for line in page.splitlines() if line.startswith(beginning)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_the_output_of_its_script():
    assert PAGE.read_text() == render(STORED, EMPTY), "python -m benchmarks.gpu_report --write"


def test_a_page_without_results_has_empty_cells():
    page = render(PREDICTED, EMPTY)
    assert "Nothing of moefold has run on a GPU yet" in page
    assert "| rates | rates | 9 |  |  |" in page
    assert "| rates | copy | 10 to 20 GB/s | 20 to 40 GB/s | a guess |  |  |" in page
    assert page.endswith("## Other measurements\nNone yet.\n")


@pytest.mark.parametrize(("value", "cell"), [(9.5, "9.5 (below)"), (15.0, "15"), (21.0, "21 (above)")])
def test_results_fill_the_cells(value, cell):
    page = render(PREDICTED, _results(_row("copy", value, "GB/s"), _row("triton", "3.6.0")))
    assert "Measured on NVIDIA H100 80GB HBM3, torch 2.11.0, Triton 3.6.0 cp312, Python 3.12." in page
    assert "Nothing of moefold" not in page
    assert "| rates | rates | 9 | passed | 3.5 |" in page
    assert f"| rates | copy | 10 to 20 GB/s | 20 to 40 GB/s | a guess | 10 to 20 GB/s | {cell} |" in page
    assert "| rates | triton | 3.6.0  |" in page
    assert page.count("| copy |") == 1


@pytest.mark.parametrize(
    ("copy", "gemm", "scaled"),
    [
        (15, 100, "8 to 12 ms"),  # the middle of the h100
        (15, 50, "10 to 15 ms"),  # a quarter of the time takes twice as long
        (7.5, 100, "12 to 18 ms"),  # a half takes twice as long
        (30, 100, "6 to 9 ms"),  # the middle of the h200
    ],
)
def test_predictions_are_scaled_by_the_measured_copy_and_gemm(copy, gemm, scaled):
    rates = [_row("copy", copy), _row("bfloat16 GEMM", gemm)]
    layer = [_row("a layer", 13.0), _row("waits", 1)]
    page = render(PREDICTED, {"machines": [_machine({"rates": rates, "layer": layer}, device="an abacus")]})
    found = _line(page, "| layer | a layer")
    assert found[5] == scaled
    low, high = map(float, scaled.removesuffix(" ms").split(" to "))
    assert found[6] == "13" + (" (above)" if high < 13 else " (below)" if low > 13 else "")
    assert _line(page, "| layer | waits")[5:] == ["1", "1"]
    # A card of another kind has no range of its own rates.
    assert _line(page, "| rates | copy")[5:] == ["", f"{copy:.4g}"]


def test_a_rate_is_scaled_like_its_time():
    rate = LAYER | {"unit": "TFLOP/s", "copy": 0, "gemm": 1}
    rates = [_row("copy", 15), _row("bfloat16 GEMM", 50)]
    page = render(PREDICTED | {"rows": [COPY, GEMM, rate]}, {"machines": [
        _machine({"rates": rates, "layer": [_row("a layer", 5.0)]})
    ]})  # fmt: skip
    assert _line(page, "| layer | a layer")[5:] == ["4 to 6 TFLOP/s", "5"]


def test_each_row_of_several_machines_is_scaled_by_the_rates_of_its_own():
    first = _machine({"rates": [_row("copy", 15), _row("bfloat16 GEMM", 100)], "layer": [_row("a layer", 9.0)]})
    second = _machine({"rates": [_row("copy", 30), _row("bfloat16 GEMM", 100)]}, device="NVIDIA H200")
    page = render(PREDICTED, {"machines": [first, second]})
    assert "Measured on NVIDIA H200" in page
    assert "| rates | rates | 9 | passed; passed | 3.5; 3.5 |" in page
    assert _line(page, "| layer | a layer")[5:] == ["8 to 12 ms", "9 on NVIDIA H100 80GB HBM3"]
    assert _line(page, "| rates | copy")[5:] == ["20 to 40 GB/s", "30 on NVIDIA H200"]


def test_carried_kernels_are_in_the_first_lines():
    machine = _machine({}) | {"kernels": {"carried": 176, "misfit": "for sm_90, and so on", "compiled": 40}}
    page = render(PREDICTED, {"machines": [machine]})
    assert "Of its kernels 176 were carried along (for sm_90, and so on); 40 were compiled there." in page


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"sizes": "tiny"}])
def test_a_rehearsal_is_not_a_measurement(change):
    page = render(PREDICTED, {"machines": [_machine({}, **change)]})
    assert "A rehearsal on" in page
    assert "Measured on" not in page


def test_reports_of_the_bench_are_rows_of_the_page():
    rows = [{"name": "moefold", "median_s": 0.0125}]
    report = {"kind": "comparison", "rows": rows, "pieces": [{"name": "router", "seconds": 0.001}]}
    page = render(PREDICTED, _results(report, stage="bench-x"))
    assert "| bench-x | moefold | 12.5 ms |" in page
    assert "| bench-x | part: router | 1 ms |" in page


def test_a_step_is_next_to_its_plan():
    assert "| a step | 13.5 | 12.5 |  |  |  |" in render(PREDICTED, EMPTY)
    stages = {"step": [_row("a step", 10.0, "ms")], "plan": [_row("a step, planned", 8.0, "ms")]}
    page = render(PREDICTED, {"machines": [_machine(stages)]})
    assert "| a step | 13.5 | 12.5 | 8 | 10 | 0.80 |" in page
    assert page.endswith("None yet.\n")


def test_a_measured_constant_is_next_to_its_price():
    priced = f"{1e6 * load_device('h100').sync_s:.0f} us"
    assert _line(render(PREDICTED, EMPTY), "| wait of a dropless layer") == [
        "wait of a dropless layer", "`sync_s`", priced, "constants", ""
    ]  # fmt: skip
    rows = {
        "constants": [_row("wait of a dropless layer", 123.4, "us")],
        "shared": [_row("exposed collectives of ZeRO-3", 0.21)],
    }
    page = render(PREDICTED, {"machines": [_machine(rows)]})
    assert _line(page, "| wait of a dropless layer")[4] == "123.4 us"
    assert _line(page, "| exposed collectives of ZeRO-3")[4] == "0.21"
    assert page.endswith("None yet.\n")


def test_the_report_of_the_probe_is_rows_of_the_page():
    one = {"name": "GEMM bfloat16", "measured_s": 2e-3, "predicted_s": 1e-3}
    page = render(PREDICTED, _results({"predictions": [one]}, stage="probe"))
    assert "| probe | GEMM bfloat16 | 2 ms |" in page
    assert "| probe | GEMM bfloat16, fitted | 1 ms |" in page


def test_the_stored_plans_equal_the_planner(tmp_path):
    stage = gpu_stages.Stage(torch.device("cuda", 0), is_tiny=False, rows=tmp_path / "rows.jsonl")
    for kind in KINDS:
        device = load_device(kind)
        planned = {
            case[0]: round(gpu_stages.planned_step_s(gpu_stages.step_config(stage, case), device) * 1e3, 1)
            for case in gpu_stages.STEPS
        }
        assert {plan["name"]: plan[f"{kind}_ms"] for plan in STORED["plans"]} == planned


def test_predictions_are_of_rows_and_stages_that_exist(tmp_path):
    stages = suite_stages("proof", "cuda", tmp_path, is_tiny=False)
    assert [stage["name"] for stage in STORED["stages"]] == [stage.name for stage in stages]
    assert all(entry["seconds"] <= stage.limit_s for entry, stage in zip(STORED["stages"], stages, strict=True))
    cases = {f"{preset} {tokens} {routing}, moefold" for preset, tokens in gpu_stages.LAYERS
             for routing in ("balanced", "natural")}  # fmt: skip
    known = {("layer", name + what) for name in cases for what in ("", ", rate", ", host waits")}
    known |= {("step", name + ", host waits") for name, *_ in gpu_stages.STEPS}
    for seq_len, heads, groups, qk_size, v_size in gpu_stages.ATTENTION_CASES:
        for backend in ("default", "cuDNN", "flash", "ring block"):
            known.add(("attention", f"S {seq_len}, {heads}/{groups} heads of {qk_size}/{v_size}, {backend}, forward"))
    title = gpu_stages.pages_title(*(large for large, _ in gpu_stages.PAGES_SIZES))
    known |= {("attention", f"{title}, pages {how}") for how in ("read", "gathered")}
    path = tmp_path / "rows.jsonl"
    gpu_stages.main(["rates", "--rows", str(path), "--device", "cpu", "--tiny"])
    known |= {("rates", json.loads(line)["name"]) for line in path.read_text().splitlines()}
    predicted = {(row["stage"], row["name"]) for row in STORED["rows"]}
    assert predicted - known == set()
    assert len(predicted) == len(STORED["rows"])
    for row in STORED["rows"]:
        assert all(low <= high for low, high in (row[kind] for kind in KINDS))
        assert 0 <= row["copy"] + row["gemm"] <= 1


def test_predicted_layers_agree_with_the_estimate_of_the_kernels():
    """The tables of benchmarks/gpu_roofline.py in docs/kernels-cuda.md, for the same layers."""
    estimates = {}
    for line in (PAGE.parent / "kernels-cuda.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[3].endswith("%"):
            preset, _, tokens = cells[0].partition(", ")
            estimates[f"{preset} {tokens.replace(',', '')} balanced, moefold"] = (float(cells[2]), cells[3])
    rows = [row for row in STORED["rows"] if row["stage"] == "layer" and row["unit"] == "ms"]
    assert len(rows) == len(gpu_stages.LAYERS)
    for row in rows:
        estimate_ms, share = estimates[row["name"]]
        assert row["h200"][0] <= estimate_ms <= row["h200"][1], row["name"]
        assert f"{share.replace('%', ' %')} by benchmarks/gpu_roofline.py" in row["derivation"]


SHARES = """
import json
from benchmarks import gpu_roofline as roofline
from benchmarks.gpu_stages import LAYERS
known = dict(roofline.RATES)
gemms = [name for name in known if "gemm" in name or "gradient" in name]
gemms = [name for name in gemms if name not in ("float32 gemm", "triton grouped gemm")]
def estimate_s(layer, names, factor=1.1):
    roofline.RATES.update({name: rate._replace(value=rate.value * (factor if name in names else 1.0))
                           for name, rate in known.items()})
    return roofline.estimate_layer(roofline.Layer(*layer)).total
shares = {}
for layer in LAYERS:
    whole = estimate_s(layer, [])
    shares[f"{layer[0]} {layer[1]} balanced, moefold"] = {
        share: (1 - estimate_s(layer, names) / whole) / (1 - 1 / 1.1)
        for share, names in (("copy", ["memory"]), ("gemm", gemms))
    }
print(json.dumps(shares))
"""


@pytest.mark.slow
def test_shares_of_layers_equal_the_estimate():
    """The share of a rate is by how much the estimate falls where the rate rises."""
    pytest.importorskip("triton")
    found = trace_uninterpreted("-c", SHARES)
    for name, shares in found.items():
        (row,) = [row for row in STORED["rows"] if row["name"] == name]
        assert {share: row[share] for share in shares} == pytest.approx(shares, abs=0.02), name
