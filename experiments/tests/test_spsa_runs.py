"""Runs with SPSA: replicas, resumes, skipped steps, records, and the loss of a fine-tuning."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from moefold.checkpoint.stored_tensors import differing_tensors, stored_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.model.local_param import local_tensor
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify.distributed_run import DistributedRecord, open_samples, run_distributed
from moefold_experiments.spsa.part import Spsa
from tests.train.tiny_runs import recipe, records, train_rank
from tests.verify.oracle import errors_of_broken_run
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

SPSA = {"optimizer": Spsa(), "global_batch_size": 4}


def _training(cfg: Config) -> tuple[TrainingStep, BatchSharder]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    return TrainingStep(model, cfg), BatchSharder(open_samples(cfg).train, cfg.batch_shape, groups, model.positions)


def _hash_after(cfg: Config, steps: int) -> str:
    """The bytes of all weights and buffers of this rank after some steps."""
    training, loader = _training(cfg)
    for step in range(1, steps + 1):
        training.run(loader.batch((step - 1) * cfg.train.global_batch_size), step)
        assert all(parameter.grad is None for parameter in training.parameters.values())
    digest = hashlib.sha256()
    for tensor in (*training.parameters.values(), *training.buffers.values()):
        digest.update(local_tensor(tensor).detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_have_the_same_bits_after_100_steps(pool, dtype):
    cfg = tiny(train=SPSA, model={"ffn.moe.router.expert_bias": True}, world_size=2, zero=0)
    cfg = replace(cfg, run=replace(cfg.run, dtype=dtype, steps=100))
    first, second = pool.run(2, _hash_after, cfg, 100)
    assert first == second
    (other,) = set(pool.run(2, _hash_after, replace(cfg, run=replace(cfg.run, seed=4)), 2))
    assert other != first


def test_a_resume_gives_the_same_bits_and_stores_only_weights(pool, tmp_path):
    whole, first, second = (
        recipe(tmp_path / name, steps, dtype="float32", train=SPSA, world_size=2, ep=2, zero=3)
        for name, steps in (("whole", 2), ("parts", 1), ("parts", 2))
    )
    for cfg in (whole, first, second):
        pool.run(2, train_rank, cfg)
    last = [tmp_path / name / "checkpoints" / "step-000002" for name in ("whole", "parts")]
    assert differing_tensors(*last) == []
    assert not [tensor.name for tensor in stored_tensors(last[0]) if tensor.name.startswith("optimizer.")]
    found = records(tmp_path / "whole")
    assert [record["loss"] for record in found] == [record["loss"] for record in records(tmp_path / "parts")]
    for record in found:
        code = record["projected_gradient"] * 127 / 10
        assert code == pytest.approx(round(code), abs=1e-9)
        assert abs(abs(record["projected_gradient"]) - min(10, record["grad_norm"])) < 10 / 127


def _skip_a_step(cfg: Config) -> tuple[str, str, str]:
    """Hash the weights, skip a step, and return both hashes and the action."""
    training, loader = _training(cfg)
    before = {name: local_tensor(p).clone() for name, p in training.parameters.items()}
    loader_batch = loader.batch(0)
    project = training.optimizer.project
    training.optimizer.project = lambda losses, step: project([float("nan")] * 2, step)
    result = training.run(loader_batch, 1)
    for name, parameter in training.parameters.items():
        torch.testing.assert_close(local_tensor(parameter), before[name], rtol=0, atol=1e-15)
    return result.decision.action, result.decision.reason, result.nonfinite_report.describe()


def test_a_step_that_is_not_finite_is_undone(pool):
    cfg = tiny(train=SPSA, faults={"nonfinite": "skip"}, world_size=1)
    ((action, reason, report),) = pool.run(1, _skip_a_step, cfg)
    assert (action, reason) == ("skip", "nonfinite")
    assert report


def _without_router_losses(cfg: Config) -> DistributedRecord:
    from moefold_experiments.spsa.passes import ForwardPasses

    ForwardPasses._local_loss = lambda self, terms: terms.double().sum()
    return run_distributed(cfg, 1)


def _with_one_draw_for_all_steps(cfg: Config) -> DistributedRecord:
    from moefold_experiments.spsa import module

    draw = module.normal_rows
    module.normal_rows = lambda key, stream, rows, columns: draw(key, 1, rows, columns)
    return run_distributed(cfg, 2)


def _without_rounding(cfg: Config) -> DistributedRecord:
    from moefold_experiments.spsa import module

    module.encode_gradient = lambda gradient, largest, seed, step: gradient * 127 / largest
    return run_distributed(cfg, 1)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [_without_router_losses, _with_one_draw_for_all_steps, _without_rounding])
def test_the_oracle_notices(pool, broken):
    steps = 2 if broken is _with_one_draw_for_all_steps else 1
    errors = errors_of_broken_run(pool, broken, tiny(train=SPSA), steps)
    assert any(error.name.startswith("weights") for error in errors)


@pytest.mark.slow
def test_the_loss_of_a_fine_tuning_falls(pool, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Is {n} even?"},
                {"role": "assistant", "content": "Yes." if n % 2 == 0 else "No."},
            ]
        }
        for n in range(40)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    train = SPSA | {"seq_len": 64, "lr": 3e-3, "optimizer": Spsa(weight_decay=0.0)}
    model = {"vocab_size": 256, "init_std": 0.02}
    data = {"kind": "sft", "path": str(path)}
    cfg = recipe(tmp_path / "run", 60, dtype="float32", every=0, train=train, model=model, data=data)
    pool.run(1, train_rank, replace(cfg, checkpoint=replace(cfg.checkpoint, at_end=False)))
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.3
