"""Run proofs and measurements on one GPU, the most valuable first, in stages that resume where the last call stopped.

`python3 -m benchmarks.gpu_half_hour [SUITE]`, with any Python that has torch; moefold need not be installed.
Suites: "proof" (correctness and measurements of kernels, layers and steps, then tests), "bench" (two large shapes next
to other implementations), "sweep" (every large shape).

Each stage is a child process with a time limit. A stage that needs more time than the call has left is skipped, and the
next stage that fits runs. OUT has results.json with all rows and the ends of all logs, written after each stage and
while one runs, and logs.tgz. `--carried results.json` continues on another machine.

Exit status: 0 all stages are done; 1 a stage failed; 2 nothing could run; 3 stages remain, call again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from lzma import LZMAError
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.gpu_results import CUT_SHORT, LEFT_OUT, Results, UnusableError
from benchmarks.gpu_suites import Stage, suite_stages
from benchmarks.kernel_cache import cached_kernels, misfit, triton_wheel, unpack_kernels

ROOT = Path(__file__).resolve().parents[1]
DONE = 0
FAILED = 1
UNUSABLE = 2
REMAINING = 3
KILLED_AFTER_S = 5.0
RECORDED_EVERY_S = 5.0
"""Seconds between records of a running stage: a machine that vanishes loses at most these."""
LOG_LINES = 12
CACHE_VARIABLE = "TRITON_CACHE_DIR"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are left and return the exit status."""
    started_s = time.monotonic()
    args = _parser().parse_args(argv)
    # A killed call ends its stage too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="moefold-gpu-") as folder:
        work = Path(folder)
        try:
            stages = chosen_stages(suite_stages(args.suite, args.device, work, is_tiny=args.tiny), args.stages)
            machine = describe_machine(args.device) | {"sizes": "tiny" if args.tiny else "full"}
            _check_packages(stages)
            is_rehearsal = args.tiny or args.device == "cpu"
            out = Path(args.out or ROOT / "runs" / ("gpu-rehearsal" if is_rehearsal else "gpu")).resolve()
            out.mkdir(parents=True, exist_ok=True)
            results = Results(out / "results.json", machine)
            results.load(args.carried)
            results.unpack_logs(work, args.carried)
        except UnusableError as error:
            print(f"gpu_half_hour: {error}", file=sys.stderr)
            return UNUSABLE
        results.repeated = {stage.name for stage in stages} if args.again else set()
        if args.kernels is not None:
            unpack_cache(args.kernels, args.device, results)
        status = run_stages(stages, results, work, args.budget - (time.monotonic() - started_s))
    print(f"results: {results.path}; to write docs/gpu.md: python -m benchmarks.gpu_report {results.path} --write")
    return status


def describe_machine(device: str) -> dict[str, str]:
    """Return versions and device name.

    Raises:
        UnusableError: torch or the device is missing.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - moefold need not be installed, so pip has not checked it
        raise UnusableError(f"Python {sys.version.split()[0]} is too old; moefold needs 3.11 or newer")
    if find_spec("torch") is None:
        raise UnusableError(f"torch is missing; name a Python that has it, or install it: {_install(['torch'])}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UnusableError(
            f"torch {torch.__version__} finds no CUDA device; rehearse without one: ARGS='--device cpu --tiny'"
        )
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    python = sys.version.split()[0]
    return {"device": name, "torch": torch.__version__, "triton": triton_wheel(), "python": python}


def _install(packages: Sequence[str]) -> str:
    return f"{sys.executable} -m pip install {' '.join(packages)}"


def _missing(stage: Stage) -> list[str]:
    """Return the packages that a stage lacks."""
    return [package for module, package in stage.packages.items() if find_spec(module) is None]


def _check_packages(stages: Sequence[Stage]) -> None:
    """Say which packages are missing.

    Raises:
        UnusableError: every stage lacks a package.
    """
    absent = {stage.name: missing for stage in stages if (missing := _missing(stage))}
    if not absent:
        return
    packages = list(dict.fromkeys(package for missing in absent.values() for package in missing))
    text = f"packages are missing: {_install(packages)}"
    if len(absent) == len(stages):
        raise UnusableError(text)
    print(f"{text}; without them are left out: {', '.join(absent)}")


def chosen_stages(stages: Sequence[Stage], names: str) -> list[Stage]:
    """Return the stages with the names of a comma-separated list; all for an empty one.

    Raises:
        UnusableError: a name is unknown.
    """
    by_name = {stage.name: stage for stage in stages}
    wanted = names.split(",") if names else list(by_name)
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise UnusableError(f"--stages has no {', '.join(unknown)}; the stages are {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


def unpack_cache(archive: Path, device: str, results: Results) -> None:
    """Write carried kernels into Triton's cache folder. If they do not fit, say so, and stages compile them."""
    folder = cache_folder()
    try:
        manifest = unpack_kernels(archive, folder)
        capability = _capability() if device == "cuda" else None
        reason = misfit(manifest, capability)
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, LZMAError) as error:
        print(f"{archive} has no kernels, so all are compiled here: {type(error).__name__}: {error}")
        return
    results.kernels = {"carried": manifest["kernels"], "misfit": reason, "compiled": 0}
    print(f"{manifest['kernels']} compiled kernels in {folder}{f', of no use: {reason}' if reason else ''}")


def cache_folder() -> Path:
    """Return the folder of Triton's compiled kernels."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".triton" / "cache")


def _capability() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def run_stages(
    stages: Sequence[Stage],
    results: Results,
    work: Path,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the stages without a result while time is left and return the exit status."""
    started_s = clock()
    skipped: list[str] = []
    for stage in stages:
        if results.is_done(stage.name):
            continue
        if reason := _left_out(stage):
            results.record(stage.name, {"status": LEFT_OUT, "seconds": 0.0, "rows": [], "tail": [reason]})
            print(f"== {stage.name}: left out, {reason}")
            continue
        left_s = budget_s - (clock() - started_s) - KILLED_AFTER_S
        if left_s < max(stage.expected_s, 1.0):
            print(f"== {stage.name}: skipped, it takes about {stage.expected_s:.0f} s and {left_s:.0f} s are left")
            skipped.append(stage.name)
        elif stage.after is not None and results.status(stage.after) != "passed":
            print(f"== {stage.name}: skipped, it reads what {stage.after} writes")
            skipped.append(stage.name)
        else:
            run_stage(stage, results, work, min(stage.limit_s, left_s))
    return _summary(stages, results, skipped)


def _left_out(stage: Stage) -> str:
    """Return why a stage cannot run on this machine, or "" if it can."""
    if stage.tool is not None and which(stage.tool) is None:
        return f"{stage.tool} is not on the PATH"
    if stage.gpus > 1 and (count := _count_gpus()) < stage.gpus:
        return f"it needs {stage.gpus} GPUs, and this machine has {count}"
    missing = _missing(stage)
    return f"packages are missing: {_install(missing)}" if missing else ""


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _summary(stages: Sequence[Stage], results: Results, skipped: Sequence[str]) -> int:
    """Print the failed and the remaining stages. Return the exit status."""
    failed = [stage.name for stage in stages if results.status(stage.name) in ("failed", "timed out")]
    remaining = [stage.name for stage in stages if stage.name in skipped or results.status(stage.name) == CUT_SHORT]
    if failed:
        print(f"failed: {', '.join(failed)}; to run them again: --stages {','.join(failed)} --again")
    if remaining:
        print(f"remaining: {', '.join(remaining)}; call again, on another machine with --carried {results.path}")
        return REMAINING
    return FAILED if failed else DONE


def run_stage(stage: Stage, results: Results, work: Path, limit_s: float) -> None:
    """Run a stage to its end or limit, and record its entry. While it runs, its rows are recorded too."""
    print(f"== {stage.name}", flush=True)
    if stage.json_file is not None:
        stage.json_file.unlink(missing_ok=True)
    log = work / f"{stage.name}.log"
    before = cached_kernels(cache_folder())
    started_s = time.monotonic()

    def record(status: str) -> dict[str, Any]:
        if results.kernels and status != CUT_SHORT:
            results.kernels["compiled"] += len(cached_kernels(cache_folder()) - before)
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        seconds = round(time.monotonic() - started_s, 1)
        entry = {"status": status, "seconds": seconds, "limit_s": limit_s, "rows": _read_rows(stage.json_file)}
        results.record(stage.name, entry | {"tail": tail})
        return results.stages[stage.name]

    status = CUT_SHORT
    with log.open("w") as stream:
        # In a separate process session: at the limit all its processes are killed.
        child = subprocess.Popen(
            stage.command, cwd=ROOT, env=_environment(stage), stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while (left_s := started_s + limit_s - time.monotonic()) > 0 and status == CUT_SHORT:
                with suppress(subprocess.TimeoutExpired):
                    status = "passed" if child.wait(min(left_s, RECORDED_EVERY_S)) == 0 else "failed"
                if status == CUT_SHORT:
                    record(status)
            # At its own limit a stage is done; at the end of the call it is not.
            if status == CUT_SHORT and limit_s >= stage.limit_s:
                status = "timed out"
        finally:
            _end(child)
            entry = record(status)
            results.pack_logs(work)
    for line in entry["tail"]:
        print(f"   {line[:200]}")
    print(f"== {stage.name}: {status} after {entry['seconds']:.0f} s", flush=True)


def _environment(stage: Stage) -> dict[str, str]:
    """Return the variables of a stage: the sources of this checkout come first."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return os.environ | variables | stage.environment


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its processes. They are one process group."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(KILLED_AFTER_S)


def _read_rows(path: Path | None) -> list[Any]:
    """Return the rows of a file, without an incomplete last row."""
    rows: list[Any] = []
    if path is not None and path.exists():
        with suppress(ValueError):
            for line in path.read_text().splitlines():
                rows.append(json.loads(line))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=("proof", "bench", "sweep"), default="proof")
    parser.add_argument("--stages", default="", help="names, separated by commas (default all of the suite)")
    parser.add_argument("--again", action="store_true", help="run the stages even if they have results")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds of this call (default 570)")
    parser.add_argument(
        "--out", help="folder of results.json and logs.tgz (default runs/gpu; for a rehearsal runs/gpu-rehearsal)"
    )
    parser.add_argument("--carried", type=Path, help="results.json of another machine, to go on with an empty --out")
    parser.add_argument(
        "--kernels", type=Path, help="archive of compiled kernels (python -m tests.gpu_static.kernel_table --cache DIR)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
