"""Turns of a race: how one process of an implementation learns its place, waits and reports; without other packages.

An implementation may run in an environment without moefold, such as vLLM's.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work, on which all implementations agree."""

    preset: str = "bench-small"
    samples: int = 8
    """Samples of a training step, of all ranks."""
    seq_len: int = 256
    rollouts: int = 64
    """Rollouts of a GRPO step."""
    prompt: int = 32
    new: int = 64
    lengths: int = 256
    """Samples of the scenario of log-normal lengths."""
    shared: tuple[int, int, int, int] = (32, 8, 512, 32)
    """Prompts, samples of each, tokens of a prompt, new tokens."""
    folder_width: int = 1024
    """Hidden size of the model that is imported and exported."""
    positions: int = 1024


TINY = Sizes("tiny", 2, 16, 8, 8, 4, 4, (2, 2, 16, 2), 64, 64)
GROUP_SIZE = 8
"""Rollouts of a prompt."""
LEARNING_RATE = 1e-6
SEED = 5
GRPO_WARM_UP = 2
WARM_UP = 1
"""Rounds that do not count."""


@dataclass(frozen=True)
class ProcessSpec:
    """Place of one process of an implementation in the race.

    Attributes:
        folder: inputs, written by `benchmarks.race.moefold_runs` as the implementation `inputs`.
        scratch: an empty folder of this implementation.
        steps: turns, warm-up included, for implementations that run their own loop.
        port: port of the rendezvous of the ranks.
    """

    folder: Path
    scratch: Path
    sizes: Sizes
    steps: int
    rank: int = 0
    ranks: int = 1
    port: int = 0

    def as_json(self) -> str:
        """Return the words of the command line."""
        return json.dumps(vars(self) | {"sizes": vars(self.sizes)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> "ProcessSpec":
        """Read the output of `as_json`."""
        fields = json.loads(text)
        sizes = Sizes(**fields.pop("sizes"))
        return cls(Path(fields.pop("folder")), Path(fields.pop("scratch")), sizes, **fields)


class Turns:
    """The turns of this process: lines of standard input start one, lines of standard output end it."""

    def __init__(self) -> None:
        # Libraries print to standard output: from now on they print to standard error.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started = 0.0, 0.0

    def ready(self) -> None:
        """Report that everything is built."""
        self._say({"ready": True})

    def begin(self) -> str:
        """Wait for a turn and return its scenario. After the last turn, end the process."""
        line = sys.stdin.readline()
        if not line.startswith("go"):
            os._exit(0)
        self._started = time.process_time(), time.perf_counter()
        return line[2:].strip()

    def end(self, facts: Mapping[str, Any] | None = None) -> None:
        """Report the CPU time of all threads of this process, the wall time, and facts, which may replace both."""
        cpu_s = time.process_time() - self._started[0]
        wall_s = time.perf_counter() - self._started[1]
        self._say({"cpu_s": cpu_s, "wall_s": wall_s, **(facts or {})})

    def take(self, run: Callable[[str], Mapping[str, Any] | None], clean: Callable[[str], None] | None = None) -> None:
        """Run a function of the scenario in each turn, and another one after it, whose time does not count."""
        self.ready()
        while True:
            scenario = self.begin()
            self.end(run(scenario))
            if clean is not None:
                clean(scenario)

    def _say(self, line: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


def run_implementation(kinds: Mapping[str, Callable[[Turns, ProcessSpec], None]], argv: Sequence[str]) -> None:
    """Run the implementation that the command line names: its kind and its `ProcessSpec`."""
    kind, text = argv
    kinds[kind](Turns(), ProcessSpec.from_json(text))


def prompts_of(folder: Path, scenario: str) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of a scenario of decoding, and the number of new tokens of each."""
    prompts, lengths = json.loads((folder / "prompts.json").read_text())[scenario]
    return prompts, lengths


def grpo_prompts(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the prompts of GRPO."""
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
