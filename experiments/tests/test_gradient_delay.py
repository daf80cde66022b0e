"""Delayed gradients on single parameters, against updates by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.rank_state_memory import RankStateMemory
from moefold.errors import ConfigError
from moefold.optim.states import named_moments, reset_moments
from moefold.parts.optimizer.adamw.part import AdamW
from moefold.recipe import load_config
from moefold.train.memory_profile import sharded_state_bytes
from moefold.validate.config import check_config
from moefold_experiments.gradient_delay.part import DelayedAdamW, DelayedMuon
from tests.optim.alone import build_alone


@pytest.mark.parametrize("correction", [0.0, 1.0, 0.3])
def test_each_update_belongs_to_the_step_before(correction):
    """u(t) is the update of an optimizer that gets the gradients without a delay, at the weights of the delayed run."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(5)]
    delayed, plain = (nn.Parameter(torch.ones(5, 3, dtype=torch.float64)) for _ in range(2))
    delay = DelayedAdamW(weight_decay=0.2, correction=correction)
    optimizer = build_alone({"embedding.weight": delayed}, TrainConfig(lr=0.1, optimizer=delay))
    reference = build_alone({"embedding.weight": plain}, TrainConfig(lr=0.1, optimizer=AdamW(weight_decay=0.2)))
    last = torch.zeros(5, 3, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        delayed.grad = gradient.clone()
        before = delayed.detach().clone()
        assert optimizer.step() == (step > 0)
        assert torch.equal(optimizer.state[delayed]["pending_gradient"], gradient)
        if not step:
            assert torch.equal(delayed, before)
            continue
        with torch.no_grad():
            plain.copy_(before)
        plain.grad = gradients[step - 1].clone()
        reference.step()
        update = before - plain.detach()
        torch.testing.assert_close(delayed.detach(), before - update - correction * (update - last), rtol=0, atol=1e-15)
        last = update


def test_a_parameter_without_a_gradient_stays_and_a_reset_keeps_pending_means():
    used, unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    given = {"embedding.weight": used, "head.weight": unused}
    optimizer = build_alone(given, TrainConfig(lr=0.1, optimizer=DelayedAdamW(correction=1.0)))
    for _ in range(3):
        used.grad = torch.full((2, 2), 3.0)
        optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert not torch.equal(used, torch.ones(2, 2))
    reset_moments(optimizer)
    left = {name for name, value in named_moments(optimizer, {"used": used}).items() if value.any()}
    assert left == {"used.pending_gradient", "used.last_update"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.steps=1"], "train.optimizer='delayed_adamw' updates nothing in the first step, and run.steps=1 has no"),
        (["sites.count=2"], "train.optimizer='delayed_adamw' would apply gradients of weights that a round of sites."),
        (
            ["data.kind=task", "rl.group_size=8"],
            "train.optimizer='delayed_adamw' would apply the last gradients of a round of rollouts",
        ),
        (
            ["train.optimizer.moment_dtype=bfloat16", "train.optimizer.beta1=0.99"],
            "train.optimizer.beta1=0.99 must be at most 0.98",
        ),
        (["train.optimizer.correction=-1.0"], "train.optimizer.correction=-1.0 must be at least 0"),
        (
            ["train.optimizer=delayed_muon", 'train.optimizer.groups=["router", "router"]'],
            "train.optimizer.groups names 'router' 2 times",
        ),
    ],
    ids=range(6),
)
def test_settings_without_a_meaning_are_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        check_config(load_config(None, ["run.steps=100", "train.optimizer=delayed_adamw", *overrides]))
    assert message in str(refused.value)


@pytest.mark.parametrize("offload", ["none", "ssd"])
@pytest.mark.parametrize(
    "optimizer",
    [DelayedAdamW(), DelayedAdamW(correction=1.0), DelayedMuon(correction=1.0, moment_dtype="bfloat16")],
    ids=lambda part: f"{part}-{part.correction}",
)
def test_every_byte_of_its_states(optimizer, offload):
    """A pending gradient stays on the device when moments are offloaded."""
    train = TrainConfig(optimizer=optimizer, seq_len=64, offload_optimizer=offload, offload_min_kib=1)
    train = replace(train, offload_dir="/nowhere" if offload == "ssd" else "")
    cfg = Config(train=train, parallel=ParallelConfig(world_size=4, tp=2, ep=2, zero=3))
    check_config(cfg)
    states = RankStateMemory(cfg)
    away = states.offloaded_moments[0].offloaded
    assert (away > 0) == (offload == "ssd")
    assert states.max_by_pp_rank[0].optimizer - away == sharded_state_bytes(cfg, 0).optimizer
