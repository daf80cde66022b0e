"""Mappings over the staged process group equal one rank: on the CPU in float64, and with all ranks on one GPU."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.launch.rank_pool import WorkerPool
from moefold.validate.config import check_config
from moefold.verify import PRELOAD
from moefold.verify.distributed_run import run_on_groups
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.staged_group import init_staged_group

STEPS = 2
FAST = [{"world_size": 2, "cp": 2, "ep": 2, "zero": 3}]
WIDE = [
    {"world_size": 4, "tp": 2, "pp": 2, "etp": 2},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "ep": 2, "dispatcher": "allgather"},
    {"world_size": 2, "ep": 2, "dispatcher": "dedup_alltoall"},
    {"world_size": 2, "tp": 2, "overlap_tp": True},
    {"world_size": 2, "zero": 0},
    {"world_size": 2, "cp": 2, "context": "ulysses"},
    {"world_size": 2, "cp": 2, "context": "allgather"},
    {"world_size": 4, "tp": 2, "ep": 4},
    {"world_size": 4, "cp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"world_size": 4, "pp": 2, "ep": 2},
    {"world_size": 4, "ep": 2, "zero": 2},
    {"world_size": 4, "cp": 2, "ep": 4, "overlap_experts": True},
]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""Relative differences of losses and gradient norms; in low precision the differences of sums in another order."""


@pytest.fixture(scope="module")
def staged_pool():
    """Ranks on the CPU."""
    return WorkerPool([*PRELOAD, "tests.preload"], init_group=init_staged_group)


@pytest.fixture(scope="module")
def gpu_pool():
    """Ranks that share one GPU."""
    return WorkerPool(init_group=init_staged_group, forks=False)


def _recipe(device: str, dtype: str, **mapping: object) -> Config:
    """Sizes that the kernels of GPUs take."""
    sizes = {
        "hidden_size": 64,
        "attention.head_dim": 16,
        "ffn.moe.intermediate_size": 64,
        "ffn.dense.intermediate_size": 128,
        "init_std": 0.05,
    }
    train = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-3}
    cfg = tiny(model=sizes, train=train, **mapping)
    return replace(cfg, run=replace(cfg.run, dtype=dtype, device=device))


def run_staged(cfg: Config) -> list[tuple[float, float]]:
    """Train under the recipe's mapping; return loss and gradient norm of each step. Collective.

    On CUDA all ranks use the first GPU, and each an equal part of its memory.
    """
    device = torch.device(cfg.run.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(0.9 / cfg.parallel.world_size)
    record = run_on_groups(ParallelGroups.create(check_config(cfg), device), cfg, STEPS)
    return [(step.loss, step.grad_norm) for step in record.steps]


@cache
def _steps_of_one_rank(pool: WorkerPool, device: str, dtype: str) -> list[tuple[float, float]]:
    (steps,) = pool.run(1, run_staged, _recipe(device, dtype), timeout_s=110)
    return steps


def _check(pool: WorkerPool, device: str, dtype: str, mapping: dict) -> None:
    expected = _steps_of_one_rank(pool, device, dtype)
    for found in pool.run(mapping["world_size"], run_staged, _recipe(device, dtype, **mapping), timeout_s=180):
        for step, reference in zip(found, expected, strict=True):
            assert step == pytest.approx(reference, rel=TOLERANCE[dtype])


@pytest.mark.parity
@pytest.mark.parametrize("mapping", [*FAST, *slow([(mapping,) for mapping in WIDE])])
def test_staged_ranks_equal_one_rank(staged_pool, mapping):
    _check(staged_pool, "cpu", "float64", mapping)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("mapping", "dtype"),
    # Ranks that use CUDA are spawned, which takes seconds: bfloat16 under the mappings that have every axis.
    [*((mapping, "float32") for mapping in [*FAST, *WIDE]), *((mapping, "bfloat16") for mapping in FAST)],
)
def test_ranks_on_one_gpu_equal_one_rank(gpu_pool, mapping, dtype):
    _check(gpu_pool, "cuda", dtype, mapping)
