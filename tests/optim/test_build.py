"""Parameter groups of optimizers: what decays, what has moments, and the learning rate of a step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import make_part
from moefold.config.sections.train import TrainConfig
from moefold.optim.states import group_by_decay, named_moments, set_learning_rate, set_step_count
from tests.models import model_of
from tests.optim.alone import build_alone

CFG = TrainConfig(lr=0.1, optimizer=make_part("optimizer", "adamw", weight_decay=0.5))
MODEL = model_of({"attention.qkv_bias": True, "ffn.moe.bias": True})


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "layers.0.attention.wq": nn.Parameter(torch.randn(4, 4)),
        "layers.0.attention.bq": nn.Parameter(torch.randn(4)),
        "layers.0.ffn.experts.w_up": nn.Parameter(torch.randn(2, 4, 4)),
        "layers.0.ffn.experts.b_up": nn.Parameter(torch.randn(2, 4)),
        "layers.0.ffn_norm.weight": nn.Parameter(torch.ones(4)),
    }


def step(optimizer: torch.optim.Optimizer, given: dict[str, nn.Parameter]) -> None:
    for parameter in given.values():
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def test_matrices_and_experts_decay_norms_and_biases_do_not():
    given = parameters()
    optimizer = build_alone(given, CFG, model=MODEL)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in given.items()} == {
        "layers.0.attention.wq": 0.5,
        "layers.0.attention.bq": 0.0,
        "layers.0.ffn.experts.w_up": 0.5,
        "layers.0.ffn.experts.b_up": 0.0,
        "layers.0.ffn_norm.weight": 0.0,
    }


def test_a_vector_of_each_expert_does_not_decay_whatever_its_name():
    """The feed-forward network of another package names its parameters as it likes."""
    name = "layers.0.ffn.experts.scale"
    given = {name: nn.Parameter(torch.ones(2, 4))}
    assert group_by_decay(given, {name: ParamSpec(name, (2, 4), "experts")}) == {False: [given[name]]}
    assert group_by_decay(given, {name: ParamSpec(name, (2, 4), "router")}) == {True: [given[name]]}


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_an_optimizer_of_no_parameters_does_nothing(moment_dtype):
    optimizer = build_alone({}, replace(CFG, optimizer=make_part("optimizer", "adamw", moment_dtype=moment_dtype)))
    set_learning_rate(optimizer, 0.01)
    optimizer.step()
    assert not optimizer.state_dict()["state"]


def test_weights_without_a_gradient_still_decay_by_lr_times_weight_decay():
    given = parameters()
    optimizer = build_alone(given, CFG, model=MODEL)
    before = given["layers.0.attention.wq"].detach().clone()
    for parameter in given.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(given["layers.0.attention.wq"].detach(), before * (1 - 0.1 * 0.5))
    assert torch.equal(given["layers.0.ffn_norm.weight"].detach(), torch.ones(4))


def test_moments_exist_from_the_start_by_name():
    given = parameters()
    moments = named_moments(build_alone(given, CFG, model=MODEL), given)
    assert set(moments) == {f"{name}.{moment}" for name in given for moment in ("exp_avg", "exp_avg_sq")}
    assert all(not moment.any() for moment in moments.values())


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_learning_rate_of_the_next_step_is_known(rate):
    given = parameters()
    optimizer = build_alone(given, CFG, model=MODEL)
    set_learning_rate(optimizer, rate)
    before = given["layers.0.attention.bq"].detach().clone()
    step(optimizer, given)
    # The first step of Adam moves each weight by the rate, whatever the gradient.
    moved = (given["layers.0.attention.bq"].detach() - before).abs()
    torch.testing.assert_close(moved, torch.full((4,), rate), rtol=1e-4, atol=0)


def test_copied_state_goes_on_as_the_first_optimizer_does():
    first = parameters()
    optimizer = build_alone(first, CFG, model=MODEL)
    for _ in range(3):
        step(optimizer, first)
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    resumed = build_alone(second, CFG, model=MODEL)
    moments = named_moments(optimizer, first)
    for name, moment in named_moments(resumed, second).items():
        moment.copy_(moments[name])
    set_step_count(resumed, 3)
    step(optimizer, first)
    step(resumed, second)
    assert all(torch.equal(first[name], second[name]) for name in first)
