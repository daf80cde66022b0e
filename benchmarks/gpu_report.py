"""Write docs/gpu.md: how to run on a GPU, and predictions next to measurements.

`python -m benchmarks.gpu_report [RESULTS.json] [--write]`. Predictions are in benchmarks/gpu_predictions.json; results
come from benchmarks/gpu_half_hour.py. An empty cell was not measured.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_suites import LIBRARIES, PREDICTIONS, TEST_LIBRARIES
from moefold.cost.hardware import DECIDING_CONSTANTS, load_device
from moefold.planner.cost_model.data_parallel import EXPOSED_ZERO3_FRACTION
from moefold.planner.cost_model.step import EXPOSED_OFFLOAD_FRACTION

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 118
PAGE = ROOT / "docs" / "gpu.md"
EMPTY: Mapping[str, Any] = {"machines": []}
KINDS = ("h100", "h200")
"""Kinds of GPU with predictions."""
YARDSTICK_ROWS = {"copy": "copy", "gemm": "bfloat16 GEMM"}
"""Row of the stage `rates` that scales the share of a prediction with this name."""
HOW_TO_RUN = """\
# Running on a GPU

If you have a machine with an NVIDIA GPU, one command checks every CUDA path of moefold there, and times it. You get a
table of what passed, and the rates that make plans for your GPU more exact.

{status}

```
make gpu                            # with .venv: the stages below, at most 10 minutes a call
make gpu READY= PY=python3          # without .venv, with any Python that has the packages
```

**The idea.** A GPU is often lent for minutes only. The work is therefore cut into [stages](#stages), the most useful
first. Each is a child process with a time limit, which compares results with float64 or plain operations and writes
them to a file. A stage that does not fit into the rest of the call is skipped, and the next call goes on there. The
stage `shared` needs two GPUs.

## How to run
```
make gpu READY= PY=python3 ARGS="--budget 430 --out OUT"    # less time, results elsewhere
make gpu READY= PY=python3 ARGS="--device cpu --tiny"    # a rehearsal without a GPU
make bench-gpu READY= PY=python3    # two large shapes next to other implementations, one call
make bench-gpu-sweep                # every large shape, call after call
```
`ARGS` has more options: `python3 -m benchmarks.gpu_half_hour --help`.

| exit status | meaning |
| --- | --- |
| 0 | all stages have results |
| 1 | a stage failed or reached its limit; `--stages NAME --again` runs it again |
| 2 | nothing could run: no CUDA device, a missing package, a rehearsal's results |
| 3 | stages remain: call again |

`make` prints the status as `Error 3` and itself exits with 2.

**Results.** `runs/gpu/results.json` (a rehearsal: `runs/gpu-rehearsal`) has all rows and the end of each log, and
`logs.tgz` the files that the stages wrote. Both are written after each stage, and rows every 5 seconds.
`python -m benchmarks.gpu_report RESULTS.json --write` fills the tables of this page.

{packages}

**A machine for 15 minutes.** The start takes about 100 s. Then run a call with `--budget 430`, which does `env` to
`attention`, and one with `--budget 345`, which goes on to `constants`. To go on with another machine, give it the file:
`--carried results.json`, with `logs.tgz` next to it. Results of another card or torch count. Only `env` and `rates` run
on every machine.

**Wrong numbers in `contact`**: repeat one comparison with `python -m benchmarks.gpu_stages contact --rows FILE
--only "fc1"`, also under `compute-sanitizer`.

**Compiled kernels.** Compilation takes minutes of CPU time on a new machine. A machine without a GPU can do it before:
```
env -u TRITON_INTERPRET python -m tests.gpu_static.kernel_table --cache DIR --capability 90
make gpu ARGS="--kernels DIR/ARCHIVE.tar.xz"
```
The first command packs the compiled kernels of every launch. The keys are equal where Triton and Python are the same.
Kernels of another Triton, or for another card, are named and compiled again, and the results say how many.

**Without a network.** On another machine, for the Python and the platform of the machine with the GPU:
```
pip download --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
  --platform manylinux2014_x86_64 -d wheels pydantic
```
On the machine with the GPU:
```
python3 -m pip install --no-index --no-deps --target site wheels/*.whl
PYTHONPATH=site make gpu READY= PY=python3
```

**Tests alone.** `pytest -m gpu` runs them. The stage `tests` leaves out the slow ones, and has 12 processes: 440 tests
of Triton kernels at about 1 s, most of it compilation, and 77 others at 1 to 8 s.
"""
PACKAGES_TEXT = (
    "**Packages.** moefold itself need not be installed: the stages take it from `src`. Every stage needs {libraries}, "
    "at least torch 2.11, and Triton 3.6 for the kernels. The stages of tests also need {tests}. A stage whose "
    "packages are missing is left out, and the next call looks again. `transformers` and `torchtitan` take part in the "
    "comparisons where they are installed. Into an environment whose torch must not change: `pip install -e . "
    "--no-deps`, then `pip install` of what is missing, most often `pydantic`."
)
NOT_RUN = "**Nothing of moefold has run on a GPU yet.** All numbers of this page are predictions."
REHEARSED = "A rehearsal on {device} with {sizes} sizes: no number of this page is a measurement of a GPU."
RUN = "Measured on {device}, torch {torch}, Triton {triton}, Python {python}."
CARRIED = " Of its kernels {carried} were carried along{misfit}; {compiled} were compiled there."
PREDICTIONS_TEXT = """\
## Predictions and measurements
Estimates: the least bytes over 3,000 GB/s on an H100 and 4,000 GB/s on an H200, and FLOPs over 790 TFLOP/s times the
efficiency of the kernel. The column "this machine" scales the prediction of the kind whose copy is nearest: of its
time, the share that moves memory by the measured copy, and the share of GEMMs by the measured bfloat16 rate. A
measurement outside of that range needs an explanation.
"""
PLANS_TEXT = """\
## Plan and measurement
The planner predicts the steps of the stage `step`: with the rates of its devices `h100` and `h200` and, in the stage
`plan`, with the rates that the stage `probe` measured. It predicts the same time for every `loss_chunk`.
[Find out how far to trust a plan](how-to/trust-a-plan.md) compares a run of your own.
"""
CONSTANTS_TEXT = """\
## Constants of the planner
These decide which family of mappings wins ([cost-model.md](cost-model.md#constants)). A plan names those that are
unmeasured on its device. The layer is one of qwen3-30b-a3b with 16,384 tokens, forward and backward.

* Host time: the host's time for the layer over its launches.
* Wait: by how much the layer is longer if the host reads the tokens of each expert before they run. The all-to-all of
  these counts would come on top.
* Exposed: by which part of their own time copies or collectives make layers longer that take twice as long. Copies are
  four tensors like the layer's input, to the host and back; collectives are two all-gathers of the layer's weights and
  one reduction of its gradients.

Plans use a measured number once the device file has it, in seconds or as a fraction, under its key and with its
`[sources]` ([planner.md](planner.md)). The stage `shared` also records the speed of a copy to the host during an
all-gather over its speed alone, among the other measurements. No price reads it, so it has no key: within a machine the
all-gather passes NVLink, not the network card.
"""
CONSTANT_STAGES = {
    "host_launch_s": ("constants", "{:.0f} us"),
    "sync_s": ("constants", "{:.0f} us"),
    "exposed_offload_fraction": ("constants", "{:.2f}"),
    "exposed_zero3_fraction": ("shared", "{:.2f}"),
}
"""Stage and format of each constant that decides between families, by its key in a device file."""


class Measured(NamedTuple):
    """A measured row and its machine's entry in the results."""

    row: Mapping[str, Any]
    machine: Mapping[str, Any]


MeasuredRows = Mapping[tuple[str, str], Measured]
"""Measured rows by stage and name."""


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
    machines = results["machines"]
    measured = _measured_rows(machines)
    names = [
        ", ".join(f"`{name}`" for name in packages)
        for packages in (LIBRARIES.values(), [name for name in TEST_LIBRARIES.values() if name not in LIBRARIES])
    ]
    text = PACKAGES_TEXT.format(libraries=names[0], tests=names[1])
    packages = textwrap.fill(text, COLUMNS, break_on_hyphens=False)
    lines = [
        HOW_TO_RUN.format(status=_status(machines), packages=packages),
        "## Stages",
        "| stage | proves or measures | expected s | status | measured s |",
        "| --- | --- | --- | --- | --- |",
        *_stage_lines(predictions["stages"], machines),
        "",
        PREDICTIONS_TEXT,
        "| stage | quantity | H100 | H200 | derivation | this machine | measured |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *_prediction_lines(predictions["rows"], measured),
        "",
        PLANS_TEXT,
        "| step | planned for h100, ms | for h200, ms | with probe, ms | measured, ms | with probe / measured |",
        "| --- | --- | --- | --- | --- | --- |",
        *_plan_lines(predictions["plans"], measured),
        "",
        CONSTANTS_TEXT,
        "| constant | key of a device file | planner, h100 | stage | measured |",
        "| --- | --- | --- | --- | --- |",
        *_constant_lines(measured),
        "",
        "## Other measurements",
        *_other_lines(predictions, measured),
    ]
    return "\n".join(lines) + "\n"


def _status(machines: list[Mapping[str, Any]]) -> str:
    if not machines:
        return NOT_RUN
    lines = []
    for entry in machines:
        machine = entry["machine"]
        is_rehearsal = machine["device"] == "cpu" or machine["sizes"] == "tiny"
        text = (REHEARSED if is_rehearsal else RUN).format(**machine)
        if kernels := entry.get("kernels"):
            misfit = f" ({kernels['misfit']})" if kernels["misfit"] else ""
            text += CARRIED.format(**kernels | {"misfit": misfit})
        lines.append(text)
    return "\n".join(lines)


def _stage_lines(stages: list[dict[str, Any]], machines: list[Mapping[str, Any]]) -> Iterator[str]:
    for stage in stages:
        name = stage["name"]
        results = [entry["stages"][name] for entry in machines if name in entry["stages"]]
        status = "; ".join(entry["status"] for entry in results)
        seconds = "; ".join(str(entry["seconds"]) for entry in results)
        yield f"| {name} | {stage['proves']} | {stage['seconds']} | {status} | {seconds} |"


def _prediction_lines(rows: list[dict[str, Any]], measured: MeasuredRows) -> Iterator[str]:
    references = {kind: {row["name"]: row[kind] for row in rows} for kind in KINDS}
    for row in rows:
        predicted = " | ".join(f"{_range(*row[kind])} {row['unit']}" for kind in KINDS)
        match = measured.get((row["stage"], row["name"]))
        scaled = None if match is None else scaled_range(row, references, match.machine)
        cells = ["" if scaled is None else f"{_range(*scaled)} {row['unit']}", ""]
        if match is not None:
            cells[1] = f"{match.row['value']:.4g}{_verdict(match.row['value'], scaled)}{_where(match, measured)}"
        yield f"| {row['stage']} | {row['name']} | {predicted} | {row['derivation']} | {' | '.join(cells)} |"


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def scaled_range(
    row: Mapping[str, Any], references: Mapping[str, Mapping[str, Any]], machine: Mapping[str, Any]
) -> tuple[float, float] | None:
    """Return the range of a prediction on a machine, scaled by its measured rates of copies and GEMMs.

    Args:
        row: prediction for each kind, with the shares "copy" and "gemm" of its time.
        references: ranges of the rows by kind and name.
        machine: entry of the results.

    Returns:
        None for a yardstick of a card without predictions, and if the yardsticks were not measured.
    """
    if row["name"] in YARDSTICK_ROWS.values():
        named = [kind for kind in KINDS if kind in machine["machine"]["device"].lower()]
        return tuple(row[named[0]]) if named else None
    rates = {row["name"]: row["value"] for row in machine["stages"].get("rates", {}).get("rows", ())}
    if not all(name in rates for name in YARDSTICK_ROWS.values()):
        return None

    def middle(kind: str, name: str) -> float:
        return sum(references[kind][name]) / 2

    copy = YARDSTICK_ROWS["copy"]
    kind = min(KINDS, key=lambda kind: abs(math.log(rates[copy] / middle(kind, copy))))
    factor = 1.0
    for share, name in YARDSTICK_ROWS.items():
        factor += row[share] * (middle(kind, name) / rates[name] - 1.0)
    low, high = row[kind]
    is_rate = row["unit"].endswith("/s")
    return (low / factor, high / factor) if is_rate else (low * factor, high * factor)


def _where(match: Measured, measured: MeasuredRows) -> str:
    """Return the machine of a row, if there are several."""
    devices = {id(other.machine) for other in measured.values()}
    return f" on {match.machine['machine']['device']}" if len(devices) > 1 else ""


def _plan_lines(plans: list[dict[str, Any]], measured: MeasuredRows) -> Iterator[str]:
    for plan in plans:
        planned, match = (measured.get(key) for key in _plan_keys(plan))
        cells = ["" if entry is None else f"{entry.row['value']:.4g}" for entry in (planned, match)]
        are_known = planned is not None and match is not None
        ratio = f"{planned.row['value'] / match.row['value']:.2f}" if are_known else ""
        predicted = " | ".join(f"{plan[f'{kind}_ms']:g}" for kind in KINDS)
        yield f"| {plan['name']} | {predicted} | {' | '.join(cells)} | {ratio} |"


def _plan_keys(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys of the rows of a step: the planner's time with the probed rates, and the measured one."""
    return [("plan", f"{plan['name']}, planned"), ("step", plan["name"])]


def _verdict(value: float, expected: tuple[float, float] | None) -> str:
    if expected is None or expected[0] <= value <= expected[1]:
        return ""
    return " (below)" if value < expected[0] else " (above)"


def _constant_lines(measured: MeasuredRows) -> Iterator[str]:
    device = load_device("h100")
    priced = {
        "host_launch_s": 1e6 * device.host_launch_s,
        "sync_s": 1e6 * device.sync_s,
        "exposed_offload_fraction": EXPOSED_OFFLOAD_FRACTION,
        "exposed_zero3_fraction": EXPOSED_ZERO3_FRACTION,
    }
    for key, (stage, text) in CONSTANT_STAGES.items():
        name = DECIDING_CONSTANTS[key]
        match = measured.get((stage, name))
        value = "" if match is None else f"{match.row['value']:.4g} {match.row['unit']}".rstrip()
        machine = "" if match is None else _where(match, measured)
        yield f"| {name} | `{key}` | {text.format(priced[key])} | {stage} | {value}{machine} |"


def _other_lines(predictions: Mapping[str, Any], measured: MeasuredRows) -> Iterator[str]:
    predicted = {(row["stage"], row["name"]) for row in predictions["rows"]}
    predicted |= {key for plan in predictions["plans"] for key in _plan_keys(plan)}
    predicted |= {(stage, DECIDING_CONSTANTS[key]) for key, (stage, _) in CONSTANT_STAGES.items()}
    others = {key: match for key, match in measured.items() if key not in predicted}
    if not others:
        yield "None yet."
        return
    yield "| stage | quantity | measured |"
    yield "| --- | --- | --- |"
    for (stage, name), match in others.items():
        value = match.row["value"]
        text = value if isinstance(value, str) else f"{value:.4g}"
        yield f"| {stage} | {name} | {text} {match.row['unit']}{_where(match, measured)} |"


def _measured_rows(machines: list[Mapping[str, Any]]) -> MeasuredRows:
    """Return the rows of all stages by stage and name. Reports of `moefold bench` and `moefold probe` as rows.

    If several machines measured the same row, the last machine counts; its yardsticks identify it.
    """
    rows = {}
    for machine in machines:
        for stage, entry in machine["stages"].items():
            for row in entry["rows"]:
                for measured in _report_rows(row):
                    rows[(stage, measured["name"])] = Measured(measured, machine)
    return rows


def _report_rows(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "kind" in row:
        yield from _bench_rows(row)
    elif "predictions" in row:
        for entry in row["predictions"]:
            yield {"name": entry["name"], "value": entry["measured_s"] * 1e3, "unit": "ms"}
            yield {"name": f"{entry['name']}, fitted", "value": entry["predicted_s"] * 1e3, "unit": "ms"}
    else:
        yield row


def _bench_rows(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the times of a report of the race of steps, of `moefold bench` or of benchmarks/scaling.py."""
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
