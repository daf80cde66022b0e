"""Measure the gain of overlapping expert all-to-alls with another micro-batch: with sleeps, and on this machine.

    python benchmarks/alltoall_overlap.py                       print both tables of docs/pipeline.md
    python benchmarks/alltoall_overlap.py --unit-ms 20 --steps 3

In the first table attention and experts sleep (`unit-ms` forward, twice that backward), and every all-to-all ends a
fixed time after its launch, so a rank that works meanwhile waits only for the remainder. As no rank computes for long,
two cores are enough. In the second table nothing sleeps: ranks share the cores with gloo, which sends the tokens.
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
from moefold.config.edit import edit_model
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.dataset import DataRequest
from moefold.launch.rank_pool import WorkerPool
from moefold.model.block import Block
from moefold.model.module_wrapper import wrap_method
from moefold.model.moe.layer import MoELayer
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify import PRELOAD

MAPPINGS: tuple[dict[str, Any], ...] = (
    {"world_size": 2, "ep": 2},
    {"world_size": 4, "pp": 2, "ep": 2},
    {"world_size": 4, "pp": 2, "ep": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"world_size": 4, "pp": 2, "ep": 2, "schedule": "dualpipev", "virtual_stages": 2},
)
NUM_LAYERS = 4


class _Sleep(torch.autograd.Function):
    """Identity that sleeps, twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class _DelayedWork:
    """Work handle of a collective that ends no sooner than `seconds` after its launch."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self._work = work
        self._end_s = time.perf_counter() + seconds

    def wait(self) -> None:
        """Wait for the collective and for the end of the delay."""
        self._work.wait()
        time.sleep(max(0.0, self._end_s - time.perf_counter()))


def add_delays(model: ParallelModel, compute_s: float, all_to_all_s: float) -> None:
    """Patch attention and experts to sleep, and all-to-alls to end after a delay."""

    def sleeping(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: _Sleep.apply(function(*args, **kwargs), compute_s)

    for stage in model.stages:
        for block in stage.layers.values():
            assert isinstance(block, Block)
            assert isinstance(block.ffn, MoELayer)
            wrap_method(block.attention, "forward", sleeping)
            wrap_method(block.ffn.experts, "forward", sleeping)
    begin_all_to_all = async_collectives.begin_all_to_all

    def begin_delayed(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        out, work = begin_all_to_all(*args, **kwargs)
        assert work is not None
        return out, _DelayedWork(work, all_to_all_s)

    async_collectives.begin_all_to_all = begin_delayed


def step_times(cfg: Config, compute_s: float, all_to_all_s: float, steps: int) -> list[float]:
    """Return the seconds of each step on this rank, without the first."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    if compute_s:
        add_delays(model, compute_s, all_to_all_s)
    data = DataRequest.of(cfg).open()
    loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    training = TrainingStep(model, cfg)
    times_s = []
    for i in range(steps + 1):
        batch = loader.batch(i * cfg.train.global_batch_size)
        dist.barrier()
        started_s = time.perf_counter()
        training.run(batch, i + 1)
        times_s.append(time.perf_counter() - started_s)
    return times_s[1:]


def measure(
    pool: WorkerPool, cfg: Config, steps: int, compute_s: float = 0.0, all_to_all_s: float = 0.0, *, overlaps: bool
) -> float:
    """Return the seconds of the median step of the slowest rank."""
    overlap_cfg = replace(cfg, parallel=replace(cfg.parallel, overlap_experts=overlaps))
    ranks = pool.run(cfg.parallel.world_size, step_times, overlap_cfg, compute_s, all_to_all_s, steps, timeout_s=300.0)
    return max(statistics.median(times) for times in ranks)


def recipe(mapping: dict[str, Any], hidden: int, seq_len: int, micro_batches: int) -> Config:
    """Return the recipe of a small model with MoE layers only."""
    dp = mapping["world_size"] // mapping.get("pp", 1)
    return Config(
        run=RunConfig(device="cpu", dtype="float32"),
        model=edit_model(
            ModelConfig(),
            {
                "layers": NUM_LAYERS,
                "hidden_size": hidden,
                "attention.num_heads": 4,
                "attention.num_kv_heads": 4,
                "vocab_size": 256,
                "ffn.moe.num_experts": 8,
                "ffn.moe.top_k": 2,
                "ffn.moe.intermediate_size": 2 * hidden,
            },
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
    parser.add_argument("--steps", type=int, default=1, help="steps, of which the median is reported (default 1)")
    parser.add_argument("--mappings", type=int, default=len(MAPPINGS), help="number of mappings to run (default all)")
    options = parser.parse_args()
    unit_s = options.unit_ms / 1000
    count = options.micro_batches
    pool = WorkerPool(PRELOAD)
    mappings = MAPPINGS[: options.mappings]
    print(
        f"m={count}, {NUM_LAYERS} layers, attention and experts {options.unit_ms:g} ms forward, twice that backward\n"
    )
    print("| mapping | all-to-all ms | compute s | all-to-alls s | plain s | overlapped s | hidden |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mapping in mappings:
        cfg = recipe(mapping, 16, 16, count)
        layers = NUM_LAYERS // mapping.get("pp", 1)
        no_delay = measure(pool, cfg, options.steps, unit_s, overlaps=False)
        for share in (0.5, 1.0, 2.0):
            all_to_all_s = share * unit_s
            plain = measure(pool, cfg, options.steps, unit_s, all_to_all_s, overlaps=False)
            overlapped = measure(pool, cfg, options.steps, unit_s, all_to_all_s, overlaps=True)
            seconds = (count * layers * 6 * unit_s, count * layers * 4 * all_to_all_s, plain, overlapped)
            cells = " | ".join(f"{number:.2f}" for number in seconds)
            hidden = (plain - overlapped) / (plain - no_delay)
            print(f"| {_name(mapping)} | {1000 * all_to_all_s:g} | {cells} | {hidden:.0%} |", flush=True)
    print("\n| mapping | plain s | overlapped s |\n| --- | --- | --- |")
    for mapping in mappings:
        cfg = recipe(mapping, 256, 128, count)
        times = [measure(pool, cfg, 3 * options.steps, overlaps=overlaps) for overlaps in (False, True)]
        print(f"| {_name(mapping)} | {times[0]:.3f} | {times[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
