"""Dispersions and angles, by hand."""

import numpy as np
import pytest

from moefold.metrics.replica_metrics import ReplicaMetrics
from moefold.metrics.writer import to_record
from tests.metrics.example import STEP


def alike(*sizes: int) -> list[np.ndarray]:
    return [np.ones(size) for size in sizes]


def test_replicas_with_padding_are_compared_by_sample():
    """With a gradient g per sample, replicas of 2, 1 and 0 samples have 2g, g and 0: they agree."""
    samples = np.array([2.0, 1.0, 0.0])
    dots = 25 * np.outer(samples, samples)
    found = ReplicaMetrics.from_dot_products(3 * samples, dots, dots, samples, samples)
    assert (found.loss_dispersion, found.grad_norm_dispersion, found.expert_grad_norm_dispersion) == (0, 0, 0)
    assert (found.grad_cosine, found.expert_grad_cosine_min) == (1, 1)


def test_dispersions_and_angles_by_hand():
    # Gradients (3, 4), (4, 3) and (0, -10): norms 5, 5, 10; cosines 24/25, -4/5, -3/5.
    gradients = np.array([[3.0, 4.0], [4.0, 3.0], [0.0, -10.0]])
    losses = np.array([2.0, 4.0, 3.0])
    found = ReplicaMetrics.from_dot_products(losses, gradients @ gradients.T, np.array([[7.0]]), *alike(3, 1))
    assert found.loss_dispersion == pytest.approx(np.sqrt(2 / 3) / 3)
    assert found.grad_norm_dispersion == pytest.approx(np.sqrt(50 / 9) / (20 / 3))
    assert found.grad_cosine == pytest.approx((24 / 25 - 4 / 5 - 3 / 5) / 3)
    assert found.grad_cosine_min == pytest.approx(-4 / 5)
    assert found.expert_grad_cosine is None, "one replica of the experts has nothing to be compared with"


def test_a_model_without_experts_and_a_replica_without_tokens_have_no_angles():
    found = ReplicaMetrics.from_dot_products(np.zeros(2), np.diag([4.0, 0.0]), np.zeros((2, 2)), *alike(2, 2))
    assert found.loss_dispersion is None
    assert found.grad_cosine is None
    assert found.expert_grad_norm_dispersion is None


def test_replica_metrics_are_in_the_record_of_the_step():
    found = ReplicaMetrics.from_dot_products(np.array([1.0, np.nan]), np.eye(2), np.eye(2), *alike(2, 2))
    record = to_record(STEP | {"replicas": found})
    assert record["replicas"]["grad_cosine"] == 0.0
    assert record["replicas"]["loss_dispersion"] is None
    assert record["nonfinite"] == {"replicas.loss_dispersion": "nan"}
