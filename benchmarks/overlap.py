"""What hiding the exchanges of experts behind another micro-batch saves: with timed waits, and on this machine.

    python benchmarks/overlap.py                       both tables of docs/pipeline.md
    python benchmarks/overlap.py --unit-ms 20 --steps 3

In the first table attention and experts sleep (`unit-ms` forward, twice that backward), and every exchange of rows
takes its time from when it began, so that a rank that does something meanwhile waits for the rest alone. As nobody
computes for long, two cores show it. In the second nothing is added: ranks share the cores with gloo, which moves the
rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import async_collectives
from moefold.comm.groups import ParallelGroups
from moefold.config.model import ModelConfig
from moefold.config.schema import Config, DataConfig, ParallelConfig, RunConfig, TrainConfig
from moefold.data import open_dataset
from moefold.model.module_wrapper import wrap_method
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import Block
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.testing.pool import WorkerPool
from moefold.train.batch import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config

MAPPINGS: tuple[dict[str, Any], ...] = (
    {"world_size": 2, "ep": 2},
    {"world_size": 4, "pp": 2, "ep": 2},
    {"world_size": 4, "pp": 2, "ep": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"world_size": 4, "pp": 2, "ep": 2, "schedule": "dualpipev", "virtual_stages": 2},
)
NUM_LAYERS = 4


class _Wait(torch.autograd.Function):
    """The identity, which takes its time, forward and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class _SlowWork:
    """An exchange that is over when it is, but no sooner than so many seconds after it began."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self._work, self._until = work, time.perf_counter() + seconds

    def wait(self) -> None:
        """Wait for both."""
        self._work.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))


def slow_down(model: ParallelModel, compute_s: float, exchange_s: float) -> None:
    """Let attention, experts and exchanges take their time."""

    def waiting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: _Wait.apply(function(*args, **kwargs), compute_s)

    for stage in model.stages:
        for block in stage.layers.values():
            assert isinstance(block, Block)
            assert isinstance(block.ffn, MoELayer)
            wrap_method(block.attention, "forward", waiting)
            wrap_method(block.ffn.experts, "forward", waiting)
    begin = async_collectives.begin_all_to_all

    def begin_slowly(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        out, work = begin(*args, **kwargs)
        assert work is not None
        return out, _SlowWork(work, exchange_s)

    async_collectives.begin_all_to_all = begin_slowly


def step_times(cfg: Config, compute_s: float, exchange_s: float, steps: int) -> list[float]:
    """Seconds of each step on this rank, the first left out."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    if compute_s:
        slow_down(model, compute_s, exchange_s)
    data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    loader, training = BatchSharder(data.train, cfg, groups, model.positions), TrainingStep(model, cfg)
    found = []
    for i in range(steps + 1):
        batch = loader.batch(i * cfg.train.global_batch_size)
        dist.barrier()
        start = time.perf_counter()
        training.run(batch, i + 1)
        found.append(time.perf_counter() - start)
    return found[1:]


def measure(
    pool: WorkerPool, cfg: Config, steps: int, compute_s: float = 0.0, exchange_s: float = 0.0, *, overlaps: bool
) -> float:
    """Seconds of the median step of the slowest rank."""
    its = replace(cfg, parallel=replace(cfg.parallel, overlap_experts=overlaps))
    ranks = pool.run(cfg.parallel.world_size, step_times, its, compute_s, exchange_s, steps, timeout_s=300.0)
    return max(statistics.median(times) for times in ranks)


def recipe(mapping: dict[str, Any], hidden: int, seq_len: int, micro_batches: int) -> Config:
    """A small model of MoE layers alone."""
    dp = mapping["world_size"] // mapping.get("pp", 1)
    return Config(
        run=RunConfig(device="cpu", dtype="float32"),
        model=ModelConfig(
            num_layers=NUM_LAYERS,
            hidden_size=hidden,
            num_attention_heads=4,
            num_query_groups=4,
            vocab_size=256,
            num_experts=8,
            top_k=2,
            moe_ffn_hidden_size=2 * hidden,
        ),
        parallel=ParallelConfig(**mapping),
        train=TrainConfig(seq_len=seq_len, micro_batch_size=1, global_batch_size=micro_batches * dp),
        data=DataConfig(kind="synthetic"),
    )


def _name(mapping: dict[str, Any]) -> str:
    return f"pp={mapping.get('pp', 1)} {mapping.get('schedule', '1f1b')}, ep={mapping['ep']}"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-ms", type=float, default=10.0, help="forward time of attention, and of experts")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step (default 8)")
    parser.add_argument("--steps", type=int, default=1, help="steps, of which the median counts (default 1)")
    parser.add_argument("--mappings", type=int, default=len(MAPPINGS), help="how many of the mappings (default all)")
    options = parser.parse_args()
    unit, count, pool = options.unit_ms / 1000, options.micro_batches, WorkerPool()
    mappings = MAPPINGS[: options.mappings]
    print(
        f"m={count}, {NUM_LAYERS} layers, attention and experts {options.unit_ms:g} ms forward, twice that backward\n"
    )
    print("| mapping | exchange ms | compute s | exchanges s | plain s | overlapped s | hidden |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mapping in mappings:
        cfg = recipe(mapping, 16, 16, count)
        layers = NUM_LAYERS // mapping.get("pp", 1)
        nothing = measure(pool, cfg, options.steps, unit, overlaps=False)
        for share in (0.5, 1.0, 2.0):
            plain, overlapped = (
                measure(pool, cfg, options.steps, unit, share * unit, overlaps=overlaps) for overlaps in (False, True)
            )
            seconds = (count * layers * 6 * unit, count * layers * 4 * share * unit, plain, overlapped)
            cells = " | ".join(f"{number:.2f}" for number in seconds)
            hidden = (plain - overlapped) / (plain - nothing)
            print(f"| {_name(mapping)} | {1000 * share * unit:g} | {cells} | {hidden:.0%} |", flush=True)
    print("\n| mapping | plain s | overlapped s |\n| --- | --- | --- |")
    for mapping in mappings:
        cfg = recipe(mapping, 256, 128, count)
        found = [measure(pool, cfg, 3 * options.steps, overlaps=overlaps) for overlaps in (False, True)]
        print(f"| {_name(mapping)} | {found[0]:.3f} | {found[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
