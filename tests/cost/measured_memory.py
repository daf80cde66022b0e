"""Memory that a step of small models really takes, and its comparison with the formulas."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.peak_memory import RankMemory, compute_rank_memory
from moefold.cost.saved_tensors import CPU_KERNELS, KernelProfile
from moefold.launch.rank_pool import WorkerPool
from moefold.ops import gemm
from moefold.ops.cpu.gemm import CGemm
from moefold.train.memory_profile import MeasuredMemory, measure_rank
from moefold.validate.config import check_config
from tests.models import model_of

MODEL = {
    "layers": 2,
    "layers.ffn": "dense, moe",
    "hidden_size": 64,
    "attention.num_heads": 4,
    "attention.num_kv_heads": 2,
    "attention.head_dim": 16,
    "ffn.dense.intermediate_size": 160,
    "ffn.moe.intermediate_size": 96,
    "ffn.moe.num_experts": 4,
    "ffn.moe.top_k": 2,
    "vocab_size": 256,
    "ffn.moe.shared.intermediate_size": 80,
}
LATENT = {
    "attention": "mla",
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 20,
    "attention.qk_nope_head_dim": 12,
    "attention.qk_rope_head_dim": 4,
    "attention.v_head_dim": 16,
}
WITHIN = 0.1
COLLECTIVES = ("allreduce", "broadcast", "allgather", "gather", "reduce_scatter")
COLLECTIVES += ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
COLLECTIVES += ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
"""Methods of process groups that a thread of gloo runs; torch 2.13 has new names for some."""


def memory_config(
    dtype: str = "float32",
    model: dict[str, object] | None = None,
    train: dict[str, object] | None = None,
    moe: dict[str, object] | None = None,
    **parallel: object,
) -> Config:
    cfg = Config(
        run=RunConfig(dtype=dtype, device="cpu"),
        model=model_of(MODEL | (model or {})),
        parallel=ParallelConfig(**parallel),
        # Even experts: the formulas assume the same number of rows for each.
        moe=MoEConfig(**{"choice": "round_robin"} | (moe or {})),
        train=TrainConfig(**{"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 4} | (train or {})),
        data=DataConfig(kind="synthetic"),
    )
    check_config(cfg)
    return cfg


class ReleasedWork(dist.Work):
    """A collective that gloo has let go of once it is waited for.

    The thread that ran it drops its references to the tensors when it gets Python's lock, which may be after the wait.

    Args:
        work: the collective.
        tensors: aliases of its tensors, to which only `work` and this object refer.
    """

    def __init__(self, work: dist.Work, tensors: list[Tensor]) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work is None or self._work.wait(timeout)
        self._work = None
        while any(tensor._use_count() > 1 for tensor in self._tensors):
            time.sleep(0)
        self._tensors.clear()
        return done


def releasing(collective: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Return a method of process groups whose work waits until gloo has let go of the tensors."""

    def call(group: dist.ProcessGroup, *args: Any) -> dist.Work:
        aliases = [_alias(arg) for arg in args]
        return ReleasedWork(collective(group, *aliases), list(_tensors_in(aliases)))

    return call


def _alias(value: Any) -> Any:
    if isinstance(value, list):
        return [_alias(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for item in value if isinstance(value, list) else ():
        yield from _tensors_in(item)


def measured(cfg: Config) -> MeasuredMemory:
    """The memory of this rank, with products and combines as the formulas count them, whatever this processor has."""
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist.ProcessGroup, name):
                patch.setattr(dist.ProcessGroup, name, releasing(getattr(dist.ProcessGroup, name)))
        patch.setattr(gemm, "_EMULATES_BFLOAT16", True)
        patch.setattr(gemm, "_USES_ONEDNN_FP32", False)
        patch.setattr(CGemm, "is_fast", lambda gemm, dtype: False)
        patch.delattr("moefold.ops.cpu.permute.CPermuteOps.combine")
        patch.delattr("moefold.ops.cpu.permute.CPermuteOps.combine_backward")
        threads = torch.get_num_threads()
        # Kernels of linear attention and of gemms hold scratch memory for each thread; the formulas count one thread.
        torch.set_num_threads(1)
        try:
            return measure_rank(cfg)
        finally:
            torch.set_num_threads(threads)


def measure_one_rank(cfg: Config) -> MeasuredMemory:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        return measured(cfg)
    finally:
        dist.destroy_process_group()


def formulas_of(cfg: Config, kernels: KernelProfile = CPU_KERNELS) -> tuple[RankMemory, ...]:
    """The formulas without the gradient of the head, which is measured as workspace of the backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationMemory, "head_gradient_sum", 0)
        return compute_rank_memory(cfg, kernels=kernels)


def assert_memory_close(cfg: Config, ranks: list[MeasuredMemory], kernels: KernelProfile = CPU_KERNELS) -> None:
    formulas = formulas_of(cfg, kernels)
    for rank in ranks:
        formula = formulas[rank.pp_rank].activations
        assert formula.total == pytest.approx(rank.activations, rel=WITHIN), (rank, formula)


def measure_ranks(pool: WorkerPool, cfg: Config, timeout_s: float = 120.0) -> list[MeasuredMemory]:
    """Return the memory of all ranks."""
    return pool.run(cfg.parallel.world_size, measured, cfg, timeout_s=timeout_s)


def lacking_values(cfg: Config, rank: MeasuredMemory) -> int:
    """Return the values of embedding and head that the last tp rank has less than the first, as the formula counts."""
    tp = cfg.parallel.tp
    rows = tp * cfg.vocab_rows - cfg.model.vocab_size if rank.rank % tp == tp - 1 else 0
    return 2 * cfg.model.hidden_size * rows


def assert_states(cfg: Config, ranks: list[MeasuredMemory]) -> None:
    """Compare weights, gradients and moments after a step, and the weights gathered in it, to the byte."""
    formulas = compute_rank_memory(cfg, kernels=CPU_KERNELS)
    for rank in ranks:
        states = formulas[rank.pp_rank].states
        lacking = lacking_values(cfg, rank) * torch.float32.itemsize
        found = rank.after["weights"], rank.after["gradients"], rank.after["optimizer"]
        expected = states.weights - lacking, states.gradients - lacking, states.optimizer - 2 * lacking
        assert found == expected, rank
