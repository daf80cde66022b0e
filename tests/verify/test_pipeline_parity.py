"""Every pipeline schedule and layout equals the one-process float64 oracle: losses, norm, gradients, weights."""

import pytest

from moefold.config.schema import Config
from tests.verify.recipes import tiny
from tests.verify.test_parity import assert_equals_oracle

SPLIT_SCHEDULES = {"zero-bubble": 1, "zbv": 2, "dualpipev": 2}
"""Virtual stages of each schedule that splits the backward pass."""


def _recipe(schedule: str, *, model: dict[str, object] | None = None, batch: int = 8, **parallel: object) -> Config:
    chunks = parallel.pop("virtual_stages", SPLIT_SCHEDULES.get(schedule, 1))
    return tiny(
        model=model, train={"global_batch_size": batch}, schedule=schedule, virtual_stages=chunks, **parallel
    )


@pytest.mark.parity
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_split_backward(pool, schedule):
    assert_equals_oracle(pool, _recipe(schedule, world_size=2, pp=2))
