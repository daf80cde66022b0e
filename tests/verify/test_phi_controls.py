"""Break one rule of Phi-3.5-MoE's layers, and the comparison with the oracle must notice it."""

from collections.abc import Callable

import pytest
import torch

from moefold.config.schema import Config
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.oracle import errors_of_broken_run
from tests.verify.phi_cases import phi
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _run_without_sum_over_tp(cfg: Config) -> DistributedRecord:
    """As if sequence parallelism did not add the gradients of the norms."""
    from moefold.parallel import parallel_model

    parallel_model.sum_replicated_gradients = lambda parameters, tp: None
    return run_distributed(cfg, 1)


def _run_with_noise_of_the_rank(cfg: Config) -> DistributedRecord:
    """As if the samples of a token depended on its place on the rank."""
    from moefold.model.moe import router

    whole = router.uniform_noise
    router.uniform_noise = lambda seed, step, samples, positions, width, **options: whole(
        seed, step, samples, positions - positions[0], width, **options
    )
    return run_distributed(cfg, 1)


def _run_with_a_reduced_gradient(cfg: Config) -> DistributedRecord:
    """As if the factor of a reduced weight reduced its gradient too."""
    from moefold.parts.router_softmax.sparsemixer import module

    whole = module.mixer_weights

    def broken(logits: torch.Tensor, ids: torch.Tensor, jitter: float, noise: torch.Tensor | None) -> torch.Tensor:
        weights = whole(logits, ids, jitter, noise)
        full = whole(logits, ids, jitter, None)
        return full * (weights / full).detach()

    module.mixer_weights = broken
    return run_distributed(cfg, 1)


def _run_with_the_short_factors(cfg: Config) -> DistributedRecord:
    """As if a sequence beyond the original context had the factors of shorter ones."""
    from moefold.parts.rope_scaling import LongRope

    LongRope.is_long = lambda part, seq_len: False
    return run_distributed(cfg, 1)


def _run_with_half_a_gradient_of_the_bias(cfg: Config) -> DistributedRecord:
    """As if the bias of the head had half of its gradient."""
    from moefold.model.head import Head

    shard = Head._bias_shard

    def broken(self: Head, x: torch.Tensor) -> torch.Tensor:
        bias = shard(self, x)
        return bias + 0.5 * (bias.detach() - bias)

    Head._bias_shard = broken
    return run_distributed(cfg, 1)


TP2 = {"world_size": 2, "tp": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("broken", "mapping", "wrong"),
    [
        (_run_without_sum_over_tp, TP2, "attention_norm.bias"),
        pytest.param(_run_with_noise_of_the_rank, TP2, "router.weight", marks=slow),
        (_run_with_a_reduced_gradient, {}, "router.weight"),
        pytest.param(_run_with_the_short_factors, {}, "attention.wq", marks=slow),
        pytest.param(_run_with_half_a_gradient_of_the_bias, TP2, "head.bias", marks=slow),
    ],
)
def test_a_broken_rule_is_noticed(
    fresh_pool, broken: Callable[[Config], DistributedRecord], mapping: dict[str, object], wrong: str
):
    cfg = tiny(**phi(mapping, train={"loss_chunk": 5}))
    names = [
        error.name for error in errors_of_broken_run(fresh_pool, broken, cfg) if error.name.startswith("gradients")
    ]
    assert any(wrong in name for name in names), names
