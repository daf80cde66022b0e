"""The optimizers train on tensors of a pretended CUDA device as on a CPU."""

from dataclasses import replace

import pytest

from moefold_experiments.gradient_delay.part import DelayedAdamW
from moefold_experiments.spsa.part import Spsa
from tests.gpu.runs import losses_on
from tests.gpu_static.pretended_cuda import pretended_cuda
from tests.verify.recipes import tiny

STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Spsa(max_gradient=5.0), DelayedAdamW(correction=1.0)], ids=str)
def test_it_trains_as_on_a_cpu(optimizer):
    cfg = tiny(train={"optimizer": optimizer, "global_batch_size": 2})
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32", kernels="plain"))
    expected = losses_on(cfg, "cpu", STEPS)
    with pretended_cuda():
        found = losses_on(replace(cfg, run=replace(cfg.run, kernels="auto")), "cuda", STEPS)
    assert found == pytest.approx(expected, rel=1e-4)
