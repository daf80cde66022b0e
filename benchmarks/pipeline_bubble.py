"""Measure the pipeline bubble of each schedule with sleeps for compute, and compare it with the closed forms.

    python benchmarks/pipeline_bubble.py                            four ranks, eight micro-batches (docs/pipeline.md)
    python benchmarks/pipeline_bubble.py --micro-batches 16 --unit-ms 30

Every stage is a module that sleeps: `unit-ms` for the forward pass, for the input gradient and for the weight gradient,
which is delayed if the schedule splits the backward pass. The rest is the trainer's code: the schedule, its messages
over gloo, and the delayed weight gradients. As no rank computes, a few cores can run any number of ranks.

The bubble of a rank is its idle time between its first and its last action, over its busy time; the bubble of a
schedule is the maximum over its ranks. (arXiv:2401.10241 divides the same idle time by the sum of both.)
"""

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.comm.comm_timer import CommTimer
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.launch.rank_pool import WorkerPool
from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.module_wrapper import set_on_modules
from moefold.parallel.pipeline_schedule import MicroBatch, PipelineMessages, PipelineSchedule
from moefold.parallel.pipeline_stage import PipelineStage
from moefold.parallel.wgrad_store import WeightGradStore
from moefold.planner.cost_model.block import CostItem
from moefold.planner.simulator.simulate import StageSegments, simulate
from moefold.topology.message_plan import plan_messages
from moefold.topology.schedules import runtime_slots, schedule_named, schedule_rows, stage_ranks
from moefold.verify import PRELOAD

TimeSpans = list[tuple[float, float]]


@dataclass(frozen=True)
class Times:
    """Seconds of one stage with one micro-batch."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class Case:
    """A schedule and the closed form of its bubble from the papers."""

    schedule: str
    chunks: int
    form: str


CASES = (
    Case("gpipe", 1, "(p-1)/m"),
    Case("1f1b", 1, "(p-1)/m"),
    Case("interleaved", 2, "(p-1)/(m*v)"),
    Case("interleaved", 3, "(p-1)/(m*v)"),
    Case("zero-bubble", 1, "(p-1)*(F+I-W)/(m*v*(F+I+W))"),
    Case("zero-bubble", 2, "(p-1)*(F+I-W)/(m*v*(F+I+W))"),
    Case("zero-bubble", 3, "(p-1)*(F+I-W)/(m*v*(F+I+W))"),
    Case("zbv", 2, "0 where F=I=W"),
    Case("dualpipev", 2, "(p-1)*(F+2*I-W)/(m*v*(F+I+W))"),
)
FORMS = {
    "(p-1)/m": lambda p, m, v, t: (p - 1) / m,
    "(p-1)/(m*v)": lambda p, m, v, t: (p - 1) / (m * v),
    "(p-1)*(F+I-W)/(m*v*(F+I+W))": lambda p, m, v, t: (
        (p - 1) * (t.forward + t.input_gradient - t.weight_gradient) / (m * v * t.total)
    ),
    "0 where F=I=W": lambda p, m, v, t: 0.0,
    # DualPipe's (PP/2-1)(F&B+B-3W) with PP=2p stages, B=I+W, and F&B=F+B because nothing overlaps here.
    "(p-1)*(F+2*I-W)/(m*v*(F+I+W))": lambda p, m, v, t: (
        (p - 1) * (t.forward + 2 * t.input_gradient - t.weight_gradient) / (m * v * t.total)
    ),
}


class _Sleep(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "SleepingStage") -> Tensor:
        ctx.stage = stage
        stage.sleep(stage.times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        stage = ctx.stage
        stage.sleep(stage.times.input_gradient)
        if stage.wgrad_store is None:
            stage.weight_gradient()
        else:
            stage.wgrad_store.put((stage.weight,), stage.weight_gradient)
        return grad.clone(), None


class SleepingStage(nn.Module):
    """Pipeline stage that sleeps instead of computing, and records when."""

    def __init__(self, times: Times, spans: TimeSpans) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(1))
        self.times = times
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self._spans = spans

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 1] to [B, 1]."""
        return _Sleep.apply(x + self.anchor, self)

    def sleep(self, seconds: float) -> None:
        """Sleep and record the time span."""
        start = time.perf_counter()
        time.sleep(seconds)
        self._spans.append((start, time.perf_counter()))

    def weight_gradient(self) -> tuple[Tensor]:
        """Sleep for the weight gradient."""
        self.sleep(self.times.weight_gradient)
        return (torch.zeros(1),)


def run_rank(cfg: Config, times: Times, repeats: int) -> list[tuple[float, float]]:
    """Run one pipeline rank; return its (idle, busy) seconds of each repeat."""
    parallel = cfg.parallel
    num_micro_batches = cfg.num_micro_batches
    spans: TimeSpans = []
    ranks = stage_ranks(parallel)
    stages = []
    for number, rank in enumerate(ranks):
        if rank != dist.get_rank():
            continue
        module = SleepingStage(times, spans)
        wgrad_store = None
        if schedule_named(parallel.schedule).splits_backward:
            wgrad_store = WeightGradStore(module, reduces_each_micro_batch=False)
            set_on_modules(module, "wgrad_store", wgrad_store)
        stages.append(PipelineStage(module, number, len(ranks), wgrad_store=wgrad_store))
    schedule = PipelineSchedule(
        stages,
        len(ranks),
        plan_messages(runtime_slots(cfg.model, cfg.parallel, cfg.train), ranks)[dist.get_rank()],
        PipelineMessages(None, (1, 1), torch.float32, torch.device("cpu")),
        comm_timer=CommTimer(),
    )
    micro_batches: list[MicroBatch] = [(torch.zeros(1, 1, requires_grad=True), {})] * num_micro_batches
    measured = []
    for _ in range(repeats + 1):
        dist.barrier()
        spans.clear()
        schedule.run(micro_batches)
        busy = sum(stop - start for start, stop in spans)
        measured.append((spans[-1][1] - spans[0][0] - busy, busy))
    return measured[1:]


def measure(
    pool: WorkerPool, case: Case, pp: int, micro_batches: int, times: Times, repeats: int
) -> tuple[float, float]:
    """Return the bubble of a schedule, measured (best of the repeats) and simulated."""
    cfg = Config(
        parallel=ParallelConfig(world_size=pp, pp=pp, schedule=case.schedule, virtual_stages=case.chunks),
        train=TrainConfig(global_batch_size=micro_batches),
    )
    ranks = pool.run(pp, run_rank, cfg, times, repeats)
    largest = [max(idle / busy for idle, busy in repeat) for repeat in zip(*ranks, strict=True)]
    return min(largest), simulated(case, pp, micro_batches, times)


def simulated(case: Case, pp: int, micro_batches: int, times: Times) -> float:
    """Return the bubble of the schedule's action order if messages took no time."""
    forward, inputs, weights = (
        (CostItem("work", seconds),) for seconds in (times.forward, times.input_gradient, times.weight_gradient)
    )
    work = StageSegments(forward=forward, backward=inputs + weights, input_gradient=inputs, weight_gradient=weights)
    rows = schedule_rows(case.schedule, pp, case.chunks, micro_batches)
    return simulate(rows, [work] * (pp * case.chunks)).bubble


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step (default 8)")
    parser.add_argument("--unit-ms", type=float, default=40.0, help="time of F, I and W each (default 40)")
    parser.add_argument("--repeats", type=int, default=3, help="steps, of which the best is reported (default 3)")
    options = parser.parse_args()
    unit = options.unit_ms / 1000
    pool = WorkerPool(PRELOAD)
    equal = Times(unit, unit, unit)
    unequal = replace(equal, input_gradient=1.5 * unit, weight_gradient=0.5 * unit)
    print(f"p={options.pp} ranks, m={options.micro_batches} micro-batches, unit {options.unit_ms:g} ms\n")
    print("| schedule | v | F:I:W | closed form | closed | simulated | measured |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for name, times in (("1:1:1", equal), ("2:3:1", unequal)):
            if times is unequal and case.schedule == "zbv":
                continue
            closed = FORMS[case.form](options.pp, options.micro_batches, case.chunks, times)
            measured, expected = measure(pool, case, options.pp, options.micro_batches, times, options.repeats)
            cells = (
                case.schedule,
                case.chunks,
                name,
                f"`{case.form}`",
                f"{closed:.3f}",
                f"{expected:.3f}",
                f"{measured:.3f}",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
