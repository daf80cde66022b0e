"""Copies of the weights in the compute dtype, cast once a step: a cast at each use gives the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch.optim.adamw import adamw

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.load import load_checkpoint
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.comm.groups import ParallelGroups
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.cost.peak_memory import compute_rank_memory
from moefold.data.dataset import DataRequest
from moefold.metrics.memory_tracker import GATHERED_WEIGHTS
from moefold.model.local_param import CastCopies, local_param
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.memory_profile import measure_step
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.parallel.count_casts import CountCasts
from tests.slow import slow
from tests.verify.recipes import LATENT, tiny


def _open(cfg: Config, keeps: bool):
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    if keeps:
        model = replace(model, cast_copies=CastCopies(model.named_parameters.values()))
    data = DataRequest.of(cfg).open()
    return TrainingStep(model, cfg), BatchSharder(data.train, cfg.batch_shape, groups, model.positions)


def _train(cfg: Config, keeps: bool):
    """Three steps, an evaluation after each, a rollback to the first and two steps more."""
    training, sharder = _open(cfg, keeps)
    parameters = list(training.parameters.values())
    size = cfg.train.global_batch_size
    results = []
    casts = []
    saved = None

    def step(number):
        batch = sharder.batch(number * size)
        with CountCasts(parameters) as counter:
            result = training.run(batch, number)
        casts.append(counter.count)
        results.append((result.loss, result.grad_norm, training.evaluate([batch])))

    for number in (1, 2, 3):
        step(number)
        if number == 1:
            state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
            saved = write_checkpoint(cfg, state, TrainState(states=counted(step=1, samples=size, tokens=0)))
    load_checkpoint(saved, training.parameters, training.buffers, training.optimizer)
    training.load_state_dict({"moment_updates": 1})
    for number in (2, 3):
        step(number)
    return results, {name: p.detach().clone() for name, p in training.parameters.items()}, casts


CASES = {
    "plain": ({}, {}),
    "accumulated, tied embeddings, prediction of more tokens": (
        {"mtp_layers": 1, "tie_embeddings": True},
        {"micro_batch_size": 2},
    ),
    "layers recomputed": ({}, {"recompute": ("layer",)}),
    "parts recomputed": ({}, {"recompute": ("norms", "moe")}),
    "muon": ({}, {"optimizer": "muon"}),
    "bfloat16 moments": ({}, {"optimizer": make_part("optimizer", "adamw", moment_dtype="bfloat16")}),
    "latent attention, biases": (
        {**LATENT, "attention.head_dim": 0, "ffn.moe.bias": True, "ffn.moe.router.bias": True},
        {},
    ),
    "a decay without a gradient": (
        {"ffn.moe.shared.intermediate_size": 8},
        {"optimizer": make_part("optimizer", "adamw", weight_decay=0.1)},
    ),
}
FAST = ("accumulated, tied embeddings, prediction of more tokens", "parts recomputed")


def _recipe(name: str, run_dir, **run) -> Config:
    model, train = CASES[name]
    cfg = tiny(model=model, train={"global_batch_size": 2 * train.get("micro_batch_size", 1)} | train)
    run = {"dtype": "bfloat16", "kernels": "plain", "dir": str(run_dir)} | run
    return replace(cfg, run=replace(cfg.run, **run), checkpoint=CheckpointConfig(every=1))


@pytest.mark.parametrize("name", [*FAST, *slow((name,) for name in CASES if name not in FAST)])
def test_every_step_has_the_same_bits(pool, tmp_path, name):
    ((plain, weights, plain_casts),) = pool.run(1, _train, _recipe(name, tmp_path / "plain"), False)
    ((kept, kept_weights, casts),) = pool.run(1, _train, _recipe(name, tmp_path / "kept"), True)
    assert kept == plain
    assert weights.keys() == kept_weights.keys()
    assert all(torch.equal(weights[key], kept_weights[key]) for key in weights)
    # The same steps again after the rollback.
    assert kept[3:] == kept[1:3]
    # The first step casts each weight once, the others refresh the copies in place.
    assert casts[0] < plain_casts[0]
    assert casts[1:] == [0] * 4


def _copied_bytes(cfg: Config):
    training, sharder = _open(cfg, True)
    training.run(sharder.batch(0), 1)
    tracker = measure_step(training, sharder.batch(0))
    return sum(copy.nbytes for copy in training.model.cast_copies.tensors()), tracker.current()[GATHERED_WEIGHTS]


@pytest.mark.parametrize("name", ["plain", "accumulated, tied embeddings, prediction of more tokens"])
def test_the_bytes_of_the_copies_equal_the_formula(pool, tmp_path, name):
    cfg = _recipe(name, tmp_path)
    ((found, tracked),) = pool.run(1, _copied_bytes, cfg)
    assert found == tracked == compute_rank_memory(cfg)[0].states.gathered


def test_each_use_adds_its_gradient_in_float32():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    inputs = torch.randn(2, 8, 64).bfloat16()

    def gradient():
        weight.grad = None
        for x in inputs:
            first, second = (local_param(weight, torch.bfloat16) for _ in range(2))
            ((x @ first).square().sum() + (x @ second.t()).sin().sum()).backward()
        return weight.grad

    expected = gradient()
    copies = CastCopies([weight])
    with copies.fresh():
        found = gradient()
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_a_copy_is_read_only_while_it_is_fresh():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    copies = CastCopies([weight])

    def fail():
        with copies.fresh():
            raise ValueError("inside")

    addresses = set()
    for _ in range(3):
        with copies.fresh():
            weight_in_scope = local_param(weight, torch.bfloat16)
            assert torch.equal(weight_in_scope, weight.bfloat16())
            addresses.add(weight_in_scope.data_ptr())
            assert local_param(weight, torch.float32) is local_param(weight) is weight
        pytest.raises(ValueError, fail)
        # The fused kernel does not raise the version of the tensors that it writes (torch 2.13).
        one = torch.ones(4, 4)
        adamw([weight], [one], [one.clone()], [one.clone()], [], [torch.ones(())], fused=True, amsgrad=False,
              maximize=False, beta1=0.9, beta2=0.95, lr=0.5, weight_decay=0.0, eps=1e-8)  # fmt: skip
        assert torch.equal(local_param(weight, torch.bfloat16), weight.bfloat16())
    # Refreshed in place.
    assert len(addresses) == 1
