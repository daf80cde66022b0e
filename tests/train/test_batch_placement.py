"""Test that tokens are sent to the ranks of their slots, each to one, with its labels, weights and documents."""

import numpy as np
import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.ops.documents import DocumentBounds
from moefold.topology.layout import fold
from moefold.train.batch_placement import MicroBatchSetPlacer
from tests.slow import slow
from tests.verify.recipes import tiny

S, B = 16, 2


def _recipe(placement: str, dp: int, cp: int) -> Config:
    return tiny(
        model={"vocab_size": 8},
        train={"micro_batch_size": B, "global_batch_size": 2 * B * dp},
        data={"document_end": 2},
        world_size=dp * cp,
        cp=cp,
        context="planned",
        placement=placement,
    )


def _global_columns(num_samples: int) -> dict[str, np.ndarray]:
    is_first = np.random.default_rng(0).random((num_samples, S)) < 0.2
    is_first[:, 0] = True
    numbers = np.arange(num_samples * S).reshape(num_samples, S)
    return {
        "numbers": numbers,
        "further": np.stack((numbers, -numbers), 1),
        "shares": numbers / 3,
        "is_even": numbers % 2 == 0,
        "document_starts": np.maximum.accumulate(np.where(is_first, np.arange(S), 0), 1),
    }


def _move(cfg: Config) -> tuple[dict[str, np.ndarray], int]:
    groups = ParallelGroups.create(fold(world_size=cfg.parallel.world_size, cp=cfg.parallel.cp), torch.device("cpu"))
    dp = groups.attn.dp
    per_rank = cfg.train.global_batch_size // dp.size
    mine = {
        name: values[dp.rank * per_rank :][:per_rank]
        for name, values in _global_columns(cfg.train.global_batch_size).items()
    }
    starts = mine["document_starts"]
    bounds = [DocumentBounds.of_positions(starts[i : i + B]) for i in range(0, per_rank, B)]
    columns, placed = MicroBatchSetPlacer(cfg.batch_shape, groups).move_tokens(mine, bounds)
    assert len(placed) == len(bounds)
    return columns, dp.rank


@pytest.mark.parity
@pytest.mark.parametrize(
    ("placement", "dp", "cp"),
    [("balanced", 2, 2), *slow([("balanced", 3, 1), ("documents", 2, 2), ("documents", 1, 4)])],
)
def test_every_token_has_one_slot_and_its_own_columns(pool, placement, dp, cp):
    cfg = _recipe(placement, dp, cp)
    num_samples = cfg.train.global_batch_size
    whole = _global_columns(num_samples)
    seen = []
    for columns, dp_rank in pool.run(dp * cp, _move, cfg):
        shape = (num_samples // dp, S // cp)
        sample, position = columns["token_samples"], columns["positions"]
        assert sample.shape == position.shape == shape
        for name, values in whole.items():
            expected = np.moveaxis(np.moveaxis(values, -1, 1)[sample, position], 2, 1) if values.ndim == 3 else None
            assert columns[name].dtype == values.dtype
            assert (columns[name] == (values[sample, position] if expected is None else expected)).all()
        for number, rows in enumerate(np.split(sample, 2)):
            # Micro-batch set j has the j-th micro-batch of each data-parallel rank.
            assert set((rows // B).flat) <= {number + 2 * rank for rank in range(dp)}
        if placement == "documents":
            assert set((sample // (2 * B)).flat) == {dp_rank}
        seen.append(columns["numbers"].ravel())
    assert (np.sort(np.concatenate(seen)) == np.arange(num_samples * S)).all()
    if placement == "balanced":
        assert len({tuple(sorted(numbers)) for numbers in seen}) == dp * cp
