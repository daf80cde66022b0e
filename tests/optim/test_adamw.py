"""AdamW with wide or rounded moments equals its formula, on one rank and under a mapping."""

import pytest
import torch
from torch import nn

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.train import TrainConfig
from moefold.optim.states import StateStore, named_moments, set_step_count
from moefold.parts.optimizer.adamw.module import OffloadableAdamW
from moefold.verify.distributed_run import run_distributed
from tests.optim.alone import build_alone
from tests.slow import slow
from tests.verify.recipes import tiny


def _parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "layers.0.attention.wq": nn.Parameter(torch.randn(40, 30)),
        "head.norm.weight": nn.Parameter(torch.ones(30)),
    }


def _train(given: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in given.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) + parameter.detach().sin()
        optimizer.step()


def _options(cfg: TrainConfig, given: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    options = {"lr": cfg.lr, "betas": (cfg.optimizer.beta1, cfg.optimizer.beta2), "eps": cfg.optimizer.eps}
    return [
        {"params": [p], "weight_decay": cfg.optimizer.weight_decay if p.dim() > 1 else 0.0, **options}
        for p in given.values()
    ]


def test_with_wide_moments_it_is_adamw():
    cfg = TrainConfig(lr=1e-2)
    wide, own = _parameters(), _parameters()
    _train(wide, build_alone(wide, cfg), 20)
    _train(own, OffloadableAdamW(_options(cfg, own), None, StateStore()), 20)
    for name in wide:
        assert torch.equal(own[name], wide[name]), name


def test_narrow_moments_are_the_rounded_ones_and_follow_the_wide():
    cfg = TrainConfig(lr=1e-2)
    narrow_cfg = TrainConfig(lr=1e-2, optimizer=make_part("optimizer", "adamw", moment_dtype="bfloat16"))
    wide, narrow = _parameters(), _parameters()
    wide_optimizer, optimizer = build_alone(wide, cfg), build_alone(narrow, narrow_cfg)
    _train(wide, wide_optimizer, 1)
    _train(narrow, optimizer, 1)
    moments, expected = named_moments(optimizer, narrow), named_moments(wide_optimizer, wide)
    assert set(moments) == set(expected)
    assert {moment.dtype for moment in moments.values()} == {torch.bfloat16}
    for name, moment in moments.items():
        # One unit in the last place: the two sums round differently before.
        torch.testing.assert_close(moment.float(), expected[name].bfloat16().float(), rtol=2**-7, atol=1e-12)
    start = _parameters()
    _train(wide, wide_optimizer, 30, seed=2)
    _train(narrow, optimizer, 30, seed=2)
    name = "layers.0.attention.wq"
    moved = (wide[name] - start[name]).norm()
    assert 0 < float((wide[name] - narrow[name]).norm().detach()) < 0.01 * float(moved.detach())


def test_a_resumed_step_count_corrects_the_bias():
    cfg = TrainConfig(lr=1e-2, optimizer=make_part("optimizer", "adamw", moment_dtype="bfloat16"))
    first = _parameters()
    optimizer = build_alone(first, cfg)
    _train(first, optimizer, 3)
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    resumed = build_alone(second, cfg)
    for name, moment in named_moments(resumed, second).items():
        moment.copy_(named_moments(optimizer, first)[name])
    set_step_count(resumed, 3)
    _train(first, optimizer, 1, seed=5)
    _train(second, resumed, 1, seed=5)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _losses(cfg: Config) -> list[float]:
    return [step.loss for step in run_distributed(cfg, 5).steps]


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["adamw", *slow([("muon",)])])
def test_narrow_moments_train_under_a_mapping_as_on_one_rank(pool, optimizer):
    """Rounding may fall differently where sums differ in their last bit; the run does not."""
    train = {"global_batch_size": 2, "optimizer": make_part("optimizer", optimizer, moment_dtype="bfloat16")}
    expected = pool.run(1, _losses, tiny(train=train))[0]
    wide = pool.run(1, _losses, tiny(train=train | {"optimizer": optimizer}))[0]
    mapped = pool.run(2, _losses, tiny(train=train, world_size=2, ep=2, zero=3))[0]
    assert mapped == pytest.approx(expected, rel=1e-4)
    assert wide == pytest.approx(expected, rel=1e-2)
    assert wide != expected
