"""Run everything that one GPU can prove and measure in half an hour, in stages that resume where the last call stopped.

`python3 benchmarks/gpu_half_hour.py [SUITE]`, with any Python that has `PACKAGES`; moefold need not be installed.
Suites: "proof" (tests and measurements of every layer, kernel and step), "bench" (two large shapes next to other
implementations), "sweep" (every large shape).

Each stage is a child process with a time limit. No stage starts that could exceed the budget of the call, so that a
call ends within it. Results are in OUT/results.json after each stage, logs next to it.

Exit status: 0 all stages are done; 1 a stage failed; 2 nothing could run; 3 stages remain, call again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "tokenizers": "tokenizers",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
"""Packages without which no stage can run, by module."""
MEASURED = ("env", "rates", "products", "layer", "attention", "step", "graphs", "fp8")
"""Stages of benchmarks/gpu_stages.py."""
DONE = 0
FAILED = 1
UNUSABLE = 2
REMAINING = 3
KILLED_AFTER_S = 5.0
LOG_LINES = 12


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: name in the results and of its log.
        command: program and arguments.
        limit_s: seconds after which it is killed.
        json_file: file that the command writes, a JSON value or one value a line; None: the log is all.
        tool: program that must be on the PATH; else the stage is left out and the reason is recorded.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    json_file: Path | None = None
    tool: str | None = None


@dataclass
class Results:
    """Results of all calls, in a file that is replaced after each stage.

    Attributes:
        path: results.json.
        machine: versions, device and sizes; results of another machine are not continued.
        stages: by name: "status" (passed, failed, timed out, left out), "seconds", "limit_s", "rows", "tail".
    """

    path: Path
    machine: Mapping[str, str]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def load(self) -> None:
        """Read the results of earlier calls.

        Raises:
            UnusableError: they are of another machine.
        """
        if not self.path.exists():
            return
        stored = json.loads(self.path.read_text())
        if stored["machine"] != dict(self.machine):
            raise UnusableError(f"{self.path} has results of {stored['machine']}; set --out to another folder")
        self.stages = stored["stages"]

    def record(self, name: str, entry: dict[str, Any]) -> None:
        """Add the entry of a stage and write the file."""
        self.stages[name] = entry
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps({"machine": dict(self.machine), "stages": self.stages}, indent=1) + "\n")
        temporary.replace(self.path)


class UnusableError(Exception):
    """Error of a call that cannot run any stage; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are left; return the exit status."""
    args = _parser().parse_args(argv)
    try:
        is_rehearsal = args.tiny or args.device == "cpu"
        machine = describe_machine(args.device) | {"sizes": "tiny" if args.tiny else "full"}
        out = Path(args.out or ROOT / "runs" / ("gpu-rehearsal" if is_rehearsal else "gpu")).resolve()
        out.mkdir(parents=True, exist_ok=True)
        results = Results(out / "results.json", machine)
        results.load()
        stages = chosen_stages(suite_stages(args.suite, args.device, out, is_tiny=args.tiny), args.stages)
        longest_s = max(stage.limit_s for stage in stages)
        if longest_s > args.budget:
            raise UnusableError(f"--budget {args.budget:g} must be at least {longest_s:g}, the limit of a stage")
    except UnusableError as error:
        print(f"gpu_half_hour: {error}", file=sys.stderr)
        return UNUSABLE
    # A killed call ends its stage too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for stage in stages if args.again else ():
        results.stages.pop(stage.name, None)
    status = run_stages(stages, results, args.budget)
    print(f"results: {results.path}; to write docs/gpu.md: python -m benchmarks.gpu_report {results.path} --write")
    return status


def describe_machine(device: str) -> dict[str, str]:
    """Return versions and device name.

    Raises:
        UnusableError: a package or the device is missing.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - moefold need not be installed, so pip has not checked it
        raise UnusableError(f"Python {sys.version.split()[0]} is too old; moefold needs 3.11 or newer")
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise UnusableError(f"packages are missing: {sys.executable} -m pip install {' '.join(missing)}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UnusableError(
            f"torch {torch.__version__} finds no CUDA device; rehearse without one: ARGS='--device cpu --tiny'"
        )
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}


def suite_stages(suite: str, device: str, out: Path, *, is_tiny: bool) -> list[Stage]:
    """Return the stages of a suite in their order."""
    if suite == "proof":
        return _proof_stages(device, out, is_tiny=is_tiny)
    return _bench_stages(suite, device, out, is_tiny=is_tiny)


def chosen_stages(stages: Sequence[Stage], names: str) -> list[Stage]:
    """Return the stages with the names of a comma-separated list; all for an empty one.

    Raises:
        UnusableError: a name is unknown.
    """
    known = {stage.name: stage for stage in stages}
    wanted = names.split(",") if names else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UnusableError(f"--stages has no {', '.join(unknown)}; the stages are {', '.join(known)}")
    return [known[name] for name in wanted]


def run_stages(
    stages: Sequence[Stage], results: Results, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """Run the stages that have no result yet while the budget lasts; return the exit status."""
    started_s = clock()
    for stage in stages:
        if stage.name in results.stages:
            continue
        left_s = budget_s - (clock() - started_s)
        if stage.limit_s > left_s:
            print(f"== {stage.name}: needs up to {stage.limit_s:.0f} s and {left_s:.0f} s are left; call again")
            return REMAINING
        print(f"== {stage.name}", flush=True)
        entry = run_stage(stage, results.path.parent)
        results.record(stage.name, entry)
        print(f"== {stage.name}: {entry['status']} after {entry['seconds']:.0f} s", flush=True)
    failed = [stage.name for stage in stages if results.stages[stage.name]["status"] in ("failed", "timed out")]
    if failed:
        print(f"failed: {', '.join(failed)}; to run them again: --stages {','.join(failed)} --again")
    return FAILED if failed else DONE


def run_stage(stage: Stage, out: Path) -> dict[str, Any]:
    """Run a stage to its end or limit; return its entry for the results."""
    if stage.tool is not None and which(stage.tool) is None:
        return {"status": "left out", "seconds": 0.0, "rows": [], "tail": [f"{stage.tool} is not on the PATH"]}
    if stage.json_file is not None:
        stage.json_file.unlink(missing_ok=True)
    log = out / f"{stage.name}.log"
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    started_s = time.monotonic()
    with log.open("w") as stream:
        # In a session of its own: at the limit everything that it started is killed.
        child = subprocess.Popen(
            stage.command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if child.wait(stage.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _end(child)
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    for line in tail:
        print(f"   {line[:200]}")
    return {
        "status": status,
        "seconds": round(time.monotonic() - started_s, 1),
        "limit_s": stage.limit_s,
        "rows": _read_rows(stage.json_file),
        "tail": tail,
    }


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it started; they are one process group."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(KILLED_AFTER_S)


def _read_rows(path: Path | None) -> list[Any]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _proof_stages(device: str, out: Path, *, is_tiny: bool) -> list[Stage]:
    limits_s = {"env": 60, "rates": 60, "products": 240, "layer": 300, "attention": 60, "step": 300}
    limits_s |= {"graphs": 240, "fp8": 90}
    measured = {
        name: Stage(
            name,
            [
                *(sys.executable, "-m", "benchmarks.gpu_stages", name, "--device", device),
                *("--rows", str(out / f"{name}.jsonl")),
                *(["--tiny"] if is_tiny else []),
            ],
            limits_s[name],
            json_file=out / f"{name}.jsonl",
        )
        for name in MEASURED
    }
    is_gpu = device == "cuda"
    abreast = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder") if find_spec("xdist") else ()
    gpu_tests = _pytest("-m", "gpu", "--ignore=tests/verify", *abreast)
    tests = Stage("tests", gpu_tests if is_gpu else _pytest(*REHEARSED_TESTS), 360)
    rank_tests = ("-m", "gpu") if is_gpu else ("-m", "not gpu and not slow")
    staged = Stage("staged", _pytest("tests/verify/test_staged.py", *rank_tests), 360)
    sanitize = Stage(
        "sanitize",
        [
            *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
            *_pytest("tests/ops/triton/test_grouped_gemm.py", "-k", "bfloat16", "--timeout=0"),
        ],
        240,
        tool="compute-sanitizer",
    )
    first = [measured["env"], measured["rates"], _probe_stage(device, out), tests]
    return [*first, *(measured[name] for name in MEASURED[2:7]), staged, measured["fp8"], sanitize]


def _probe_stage(device: str, out: Path) -> Stage:
    """Return the stage that writes OUT/device.toml, with which the stage `step` plans what it measures."""
    report = out / "probe.json"
    words = ["probe", str(out / "device.toml"), "--device", device, "--dtype", "bfloat16", "--ranks", "1"]
    words += ["--json", str(report), "--force"]
    return Stage("probe", [sys.executable, "-m", "moefold", *words], 120, json_file=report)


REHEARSED_TESTS = ("tests/ops/test_rope.py",)
"""Tests of a rehearsal without a GPU: they show that pytest starts."""


def _pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15", "-ra", *words]


BENCH_CASES = (
    ("qwen3-30b-a3b-layer", 16384, "natural"),
    ("mixtral-8x22b-layer", 4096, "natural"),
    ("qwen3-30b-a3b-layer", 4096, "natural"),
    ("qwen3-30b-a3b-stack", 4096, "natural"),
)
SWEPT_PRESETS = ("mixtral-8x7b", "mixtral-8x22b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v3")
BENCH_LIMIT_S = 140.0
SWEEP_LIMIT_S = 280.0


def _bench_stages(suite: str, device: str, out: Path, *, is_tiny: bool) -> list[Stage]:
    if is_tiny:
        return [_bench_stage("bench", ("small", 256, "natural"), device, out, rounds=1)]
    if suite == "bench":
        return [_bench_stage(suite, case, device, out, rounds=5) for case in BENCH_CASES]
    cases = [
        (f"{preset}-{part}", tokens, routing)
        for preset in SWEPT_PRESETS
        for part in ("layer", "stack")
        for tokens in (4096, 16384)
        for routing in ("balanced", "natural")
    ]
    report = out / "sweep-scaling.json"
    words = ["scaling", "--shape", "qwen3-30b-a3b-layer", "--tokens", "4096", "8192", "16384"]
    scaling = Stage("sweep-scaling", _moefold_bench(words, device, report), SWEEP_LIMIT_S, json_file=report)
    return [*(_bench_stage(suite, case, device, out, rounds=20) for case in cases), scaling]


def _bench_stage(suite: str, case: tuple[str, int, str], device: str, out: Path, *, rounds: int) -> Stage:
    shape, tokens, routing = case
    name = f"{suite}-{shape}-{tokens}-{routing}"
    report = out / f"{name}.json"
    words = ["--shape", shape, "--tokens", str(tokens), "--routing", routing, "--steps", str(rounds)]
    limit_s = BENCH_LIMIT_S if suite == "bench" else SWEEP_LIMIT_S
    return Stage(name, _moefold_bench(words, device, report), limit_s, json_file=report)


def _moefold_bench(words: Sequence[str], device: str, report: Path) -> list[str]:
    # Emulated bfloat16, and threads that wait for each other on busy cores, would take minutes in a rehearsal.
    kind = ["--dtype", "bfloat16"] if device == "cuda" else ["--dtype", "float32", "--threads", "1"]
    options = ["--force", "--device", device, *kind, "--json", str(report)]
    return [sys.executable, "-m", "moefold", "bench", *words, *options]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=("proof", "bench", "sweep"), default="proof")
    parser.add_argument("--stages", default="", help="names, separated by commas (default all of the suite)")
    parser.add_argument("--again", action="store_true", help="run the stages even if they have results")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds of this call (default 570)")
    parser.add_argument(
        "--out", help="folder of results and logs (default runs/gpu; for a rehearsal runs/gpu-rehearsal)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
