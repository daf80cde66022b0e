"""Write docs/gpu.md: how to run on a GPU, and predictions next to measurements.

`python -m benchmarks.gpu_report [RESULTS.json] [--write]`. Predictions are in benchmarks/gpu_predictions.json; results
are those of benchmarks/gpu_half_hour.py. What was not measured is an empty cell.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_half_hour import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 118
PAGE = ROOT / "docs" / "gpu.md"
PREDICTIONS = ROOT / "benchmarks" / "gpu_predictions.json"
EMPTY: Mapping[str, Any] = {"machine": {}, "stages": {}}
HOW_TO_RUN = """\
# Running on a GPU

{status}

This page is the output of `python -m benchmarks.gpu_report RESULTS.json --write`; without a results file, measured
cells are empty.

## How to run
```
make gpu                            # with .venv: the stages below, at most 10 minutes a call
make gpu READY= PY=python3          # without .venv, with any Python that has the packages
make gpu READY= PY=python3 ARGS="--device cpu --tiny"    # a rehearsal without a GPU
make bench-gpu READY= PY=python3    # two large shapes next to other implementations, one call
make bench-gpu-sweep                # every large shape, call after call
```
Each stage is a child process with a time limit. No stage starts that could exceed the 10 minutes of a call; the next
call goes on with the first stage that has no result. Results are in `runs/gpu/results.json`, with a log of each stage
next to it (a rehearsal: `runs/gpu-rehearsal`). Results of another device or torch are not continued.

| exit status | meaning |
| --- | --- |
| 0 | all stages have results |
| 1 | a stage failed or reached its limit; `--stages NAME --again` runs it again |
| 2 | nothing could run: no CUDA device, a missing package, results of another machine |
| 3 | stages remain: call again |

`make` prints the status as `Error 3` and itself exits with 2. `ARGS` has more options:
`python3 benchmarks/gpu_half_hour.py --help`.

{packages}

`pytest -m gpu` runs the tests alone. Four files at a time (`-n 4 --dist loadfile`) they should take about 4 minutes
and one after another about 8, estimated from counts: 243 tests of Triton kernels at 1 s, most of it compilation (115
kernels compile ahead of time in 120 to 240 s of CPU time); 18 runs of several ranks on one GPU at 8 s, most of it
starting processes; 63 others at 1 to 2 s. Every rendezvous uses a free port.
"""
PACKAGES_TEXT = (
    "**Packages.** moefold itself need not be installed: the stages take it from `src`. The Python needs {names}, at "
    "least torch 2.11, and Triton 3.6 for the kernels (a CUDA wheel of torch brings it along). Into an environment "
    "whose torch must not change: `pip install -e . --no-deps`, then `pip install` of what is missing; `pydantic` is "
    "what an image made for torch usually lacks, and it needs `pydantic-core`, `annotated-types`, `typing-inspection` "
    "and `typing-extensions`. `transformers` and `torchtitan` take part in the comparisons where they are installed."
)
NOT_RUN = "**Nothing of moefold has run on a GPU yet.** All numbers of this page are predictions."
REHEARSED = "A rehearsal on {device} with {sizes} sizes: no number of this page is a measurement of a GPU."
RUN = "Measured on {device}, torch {torch}, Python {python}."
PREDICTIONS_TEXT = """\
## Predictions and measurements
Estimates for an H200: the least bytes over 4,000 GB/s, and FLOPs over 790 TFLOP/s times the efficiency of the kernel.
On an H100 the operations that move memory take 1.4 times as long, and GEMMs as long. A measurement outside of the
range has to be explained, the bfloat16 rate of the machine first.
"""
PLANS_TEXT = """\
## Plan and measurement
What the planner predicts for the steps of the stage `step`, with the rates of its device `h200` and with those that
the stage `probe` measured in the same session. It predicts the same time for every `loss_chunk`. For a run of your own:
```
moefold probe this-machine.toml
moefold simulate --run RUN_DIR --gpu this-machine.toml
```
[cost-model.md](cost-model.md#a-plan-checked-against-a-run-on-the-same-machine) has such a comparison on a CPU.
"""


def main() -> int:
    """Print the page, or write it with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="results.json (default: none, all cells empty)")
    parser.add_argument("--write", action="store_true", help="write docs/gpu.md")
    args = parser.parse_args()
    results = EMPTY if args.results is None else json.loads(args.results.read_text())
    page = render(json.loads(PREDICTIONS.read_text()), results)
    if args.write:
        PAGE.write_text(page)
    else:
        print(page, end="")
    return 0


def render(predictions: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return the page."""
    machine = results["machine"]
    names = ", ".join(f"`{name}`" for name in PACKAGES.values())
    packages = textwrap.fill(PACKAGES_TEXT.format(names=names), COLUMNS, break_on_hyphens=False)
    lines = [
        HOW_TO_RUN.format(status=_status(machine), packages=packages),
        "## Stages",
        "| stage | proves or measures | predicted s | status | measured s |",
        "| --- | --- | --- | --- | --- |",
        *_stage_lines(predictions["stages"], results["stages"]),
        "",
        PREDICTIONS_TEXT,
        "| stage | quantity | predicted | derivation | measured |",
        "| --- | --- | --- | --- | --- |",
        *_prediction_lines(predictions["rows"], results["stages"]),
        "",
        PLANS_TEXT,
        "| step | planned for h200, ms | planned with probe, ms | measured, ms | planned with probe / measured |",
        "| --- | --- | --- | --- | --- |",
        *_plan_lines(predictions["plans"], results["stages"]),
        "",
        "## Other measurements",
        *_other_lines(predictions, results["stages"]),
    ]
    return "\n".join(lines) + "\n"


def _status(machine: Mapping[str, str]) -> str:
    if not machine:
        return NOT_RUN
    is_rehearsal = machine["device"] == "cpu" or machine["sizes"] == "tiny"
    return (REHEARSED if is_rehearsal else RUN).format(**machine)


def _stage_lines(stages: list[dict[str, Any]], results: Mapping[str, Any]) -> Iterator[str]:
    for stage in stages:
        entry = results.get(stage["name"], {"status": "", "seconds": ""})
        yield f"| {stage['name']} | {stage['proves']} | {stage['seconds']} | {entry['status']} | {entry['seconds']} |"


def _prediction_lines(rows: list[dict[str, Any]], results: Mapping[str, Any]) -> Iterator[str]:
    measured = _measured_rows(results)
    for row in rows:
        low = f"{row['low']:g}"
        predicted = low if row["low"] == row["high"] else f"{low} to {row['high']:g}"
        found = measured.get((row["stage"], row["name"]))
        cell = "" if found is None else f"{found['value']:.4g}{_verdict(found['value'], row)}"
        yield f"| {row['stage']} | {row['name']} | {predicted} {row['unit']} | {row['derivation']} | {cell} |"


def _plan_lines(plans: list[dict[str, Any]], results: Mapping[str, Any]) -> Iterator[str]:
    measured = _measured_rows(results)
    for plan in plans:
        planned, found = (measured.get(key) for key in _plan_keys(plan))
        cells = ["" if row is None else f"{row['value']:.4g}" for row in (planned, found)]
        ratio = "" if planned is None else f"{planned['planned_over_measured']:.2f}"
        yield f"| {plan['name']} | {plan['h200_ms']:g} | {' | '.join(cells)} | {ratio} |"


def _plan_keys(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys of the rows of a step: the planner's time with the probed rates, and the measured one."""
    return [("step", f"{plan['name']}, planned"), ("step", plan["name"])]


def _verdict(value: float, row: Mapping[str, Any]) -> str:
    if value < row["low"]:
        return " (below)"
    return " (above)" if value > row["high"] else ""


def _other_lines(predictions: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    predicted = {(row["stage"], row["name"]) for row in predictions["rows"]}
    predicted |= {key for plan in predictions["plans"] for key in _plan_keys(plan)}
    others = {key: row for key, row in _measured_rows(results).items() if key not in predicted}
    if not others:
        yield "None yet."
        return
    yield "| stage | quantity | measured |"
    yield "| --- | --- | --- |"
    for (stage, name), row in others.items():
        value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g}"
        yield f"| {stage} | {name} | {value} {row['unit']} |"


def _measured_rows(results: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of all stages by stage and name; reports of `moefold bench` and `moefold probe` as rows."""
    found = {}
    for stage, entry in results.items():
        for row in entry["rows"]:
            for measured in _report_rows(row):
                found[(stage, measured["name"])] = measured
    return found


def _report_rows(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "kind" in row:
        yield from _bench_rows(row)
    elif "predictions" in row:
        for one in row["predictions"]:
            yield {"name": one["name"], "value": one["measured_s"] * 1e3, "unit": "ms"}
            yield {"name": f"{one['name']}, fitted", "value": one["predicted_s"] * 1e3, "unit": "ms"}
    else:
        yield row


def _bench_rows(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the times of a report of `moefold bench` or `moefold bench scaling`."""
    for row in report.get("rows", ()):
        yield {"name": row["name"], "value": row["median_s"] * 1e3, "unit": "ms"}
    for piece in report.get("pieces", ()):
        yield {"name": f"part: {piece['name']}", "value": piece["seconds"] * 1e3, "unit": "ms"}
    for point in report.get("by_tokens", ()):
        yield {"name": f"{point['tokens']:,} tokens", "value": point["median_s"] * 1e3, "unit": "ms"}
    for point in report.get("by_experts", ()):
        yield {"name": f"{point['experts']} experts", "value": point["median_s"] * 1e3, "unit": "ms"}


if __name__ == "__main__":
    sys.exit(main())
