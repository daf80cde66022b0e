"""Each number that an optimizer has as a setting does in its module what it does in its formula."""

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.sections.train import TrainConfig
from moefold.cost.layer_spec import model_weights
from tests.optim.alone import build_alone
from tests.verify.recipes import tiny

OTHER = {"beta1": 0.7, "beta2": 0.6, "eps": 1e-2, "weight_decay": 0.5, "momentum": 0.6, "ns_steps": 2}
"""Another value of each number. The test fails for a number that is not here."""
LR = 0.05
STEPS = 3
MODEL = tiny().model
WEIGHTS = ("embedding.weight", "layers.0.attention.wq", "layers.1.ffn.experts.w_up", "layers.0.attention_norm.weight")


def numbers() -> Iterator[tuple[str, str]]:
    """Yield the kind of each optimizer with each of its settings that is a number."""
    for kind in built_in_kinds("optimizer"):
        for field in fields(find_part("optimizer", kind)):
            if type(field.default) in (int, float):
                yield kind, field.name


def start() -> dict[str, nn.Parameter]:
    """Return weights of each kind: a table of tokens, a matrix, the matrices of experts, a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: model_weights(MODEL)[name].shape for name in WEIGHTS}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).double()) for name, shape in shapes.items()}


def gradients(step: int) -> Iterator[torch.Tensor]:
    """Yield the gradient of each weight in a step. They are small, so that `eps` counts."""
    generator = torch.Generator().manual_seed(100 + step)
    for weight in start().values():
        yield 0.01 * torch.randn(weight.shape, generator=generator).double()


def by_module(part: OptimizerPart) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of the optimizer that the recipe builds."""
    weights = start()
    optimizer = build_alone(weights, TrainConfig(lr=LR, optimizer=part), model=MODEL)
    for step in range(1, STEPS + 1):
        for weight, gradient in zip(weights.values(), gradients(step), strict=True):
            weight.grad = gradient
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def by_formula(part: OptimizerPart) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps of the formula."""
    update = part.formula()
    assert update is not None
    weights = {name: weight.detach() for name, weight in start().items()}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in weights}
    for step in range(1, STEPS + 1):
        for name, gradient in zip(weights, gradients(step), strict=True):
            change = update(model_weights(MODEL)[name], weights[name], gradient, states[name], step)
            weights[name] = weights[name] - LR * change
    return weights


@pytest.mark.parametrize(("kind", "name"), list(numbers()))
def test_a_number_that_is_set_counts_as_in_the_formula(kind, name):
    default = find_part("optimizer", kind)()
    changed = replace(default, **{name: OTHER[name]})
    expected = by_formula(changed)
    for weight, value in by_module(changed).items():
        torch.testing.assert_close(value, expected[weight], rtol=1e-9, atol=1e-12, msg=weight)
    unchanged = by_formula(default)
    assert any((expected[weight] - unchanged[weight]).abs().max() > 1e-4 for weight in WEIGHTS)
