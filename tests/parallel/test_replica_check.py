"""Tensors that ranks should hold with equal bits: a flipped bit is found, and the rank and the tensor are named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefold.comm.groups import Group
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.data.dataset import DataRequest
from moefold.metrics.replica_metrics import ReplicaMetrics
from moefold.ops.tensor_hash import TensorHasher
from moefold.optim.states import named_moments
from moefold.parallel import shared_gather
from moefold.parallel.batch import Batch
from moefold.parallel.parallelize import parallelize
from moefold.parallel.replica_check import Divergence, HostFact, ReplicaCheck
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.verify.covering import few_else_slow
from tests.verify.recipes import tiny, without_mapping

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


digest = TensorHasher(torch.device("cpu")).digest


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [3, 4])
def test_equal_bytes_have_equal_digests_and_others_have_not(dtype, rows):
    values = torch.arange(rows * rows).view(rows, rows)
    tensor = values % 4 > 2 if dtype == torch.bool else values.to(dtype)
    assert torch.equal(digest(tensor), digest(tensor.clone()))
    assert torch.equal(digest(tensor.T.contiguous().T), digest(tensor)), "strides are not content"
    assert not torch.equal(digest(tensor), digest(tensor.T)), "nor is order"
    beside = torch.cat([tensor.flatten()[:1], tensor.flatten()])
    assert torch.equal(digest(beside[1:]), digest(tensor)), "nor is where it lies in memory"


@pytest.mark.parametrize("length", [20, 21])
def test_every_bit_counts_in_every_chunk(monkeypatch, length):
    monkeypatch.setattr("moefold.ops.tensor_hash.CHUNK_WORDS", 3)
    digest = TensorHasher(torch.device("cpu")).digest
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(0))
    seen = {tuple(digest(tensor).tolist())}
    for place in range(length):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(tuple(digest(flipped).tolist()))
    assert len(seen) == 1 + length * 32
    assert not torch.equal(digest(torch.tensor([0.0])), digest(torch.tensor([-0.0])))


@pytest.mark.parametrize("bit", [31, 63])
def test_two_flips_of_the_same_bit_do_not_cancel(bit):
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(0)).view(torch.int64)
    seen = {tuple(digest(tensor).tolist())}
    for first in range(100):
        for second in range(first):
            flipped = tensor.clone()
            flipped[[first, second]] ^= -(2**63) if bit == 63 else 1 << bit
            seen.add(tuple(digest(flipped).tolist()))
    assert len(seen) == 1 + 100 * 99 // 2


def test_integers_that_change_places_within_a_chunk_or_between_two_are_seen(monkeypatch):
    monkeypatch.setattr("moefold.ops.tensor_hash.CHUNK_WORDS", 3)
    digest = TensorHasher(torch.device("cpu")).digest
    tensor = torch.arange(1, 13)
    for first in range(12):
        for second in range(first):
            order = list(range(12))
            order[first], order[second] = second, first
            swapped = digest(tensor[order])
            assert swapped[0] == digest(tensor)[0]
            assert swapped[1] != digest(tensor)[1]


def _said(words: str) -> list[HostFact]:
    return [HostFact("the position of the run", words, ("world",))]


def flip(tensor: Tensor) -> None:
    """The lowest bit of the last value of this rank's part; a second time undoes it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.detach().flatten().view(torch.int64)[-1] ^= 1


def _found_after_flips(cfg: Config, flips: list[tuple[str, int]]) -> list[tuple[Divergence, ...]]:
    """Return the findings at first, after each flip of a tensor on a rank (undone again), and with a faulty gather."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    moments = named_moments(training.optimizer, training.parameters)
    replicas = ReplicaCheck(model, moments, cfg.parallel.zero)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0)
    training.run(batch, 1)
    found = [replicas.find_divergences(batch, _said("here"))]
    tensors: dict[str, Any] = {**training.parameters, **moments, **training.buffers}
    tensors |= {"the batch": batch.tokens}
    for name, rank in flips:
        if name == "the position of the run":
            found.append(replicas.find_divergences(batch, _said(f"here{groups.rank == rank}")))
            continue
        if groups.rank == rank:
            flip(tensors[name])
        found.append(replicas.find_divergences(batch, _said("here")))
        if groups.rank == rank:
            flip(tensors[name])
    found.append(replicas.find_divergences(batch, _said("here")))
    return found


def _only(of_ranks: list[Any]) -> Any:
    """Return the findings, which must be the same on all ranks."""
    assert all(one == of_ranks[0] for one in of_ranks)
    return of_ranks[0]


NORM, EXPERT, BIAS = "layers.0.attention_norm.weight", "layers.1.ffn.experts.w_up", "layers.1.ffn.router.expert_bias"
MODEL = {"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"}
CASES: list[tuple[dict[str, Any], list[tuple[str, int, set[tuple[str, tuple[int, ...]]]]]]] = [
    (
        {"world_size": 3, "zero": 0},
        [
            ("head.weight", 2, {("dp_cp", (2,))}),
            (EXPERT, 1, {("edp", (1,))}),
            (f"{EXPERT}.exp_avg_sq", 0, {("edp", (0,))}),
            (BIAS, 1, {("stage", (1,))}),
            ("the position of the run", 2, {("world", (2,))}),
        ],
    ),
    (
        {"world_size": 4, "tp": 2, "pp": 2, "zero": 1},
        [
            (NORM, 1, {("tp", (0, 1))}),
            (f"{NORM}.exp_avg", 0, {("tp", (0, 1))}),
            ("the batch", 2, {("tp", (2, 3)), ("pp", (0, 2))}),
            ("embedding.weight", 3, {("pp", (1, 3))}),
        ],
    ),
]


@pytest.mark.parity
@pytest.mark.parametrize(("parallel", "cases"), CASES, ids=["three replicas", "tensor and pipeline"])
def test_a_flipped_bit_is_named(pool, parallel, cases):
    cfg = tiny(
        model={**MODEL, "tie_embeddings": parallel.get("pp", 1) > 1},
        train={"global_batch_size": 2 * parallel["world_size"]},
        **parallel,
    )
    flips = [(name, rank) for name, rank, _ in cases]
    healthy, *found, mended = _only(pool.run(parallel["world_size"], _found_after_flips, cfg, flips))
    assert healthy == mended == ()
    for (name, _, expected), seen in zip(cases, found, strict=True):
        # Weights that differ are also gathered, and compared, as such.
        assert {(one.axis, one.ranks) for one in seen if one.what == name} == expected
        assert {one.what for one in seen} <= {name, f"the gathered {name}"}


class _ErringGather:
    """Gathers, and loses a bit on only one rank."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(output_tensor, input_tensor, group=group)
        if dist.get_rank() == 1:
            flip(output_tensor[:1])


def _found_with_an_erring_gather(cfg: Config) -> tuple[Divergence, ...]:
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0)
    experts = model.stages[0].moe_layers()[1].experts
    assert isinstance(experts, FSDPModule)
    experts.set_custom_all_gather(_ErringGather())  # type: ignore[arg-type]
    return _train_and_compare(training, cfg.parallel.zero, batch, 1)


def _train_and_compare(training: TrainingStep, zero: int, batch: Batch, step: int) -> tuple[Divergence, ...]:
    """Train a step, and return what differs between the ranks after it."""
    training.run(batch, step)
    moments = named_moments(training.optimizer, training.parameters)
    return ReplicaCheck(training.model, moments, zero).find_divergences(batch, ())


@pytest.mark.parity
def test_weights_that_were_gathered_wrong_are_named(pool):
    cfg = tiny(train={"global_batch_size": 3}, world_size=3, zero=3, faults={"replica_check_every": 1})
    found = _only(pool.run(3, _found_with_an_erring_gather, cfg))
    assert {(one.axis, one.ranks) for one in found} == {("edp", (1,))}
    assert {one.what.rpartition(".")[0] for one in found} == {"the gathered layers.1.ffn.experts"}
    assert "on rank 1 differs from the 2 other ranks that hold it (edp)" in found[0].describe()


def _found_with_memory_of_its_own(cfg: Config) -> tuple[Divergence, ...]:
    """Train a step where rank 1 maps other memory than the ranks that it shares the gathered weights with."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    real = shared_gather.open_shared_memory

    def open_other(num_bytes: int, group: Group, purpose: str) -> Tensor:
        memory = real(num_bytes, group, purpose)
        return memory.clone() if group.rank == 1 else memory

    with patch.object(shared_gather, "open_shared_memory", open_other):
        training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    return _train_and_compare(training, cfg.parallel.zero, loader.batch(0), 1)


@pytest.mark.parity
def test_a_rank_that_does_not_read_the_shared_weights_is_named(pool):
    cfg = tiny(train={"global_batch_size": 3}, world_size=3, zero=1, faults={"replica_check_every": 1})
    found = _only(pool.run(3, _found_with_memory_of_its_own, cfg))
    gathered = [one for one in found if one.what.startswith("the gathered ")]
    assert {(one.axis, one.ranks) for one in gathered} == {("dp_cp", (1,)), ("edp", (1,))}


HEALTHY = [
    {"world_size": 4, "cp": 2, "ep": 2, "zero": 2},
    {"world_size": 4, "pp": 2, "virtual_stages": 2, "schedule": "interleaved", "etp": 2, "zero": 3},
]


def _divergences_of_a_run(cfg: Config) -> list[tuple[Divergence, ...]]:
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    return [_train_and_compare(training, cfg.parallel.zero, loader.batch(4 * i), i + 1) for i in range(2)]


@pytest.mark.parity
@pytest.mark.parametrize("parallel", few_else_slow(HEALTHY, HEALTHY[1:]))
def test_healthy_replicas_stay_equal(pool, parallel):
    cfg = tiny(model=MODEL, faults={"replica_check_every": 1}, **parallel)
    cfg = replace(cfg, run=RunConfig(seed=3, steps=3, device="cpu", dtype="bfloat16"))
    assert pool.run(4, _divergences_of_a_run, cfg) == [[(), ()]] * 4


def _metrics(cfg: Config) -> ReplicaMetrics | None:
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    return training.run(BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0), 1).replicas


def _gradient(cfg: Config, first_sample: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return loss, dense gradient and expert gradient of only some samples, on one rank."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=3).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(first_sample)
    training.begin_step(1, batch)
    loss = model.forward_backward(batch)
    dense, experts = [], []
    for name, parameter in model.named_parameters.items():
        assert parameter.grad is not None
        (experts if ".experts." in name else dense).append(parameter.grad.flatten())
    return float(loss[0]), torch.cat(dense).numpy(), torch.cat(experts).numpy()


def _expected(parts: list[np.ndarray]) -> tuple[float, float, float]:
    norms = [float(np.linalg.norm(part)) for part in parts]
    cosines = [float(a @ b) / (norms[i] * norms[j]) for i, a in enumerate(parts) for j, b in enumerate(parts) if i < j]
    return float(np.std(norms) / np.mean(norms)), float(np.mean(cosines)), min(cosines)


PRODUCTS = [
    pytest.param({"world_size": 3, "zero": 0}, id="zero 0"),
    pytest.param({"world_size": 3, "zero": 1}, id="zero 1", marks=pytest.mark.slow),
    pytest.param({"world_size": 3, "zero": 3}, id="zero 3", marks=pytest.mark.slow),
    pytest.param({"world_size": 4, "pp": 2, "zero": 0}, id="pipeline", marks=pytest.mark.slow),
    pytest.param({"world_size": 4, "cp": 2, "zero": 2}, id="context, zero 2"),
]


@pytest.mark.parity
@pytest.mark.parametrize("parallel", PRODUCTS)
def test_dispersion_and_cosine_equal_replicas_computed_by_themselves(pool, parallel):
    dp = parallel["world_size"] // parallel.get("cp", 1) // parallel.get("pp", 1)
    train = {"micro_batch_size": 2, "global_batch_size": 2 * dp}
    if parallel.get("pp", 1) > 1:
        train = {"micro_batch_size": 1, "global_batch_size": 2 * dp}
    cfg = tiny(train=train, faults={"replica_check_every": 1}, **parallel)
    metrics = _only(pool.run(parallel["world_size"], _metrics, cfg))
    alone = without_mapping(replace(cfg, train=replace(cfg.train, global_batch_size=2)))
    replicas = [pool.run(1, _gradient, alone, 2 * replica)[0] for replica in range(dp)]
    losses = [loss for loss, _, _ in replicas]
    assert metrics.loss_dispersion == pytest.approx(np.std(losses) / np.mean(losses), rel=1e-9)
    dense = (metrics.grad_norm_dispersion, metrics.grad_cosine, metrics.grad_cosine_min)
    assert dense == pytest.approx(_expected([part for _, part, _ in replicas]), rel=1e-9)
    experts = (metrics.expert_grad_norm_dispersion, metrics.expert_grad_cosine, metrics.expert_grad_cosine_min)
    if "cp" not in parallel:  # else an edp replica has the tokens of one context shard
        assert experts == pytest.approx(_expected([part for _, _, part in replicas]), rel=1e-9)
