"""Measure the overhead of run monitoring: steps without the flight recorder, as trained, and with each check.

    python benchmarks/monitoring_overhead.py        the quickstart's 8 ranks, a few minutes on a CPU
    python benchmarks/monitoring_overhead.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 \
        parallel.ep=1                               one rank

Every round trains one step of each kind in random order, so other load on the machine affects all kinds equally. Times
are relative to the baseline step of the same round. CPU time is the sum over all ranks and threads: if ranks share
cores, it is as good a measure as wall time, with less noise.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from rank_trainer import RankTrainer, build_parser, run_recipe

from moefold.comm.collectives import all_reduce_sum
from moefold.config.schema import Config
from moefold.model.moe.dispatch.validating import ValidatingDispatcher

BASELINE = "baseline"
NO_RECORDER = "no flight recorder"
CHECK_DISPATCH = "check_dispatch"
REPLICA_CHECK = "replica check"
WARM_UP = 3


@dataclass
class _StepTimes:
    """Times of one kind of step, in seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class _MonitoringSwitch:
    """Enables and disables parts of the monitoring between steps."""

    def __init__(self, trainer: RankTrainer) -> None:
        self._trainer = trainer
        groups = trainer.groups
        model = trainer.training.model
        self._layers = {
            number: (layer, layer.dispatcher, ValidatingDispatcher(layer.dispatcher, groups.moe, number, groups.device))
            for number, layer in (model.moe_layers().items() if groups.moe.experts.size > 1 else ())
        }

    def step(self, kind: str) -> tuple[float, float]:
        """Train a step of a kind and return its wall time and the CPU time of all ranks."""
        recorder = self._trainer.groups.recorder
        if kind == NO_RECORDER:
            recorder.set_phase = recorder.record_collective = lambda *args: None  # type: ignore[assignment,method-assign]
        for layer, dispatcher, validating in self._layers.values():
            layer.dispatcher = validating if kind == CHECK_DISPATCH else dispatcher
        # The replica check runs at even step numbers.
        number = 2 * self._trainer.num_steps + (2 if kind == REPLICA_CHECK else 1)
        started_s = time.process_time()
        wall_s, _ = self._trainer.step(number)
        cpu_s = torch.tensor(time.process_time() - started_s, dtype=torch.float64)
        vars(recorder).pop("set_phase", None)
        vars(recorder).pop("record_collective", None)
        return wall_s, float(all_reduce_sum(cpu_s, self._trainer.groups.world))


def _count_records(trainer: RankTrainer) -> tuple[int, int]:
    """Train a step and return the number of collectives and phases in this rank's flight recorder."""
    recorder = trainer.groups.recorder
    before = sum(recorder.snapshot().counts.values())
    trainer.step(2 * trainer.num_steps + 1)
    snapshot = recorder.snapshot()
    return sum(snapshot.counts.values()) - before, snapshot.phase_number


def _measure(cfg: Config, trainer: RankTrainer, args: argparse.Namespace) -> None:
    switch = _MonitoringSwitch(trainer)
    is_distributed = cfg.parallel.world_size > 1
    kinds = [BASELINE, NO_RECORDER] + ([CHECK_DISPATCH, REPLICA_CHECK] if is_distributed else [])
    times = {kind: _StepTimes() for kind in kinds}
    for kind in kinds * WARM_UP:
        switch.step(kind)
    order = random.Random(0)
    for _ in range(args.rounds):
        order.shuffle(kinds)
        for kind in kinds:
            wall_s, cpu_s = switch.step(kind)
            times[kind].wall.append(wall_s)
            times[kind].cpu.append(cpu_s)
    collectives, phases = _count_records(trainer)
    if trainer.is_first:
        print(f"{args.rounds} rounds; rank 0 records {collectives} collectives and {phases} phases a step")
        for kind in times:
            _print(kind, times[kind], times[BASELINE])


def _print(kind: str, times: _StepTimes, baseline: _StepTimes) -> None:
    median_s = statistics.median(times.wall)
    print(f"{kind}: {median_s * 1e3:.0f} ms, {statistics.median(times.cpu) * 1e3:.0f} ms of CPU, ", end="")
    for name, kind_s, baseline_s in (("time", times.wall, baseline.wall), ("CPU", times.cpu, baseline.cpu)):
        ratios = [a / b for a, b in zip(kind_s, baseline_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f" {name} {100 * (middle - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})", end="")
    print()


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind (default 40)")
    args = parser.parse_args()
    is_single_rank = "parallel.world_size=1" in args.overrides
    run_recipe(_measure, args, [] if is_single_rank else ["faults.replica_check_every=2"])


if __name__ == "__main__":
    main()
