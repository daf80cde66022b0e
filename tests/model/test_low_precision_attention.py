"""`train.precision` in linear attention: wide projections are quantised, those that decays depend on are not."""

from dataclasses import replace

import pytest
import torch

from moefold.config.schema import Config
from moefold.model.linear import linear
from moefold.model.tp_interface import SequenceParallel
from moefold.ops.quantization.emulated import EmulatedLinear
from moefold.ops.quantization.formats import QUANT_FORMATS
from moefold.verify.distributed_run import run_distributed
from tests.slow import slow
from tests.verify.linear_cases import HYBRID
from tests.verify.recipes import tiny

KDA = {"linear_attention": "kda"}
ZERO_3 = {"world_size": 2, "zero": 3}
GATES = {"attention.gate": {}, "attention.gate.per": "head"}


def test_the_last_projections_stay_in_the_type_of_their_input():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 2, 32, generator=generator)
    weights = [torch.randn(rows, 32, generator=generator) for rows in (16, 3, 3)]
    backend = EmulatedLinear(QUANT_FORMATS["fp8-blockwise"])
    columns = [(weight, None) for weight in weights]
    found = SequenceParallel().all_gather_linear(x, columns, None, backend, 2)
    exact = [torch.equal(y, linear(x, weight)) for y, weight in zip(found, weights, strict=True)]
    assert exact == [False, True, True]


@pytest.mark.parity
@pytest.mark.parametrize("kind", [GATES, *slow([(KDA | GATES,), (KDA | {"linear_attention.full_rank_gates": True},)])])
def test_hybrids_train_in_fp8_on_several_ranks_as_on_one(pool, kind):
    """Scales of activations do not depend on the mapping. Gradients of weights have other blocks of tokens."""
    model = HYBRID | kind | {"hidden_size": 32}
    one, several = (_quantized(tiny(model=model, moe={"choice": "round_robin"}, **mapping)) for mapping in ({}, ZERO_3))
    exact = replace(one, train=replace(one.train, precision="dtype"))
    alone, plain = (pool.run(1, run_distributed, cfg, 1)[0] for cfg in (one, exact))
    together = pool.run(2, run_distributed, several, 1)[0]
    assert together.steps[0].loss == pytest.approx(alone.steps[0].loss, rel=1e-5)
    assert abs(alone.steps[0].loss - plain.steps[0].loss) > 1e-3
    for name, gradient in alone.gradients.items():
        assert (together.gradients[name] - gradient).norm() <= 0.1 * gradient.norm(), name


def _quantized(cfg: Config) -> Config:
    return replace(cfg, run=replace(cfg.run, dtype="float32"), train=replace(cfg.train, precision="fp8-blockwise"))
