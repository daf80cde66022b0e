"""Print the tables of docs/folding.md: the best mapping with folding and without it, case by case, as Markdown.

Every row is an answer of `moefold plan MODEL --compare-folding`. All numbers are predictions of the cost model.
"""

import argparse
import json
import subprocess
import sys
from typing import Any, NamedTuple

from moefold.topology.layout import DEGREES

PAPER_SETTINGS = ["zero=1", "mbs=1", "dispatcher=alltoall", "overlap=off", "recompute=none", "offload=none"]
"""Settings of the runs that arXiv:2504.14960 published, on the runtime of moefold."""


class Case(NamedTuple):
    """A model on some GPUs, with as many tokens a step at each length."""

    model: str
    num_gpus: int
    seq_len: int
    batch: int


PAPER_CASES = (
    Case("mixtral-8x22b", 128, 4096, 256),
    Case("mixtral-8x22b", 128, 16384, 1024),
    Case("mixtral-8x22b", 256, 32768, 512),
    Case("mixtral-8x22b", 512, 65536, 256),
    Case("mixtral-8x22b", 1024, 131072, 128),
    Case("mixtral-8x22b-g8t8", 128, 4096, 256),
    Case("llama3-8x70b", 256, 4096, 256),
    Case("qwen2-57b-a14b", 64, 4096, 256),
)
FINE_GRAINED_CASES = (
    Case("qwen3-235b-a22b", 256, 4096, 1024),
    Case("qwen3-235b-a22b", 256, 32768, 128),
    Case("qwen3-235b-a22b", 256, 131072, 64),
    Case("deepseek-v3", 512, 4096, 2048),
    Case("deepseek-v3", 512, 32768, 256),
)
TABLES = {
    "paper": (PAPER_CASES, ("h100", "h200"), PAPER_SETTINGS),
    "all": (PAPER_CASES, ("h100", "h200"), []),
    "fine": (FINE_GRAINED_CASES, ("h100", "gb200"), []),
}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES, help="settings of the paper, all features, or fine-grained models")
    cases, gpus, fixed = TABLES[parser.parse_args().table]
    columns = [f"{gpu.upper()}: best | without folding | gain | gain, EP in DP" for gpu in gpus]
    print(f"| model, GPUs, seq len, batch | {' | '.join(columns)} |")
    print("|" + " --- |" * (1 + 4 * len(gpus)))
    for case in cases:
        answers = [_compare(case, gpu, fixed) for gpu in gpus]
        head = f"{case.model}, {case.num_gpus}, {case.seq_len // 1024}k, {case.batch}"
        print(f"| {head} | {' | '.join(map(_columns, answers))} |", flush=True)


def _compare(case: Case, gpu: str, fixed: list[str]) -> dict[str, Any] | str:
    """Return the comparison of a case, or the reason why it is missing."""
    command = [sys.executable, "-m", "moefold", "plan", case.model, "--gpu", gpu, "--num-gpus", str(case.num_gpus)]
    command += ["--seq-len", str(case.seq_len), "--global-batch-size", str(case.batch), "--compare-folding", "--json"]
    run = subprocess.run([*command, *(["--fix", *fixed] if fixed else [])], capture_output=True, text=True, check=False)
    if run.returncode:
        return run.stderr.strip().splitlines()[-1]
    comparison: dict[str, Any] = json.loads(run.stdout)["comparisons"][0]
    return comparison


def _columns(comparison: dict[str, Any] | str) -> str:
    """Return the four columns of a device."""
    if isinstance(comparison, str):
        return f"{comparison} | | |"
    gains = " | ".join(f"{comparison[name]:+.1%}".replace("%", " %") for name in ("gain", "gain_within_dp"))
    coupled = "the same" if comparison["same_mapping"] else _mapping(comparison["coupled"])
    return f"{_mapping(comparison['folded'])} | {coupled} | {gains}"


def _mapping(plan: dict[str, Any]) -> str:
    """Return the seconds and degrees of a mapping."""
    degrees = " ".join(f"{axis}{plan[axis]}" for axis in DEGREES)
    return f"{plan['step_time_s']:.2f} s, {degrees}" + (f" zero{plan['zero']}" if plan["zero"] > 1 else "")


if __name__ == "__main__":
    main()
