"""From a fault of saving to its message, and from the next start to training again: times of the command itself.

    python benchmarks/save_faults.py

Two ranks of the preset `tiny` on a CPU, saved after every step. Each fault meets a run that is under way or has
ended; the time to training again is that of the same command until its first line of a step, start included.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WORDS = (
    "model.preset=tiny run.device=cpu run.dtype=float32 run.steps=2000 data.kind=synthetic train.seq_len=64 "
    "train.global_batch_size=4 parallel.world_size=2 checkpoint.every=1 checkpoint.keep=3"
)


def _start(folder: Path, *words: str, before: Callable[[], object] | None = None) -> "subprocess.Popen[str]":
    recipe = folder / "recipe.toml"
    recipe.touch()
    command = [sys.executable, "-m", "moefold", "train", str(recipe), *WORDS.split(), f"run.dir={folder}/run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=before)


def _until(process: "subprocess.Popen[str]", pattern: str) -> tuple[float, list[str]]:
    """Seconds until a line matches, and the lines until then; ends with the output."""
    assert process.stdout is not None
    started_s, seen = time.perf_counter(), []
    for line in process.stdout:
        seen.append(line.strip())
        if re.search(pattern, line):
            break
    return time.perf_counter() - started_s, seen


def _ranks(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "stat").is_file():
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent and b"forkserver" not in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def _newest(folder: Path) -> Path:
    return max((folder / "run" / "checkpoints").glob("step-*"))


def _again(folder: Path) -> tuple[float, str]:
    """Start the same command; seconds until it trains, and what it says of the checkpoint."""
    process = _start(folder)
    took_s, lines = _until(process, r"^step \d+/|error")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    return took_s, "; ".join(line for line in lines if "resumed" in line or "skipped" in line or "error" in line)


def _killed(folder: Path) -> tuple[float, str]:
    """Kill -9 of one rank while a save is under way."""
    process = _start(folder)
    _until(process, r"^step 20/")
    drafts = folder / "run" / "checkpoints"
    while not any(drafts.glob(".step-*.partial")):
        time.sleep(0.001)
    os.kill(max(_ranks(process.pid)), signal.SIGKILL)
    took_s, lines = _until(process, r"rank \d")
    process.wait()
    return took_s, lines[-1]


def _full(folder: Path) -> tuple[float, str]:
    """No file may grow beyond 10 kB: from the start of the command, as the first save meets it."""

    def limit() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    process = _start(folder, before=limit)
    _until(process, r"^step \d+/")
    took_s, lines = _until(process, r"cannot be written|error")
    process.wait()
    return took_s, lines[-1]


def _vanished(folder: Path) -> tuple[float, str]:
    """The folder of checkpoints becomes one that cannot be made again."""
    process = _start(folder)
    _until(process, r"^step 20/")
    checkpoints = folder / "run" / "checkpoints"
    checkpoints.rename(folder / "away")
    checkpoints.touch()
    took_s, lines = _until(process, r"cannot be written|error")
    process.wait()
    if checkpoints.is_dir():
        shutil.rmtree(checkpoints)
    else:
        checkpoints.unlink(missing_ok=True)
    (folder / "away").rename(checkpoints)
    return took_s, lines[-1]


def _flipped(folder: Path) -> tuple[float, str]:
    file = _newest(folder) / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return 0.0, "(at the next start)"


def _removed(folder: Path) -> tuple[float, str]:
    (_newest(folder) / "__1_0.distcp").unlink()
    return 0.0, "(at the next start)"


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = _start(folder)
        took_s, _ = _until(process, r"^step 20/")
        process.send_signal(signal.SIGTERM)
        process.communicate()
        print(f"first start to step 20: {took_s:.1f} s; restart without a fault: {_again(folder)}")
        for fault in (_killed, _full, _vanished, _flipped, _removed):
            message_s, message = fault(folder)
            again_s, said = _again(folder)
            print(
                f"{fault.__name__[1:]}: {message_s:.1f} s to {message!r}; {again_s:.1f} s to training again: {said!r}"
            )


if __name__ == "__main__":
    main()
