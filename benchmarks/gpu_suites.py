"""Suites of benchmarks/gpu_half_hour.py: their stages, in the best order for a short lease."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

PREDICTIONS = Path(__file__).with_name("gpu_predictions.json")
"""Expected seconds and purpose of each stage of the suite "proof", in their order. Predictions of the rows."""
LIBRARIES = {"torch": "torch", "numpy": "numpy", "pydantic": "pydantic"}
"""Packages that every stage needs, by module."""
TEST_LIBRARIES = LIBRARIES | {
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "tokenizers": "tokenizers",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
"""Packages that the stages of tests need."""
GPU_TESTS = (
    "tests/gpu",
    "tests/ops/triton",
    "tests/ops/test_block_attention.py",
    "tests/ops/test_cudnn_attention.py",
    "tests/model/moe/test_experts.py",
    "tests/train/test_peak_memory.py",
)
"""Folders and files with tests of the mark gpu, except the tests of several ranks."""
REHEARSED_TESTS = ("tests/ops/test_rope.py",)
"""Tests of a rehearsal without a GPU: they show that pytest starts."""
PARALLEL_TESTS = 12
"""Processes of tests; a test waits for compilation and the CPU more than for the GPU."""
SHARED_GPUS = 2
"""GPUs of the stage that measures shared resources of two GPUs."""
REHEARSED_S = 2.0
"""Expected seconds of a stage in a rehearsal."""
REHEARSAL_LIMIT_S = 570.0
"""Seconds after which a stage of a rehearsal is killed: a CPU that does other work interprets kernels for minutes."""
LIMITS_S = {
    "env": 60, "contact": 150, "rates": 60, "layer": 240, "step": 200, "attention": 60, "graphs": 150, "fp8": 90,
    "staged": 180, "tests": 300, "constants": 120, "shared": 150, "products": 240, "probe": 120, "plan": 60,
    "sanitize": 240,
}  # fmt: skip
"""Seconds after which a stage of the suite "proof" is killed."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: name in the results and of its log.
        command: program and arguments.
        limit_s: seconds after which it is killed.
        expected_s: seconds that should be left when it starts.
        json_file: file that the command writes, a JSON value or one value a line; None: the log is all.
        tool: program that must be on the PATH; else the stage is left out and the reason is recorded.
        packages: packages that it needs, by module; also left out without them.
        after: stage whose files it reads.
        gpus: GPUs that it needs; also left out on a machine with fewer.
        environment: variables of its process.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    expected_s: float = 0.0
    json_file: Path | None = None
    tool: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    after: str | None = None
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


def suite_stages(suite: str, device: str, work: Path, *, is_tiny: bool) -> list[Stage]:
    """Return the stages of a suite in their order.

    Args:
        suite: "proof", "bench" or "sweep".
        device: "cuda", or "cpu" for a rehearsal.
        work: folder of the files that they write.
        is_tiny: True for sizes that a CPU computes in seconds.
    """
    if suite != "proof":
        return _bench_stages(suite, device, work, is_tiny=is_tiny)
    is_rehearsal = is_tiny or device == "cpu"
    expected_s = {row["name"]: row["seconds"] for row in json.loads(PREDICTIONS.read_text())["stages"]}
    return [
        _proof_stage(
            name,
            device,
            work,
            limit_s=REHEARSAL_LIMIT_S if is_rehearsal else LIMITS_S[name],
            expected_s=REHEARSED_S if is_rehearsal else expected_s[name],
            is_tiny=is_tiny,
        )
        for name in LIMITS_S
    ]


def _proof_stage(name: str, device: str, work: Path, *, limit_s: float, expected_s: float, is_tiny: bool) -> Stage:
    limits = {"limit_s": limit_s, "expected_s": expected_s}
    if name in ("tests", "staged", "sanitize"):
        tool = "compute-sanitizer" if name == "sanitize" else None
        return Stage(name, _test_command(name, device), **limits, tool=tool, packages=TEST_LIBRARIES)
    if name == "probe":
        # With device.toml the stage `plan` plans the steps that the stage `step` measured.
        report = work / "probe.json"
        words = ["probe", str(work / "device.toml"), "--device", device, "--dtype", "bfloat16", "--ranks", "1"]
        words += ["--json", str(report), "--force"]
        return Stage(name, [sys.executable, "-m", "moefold", *words], **limits, json_file=report, packages=LIBRARIES)
    rows = work / f"{name}.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_stages", name, "--device", device, "--rows", str(rows)]
    return Stage(
        name,
        [*command, *(["--tiny"] if is_tiny else [])],
        **limits,
        json_file=rows,
        packages=LIBRARIES,
        after="probe" if name == "plan" else None,
        gpus=SHARED_GPUS if name == "shared" and device == "cuda" else 1,
        environment={"TRITON_INTERPRET": "1"} if name == "contact" and device == "cpu" else {},
    )


def _test_command(name: str, device: str) -> list[str]:
    is_gpu = device == "cuda"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=15", "-ra"]
    if name == "sanitize":
        checked = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
        return [*checked, *pytest, "tests/ops/triton/test_grouped_gemm.py", "-k", "bfloat16", "--timeout=0"]
    if name == "staged":
        kind = ("-m", "gpu", "-k", "float32 and (zero or etp)") if is_gpu else ("-m", "not gpu and not slow")
        return [*pytest, "tests/verify/test_staged.py", *kind]
    if not is_gpu:
        return [*pytest, *REHEARSED_TESTS]
    abreast = ("-n", str(PARALLEL_TESTS), "--dist", "load") if find_spec("xdist") else ()
    return [*pytest, "-m", "gpu and not slow", "--timeout=120", *abreast, *GPU_TESTS]


BENCH_CASES = (
    ("qwen3-30b-a3b-layer", 16384, "natural"),
    ("mixtral-8x22b-layer", 4096, "natural"),
    ("qwen3-30b-a3b-layer", 4096, "natural"),
    ("qwen3-30b-a3b-stack", 4096, "natural"),
)
SWEPT_PRESETS = ("mixtral-8x7b", "mixtral-8x22b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v3")
BENCH_LIMIT_S = 140.0
SWEEP_LIMIT_S = 280.0
EXPECTED_SHARE = 0.5
"""Expected seconds of a stage of benchmarks, as a share of its limit."""


def _bench_stages(suite: str, device: str, work: Path, *, is_tiny: bool) -> list[Stage]:
    if is_tiny:
        return [_bench_stage("bench", ("small", 256, "natural"), device, work, rounds=1)]
    if suite == "bench":
        return [_bench_stage(suite, case, device, work, rounds=5) for case in BENCH_CASES]
    cases = [
        (f"{preset}-{part}", tokens, routing)
        for preset in SWEPT_PRESETS
        for part in ("layer", "stack")
        for tokens in (4096, 16384)
        for routing in ("balanced", "natural")
    ]
    words = ["benchmarks.scaling", "--shape", "qwen3-30b-a3b-layer", "--tokens", "4096", "8192", "16384"]
    scaling = _measured_module("sweep-scaling", words, device, work, limit_s=SWEEP_LIMIT_S)
    return [*(_bench_stage(suite, case, device, work, rounds=20) for case in cases), scaling]


def _bench_stage(suite: str, case: tuple[str, int, str], device: str, work: Path, *, rounds: int) -> Stage:
    shape, tokens, routing = case
    words = ["benchmarks.race.step", "--shape", shape, "--tokens", str(tokens)]
    words += ["--routing", routing, "--steps", str(rounds)]
    limit_s = BENCH_LIMIT_S if suite == "bench" else SWEEP_LIMIT_S
    return _measured_module(f"{suite}-{shape}-{tokens}-{routing}", words, device, work, limit_s=limit_s)


def _measured_module(name: str, words: Sequence[str], device: str, work: Path, *, limit_s: float) -> Stage:
    report = work / f"{name}.json"
    # Emulated bfloat16, and threads that wait for each other on busy cores, would take minutes in a rehearsal.
    kind = ["--dtype", "bfloat16"] if device == "cuda" else ["--dtype", "float32", "--threads", "1"]
    options = ["--force", "--device", device, *kind, "--json", str(report)]
    command = [sys.executable, "-m", *words, *options]
    packages = LIBRARIES | {"transformers": "transformers"}
    return Stage(name, command, limit_s, EXPECTED_SHARE * limit_s, json_file=report, packages=packages)
