"""SPSA on plain parameters: perturbations, updates and the byte of the projected gradient."""

from functools import partial

import pytest
import torch
from torch import nn

from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.optimizer import ForwardOnlyStep
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.weight_init import seed_for
from moefold_experiments.spsa.module import SPSA, decode_gradient, encode_gradient
from moefold_experiments.spsa.oracle import perturbation
from moefold_experiments.spsa.part import Spsa
from tests.optim.alone import build_alone

NAMES = {"layers.0.ffn.experts.w_up": (3, 5, 7), "layers.0.attention.wq": (6, 10), "head.norm.weight": (10,)}
CFG = Config(run=RunConfig(seed=4), train=TrainConfig(optimizer=Spsa(weight_decay=0.5, eps=0.25)))


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in NAMES.items()
    }


def _optimizer(parameters: dict[str, nn.Parameter]) -> SPSA:
    optimizer = build_alone(parameters, CFG.train, seed=CFG.run.seed)
    assert isinstance(optimizer, SPSA)
    return optimizer


def _perturbation(seed: int, step: int, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return z of the oracle."""
    parts = {name: "experts" if ".experts." in name else "attention" for name in parameters}
    specs = {name: ParamSpec(name, tuple(p.shape), parts[name]) for name, p in parameters.items()}
    return perturbation(ForwardOnlyStep(step, 0.0, specs, parameters, lambda: 0.0, partial(seed_for, seed)))


def _values(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def test_both_passes_and_the_update(monkeypatch):
    monkeypatch.setattr("moefold_experiments.spsa.module.CHUNK_NUMBERS", 16)
    parameters = _parameters()
    before = _values(parameters)
    z = _perturbation(4, 9, parameters)
    optimizer = _optimizer(parameters)
    for number, sign in enumerate((1, -1)):
        optimizer.perturb(9, number)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach(), before[name] + sign * 0.25 * z[name], rtol=0, atol=1e-15)
    optimizer.projected_gradient = 3.0
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    for name, parameter in parameters.items():
        decay = 1.0 if name == "head.norm.weight" else 0.95
        torch.testing.assert_close(parameter.detach(), before[name] * decay - 0.1 * 3 * z[name], rtol=0, atol=1e-14)


def test_a_skipped_step_leaves_the_weights_up_to_rounding():
    parameters = _parameters()
    before = _values(parameters)
    optimizer = _optimizer(parameters)
    for step in range(1, 11):
        optimizer.perturb(step, 0)
        optimizer.perturb(step, 1)
        optimizer.restore()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=1e-14)
    assert optimizer.state == {}


def test_a_frozen_model_part_may_have_no_parameter():
    optimizer = _optimizer({})
    optimizer.perturb(1, 0)
    optimizer.step()


def test_the_projection_is_the_derivative_along_z():
    """The difference of both passes is exact for a quadratic function."""
    parameters = _parameters()
    loss = lambda: sum((parameter**2).sum() for parameter in parameters.values())  # noqa: E731
    loss().backward()
    z = _perturbation(4, 2, parameters)
    along_z = sum(float((parameter.grad * z[name]).sum()) for name, parameter in parameters.items())
    optimizer = _optimizer(parameters)
    losses = []
    for number in range(optimizer.num_passes):
        optimizer.perturb(2, number)
        losses.append(float(loss().detach()))
    assert (losses[0] - losses[1]) / 0.5 == pytest.approx(along_z, rel=1e-12)


def test_codes_are_bytes_without_bias():
    for gradient in (0.004, -0.3, 1.5, -9.99, 10.0):
        codes = [encode_gradient(gradient, 10.0, 0, step) for step in range(2000)]
        assert set(codes) <= set(range(-127, 128))
        assert max(codes) - min(codes) <= 1
        mean = sum(decode_gradient(code, 10.0) for code in codes) / len(codes)
        # Within five standard errors: of two values at a distance of 10 / 127.
        assert mean == pytest.approx(gradient, abs=5 * 0.5 * 10 / 127 / len(codes) ** 0.5)
    assert [encode_gradient(gradient, 10.0, 0, 1) for gradient in (1e9, -1e9)] == [127, -127]
    assert decode_gradient(127, 10.0) == pytest.approx(10.0, rel=1e-15)
    assert encode_gradient(0.0, 10.0, 7, 3) == 0


def test_the_seed_of_the_run_chooses_z():
    parameters = _parameters()
    z, of_other = (_perturbation(seed, 1, parameters) for seed in (4, 5))
    assert all(not torch.isclose(z[name], of_other[name]).any() for name in z)
