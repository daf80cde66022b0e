"""Delayed gradients on single parameters, against updates by hand."""

import pytest
import torch
from torch import nn

from moefold.config.part import make_part
from moefold.config.train import TrainConfig
from moefold.errors import ConfigError
from moefold.optim.gradient_delay import GradientDelay
from moefold.optim.states import named_moments, reset_moments
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.optim.alone import build_alone


@pytest.mark.parametrize("correction", [0.0, 1.0, 0.3])
def test_each_update_belongs_to_the_step_before(correction):
    """u(t) is the update of an optimizer that gets the gradients without a delay, at the weights of the delayed run."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(5)]
    delayed, plain = (nn.Parameter(torch.ones(5, 3, dtype=torch.float64)) for _ in range(2))
    cfg = TrainConfig(lr=0.1, optimizer=make_part("optimizer", "adamw", weight_decay=0.2))
    optimizer, reference = (build_alone({"w": weight}, cfg) for weight in (delayed, plain))
    delay = GradientDelay(optimizer, {"w": delayed}, correction)
    last = torch.zeros(5, 3, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        delayed.grad = gradient.clone()
        before = delayed.detach().clone()
        assert delay.step() == (step > 0)
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


def test_a_parameter_without_a_gradient_stays_and_a_reset_keeps_what_is_pending():
    used, unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = build_alone({"used": used, "unused": unused}, TrainConfig(lr=0.1))
    delay = GradientDelay(optimizer, {"used": used, "unused": unused}, 1.0)
    for _ in range(3):
        used.grad = torch.full((2, 2), 3.0)
        delay.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert not torch.equal(used, torch.ones(2, 2))
    reset_moments(optimizer)
    left = {name for name, value in named_moments(optimizer, {"used": used}).items() if value.any()}
    assert left == {"used.pending_gradient", "used.last_update"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.steps=1"], "train.gradient_delay=1 updates nothing in the first step, and run.steps=1 has no other"),
        (["sites.count=2"], "train.gradient_delay=1 would apply gradients of weights that a round of sites.method="),
        (
            ["data.kind=task", "rl.group_size=8"],
            "train.gradient_delay=1 would apply the last gradients of a round of rollouts",
        ),
    ],
)
def test_delays_without_a_meaning_are_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        check_config(load_config(None, ["run.steps=100", "train.gradient_delay=1", *overrides]))
    assert message in str(refused.value)
