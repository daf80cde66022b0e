"""What the watch over a run costs: steps with the flight record off, as trained, and with each check, in one run.

    python benchmarks/watching.py                   the quickstart's 8 ranks, some minutes on a CPU
    python benchmarks/watching.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.ep=1

Every round trains one step of each kind, in another order each time, so that what other work does to the machine
meets all kinds alike. Times are set against those of the round's plain step. CPU time is that of all ranks and all
their threads: where ranks share cores it says the same as the clock, with less noise.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from rank_run import RankRun, parser, run_recipe

from moefold.comm.collectives import all_reduce_sum
from moefold.config.schema import Config
from moefold.model.moe.dispatch.validating import ValidatingDispatcher

PLAIN, NO_RECORD, DISPATCH, REPLICAS = "plain", "no flight record", "check_dispatch", "replica check"
WARM_UP = 3


@dataclass
class _Kind:
    """What was measured of one kind of step, in seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class _Switches:
    """Turns what watches on and off between steps."""

    def __init__(self, run: RankRun) -> None:
        self._run = run
        groups, model = run.groups, run.training.model
        self._layers = {
            number: (layer, layer.dispatcher, ValidatingDispatcher(layer.dispatcher, groups.moe, number, groups.device))
            for number, layer in (model.moe_layers().items() if groups.moe.experts.size > 1 else ())
        }

    def step(self, kind: str) -> tuple[float, float]:
        """Train a step of a kind; its time, and the CPU time of all ranks."""
        record = self._run.groups.recorder
        if kind == NO_RECORD:
            record.set_phase = record.record_collective = lambda *args: None  # type: ignore[method-assign]
        for layer, plain, checked in self._layers.values():
            layer.dispatcher = checked if kind == DISPATCH else plain
        # The recipe asks for the check of replicas at even numbers.
        number = 2 * self._run.num_steps + (2 if kind == REPLICAS else 1)
        started_s = time.process_time()
        wall_s, _ = self._run.step(number)
        cpu_s = torch.tensor(time.process_time() - started_s, dtype=torch.float64)
        vars(record).pop("enter", None)
        vars(record).pop("begin", None)
        return wall_s, float(all_reduce_sum(cpu_s, self._run.groups.world))


def _events(run: RankRun) -> tuple[int, int]:
    """Collectives and phases that a step writes into the record of this rank."""
    record = run.groups.recorder
    before = sum(record.snapshot().counts.values())
    run.step(2 * run.num_steps + 1)
    sighting = record.snapshot()
    return sum(sighting.counts.values()) - before, sighting.phase_number


def _measure(cfg: Config, run: RankRun, args: argparse.Namespace) -> None:
    switches = _Switches(run)
    many = cfg.parallel.world_size > 1
    kinds = [PLAIN, NO_RECORD] + ([DISPATCH, REPLICAS] if many else [])
    found = {kind: _Kind() for kind in kinds}
    for kind in kinds * WARM_UP:
        switches.step(kind)
    order = random.Random(0)
    for _ in range(args.rounds):
        order.shuffle(kinds)
        for kind in kinds:
            wall_s, cpu_s = switches.step(kind)
            found[kind].wall.append(wall_s)
            found[kind].cpu.append(cpu_s)
    collectives, phases = _events(run)
    if run.is_first:
        print(f"{args.rounds} rounds; rank 0 notes {collectives} collectives and {phases} phases a step")
        for kind, times in found.items():
            _print(kind, times, found[PLAIN])


def _print(kind: str, times: _Kind, plain: _Kind) -> None:
    median_s = statistics.median(times.wall)
    print(f"{kind}: {median_s * 1e3:.0f} ms, {statistics.median(times.cpu) * 1e3:.0f} ms of CPU, ", end="")
    for name, mine, others in (("time", times.wall, plain.wall), ("CPU", times.cpu, plain.cpu)):
        ratios = [a / b for a, b in zip(mine, others, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f" {name} {100 * (middle - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})", end="")
    print()


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--rounds", type=int, default=40)
    args = words.parse_args()
    is_alone = "parallel.world_size=1" in args.overrides
    run_recipe(_measure, args, [] if is_alone else ["faults.replica_check_every=2"])


if __name__ == "__main__":
    main()
