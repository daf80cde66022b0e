"""Columns of slots: every token of the global batch is on one rank, with its own labels, weights and documents."""

from types import SimpleNamespace

import numpy as np
import pytest

from moefold.config.schema import Config
from moefold.train.round_placement import RoundPlacer
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


def _placer(cfg: Config, rank: int) -> RoundPlacer:
    cp = cfg.parallel.cp
    attn = SimpleNamespace(dp=SimpleNamespace(rank=rank // cp), cp=SimpleNamespace(rank=rank % cp))
    return RoundPlacer(cfg, SimpleNamespace(attn=attn))  # type: ignore[arg-type]


def _starts(num_samples: int) -> np.ndarray:
    is_first = np.random.default_rng(0).random((num_samples, S)) < 0.2
    is_first[:, 0] = True
    return np.maximum.accumulate(np.where(is_first, np.arange(S), 0), 1)


@pytest.mark.parametrize(("placement", "dp", "cp"), [("balanced", 3, 1), ("balanced", 2, 2), ("documents", 2, 4)])
def test_every_token_has_one_slot_and_its_own_columns(placement, dp, cp):
    cfg = _recipe(placement, dp, cp)
    num_samples = cfg.train.global_batch_size
    starts = _starts(num_samples)
    numbers = np.arange(num_samples * S).reshape(num_samples, S)
    further = np.stack((numbers, -numbers), 1)
    seen = []
    for rank in range(dp * cp):
        slots = _placer(cfg, rank).slots(starts)
        columns = slots.select({"numbers": numbers, "further": further, "document_starts": starts})
        shape = (num_samples // dp, S // cp)
        assert {name: values.shape for name, values in columns.items()} == {
            name: (shape[0], 2, shape[1]) if name == "further" else shape
            for name in ("sample_ids", "positions", "numbers", "further", "document_starts")
        }
        sample, position = columns["sample_ids"], columns["positions"]
        assert (columns["numbers"] == sample * S + position).all()
        assert (columns["further"] == np.stack((columns["numbers"], -columns["numbers"]), 1)).all()
        assert (columns["document_starts"] == starts[sample, position]).all()
        for number, rows in enumerate(np.split(sample, 2)):
            # Round j has the j-th micro-batch of each data-parallel rank.
            assert set((rows // B).flat) <= {number + 2 * rank for rank in range(dp)}
        if placement == "documents":
            assert set((sample // (2 * B)).flat) == {rank // cp}
        seen.append(columns["numbers"].ravel())
        assert len(slots.bounds) == 2
    assert (np.sort(np.concatenate(seen)) == numbers.ravel()).all()


def test_without_a_placement_samples_stay_where_they_are():
    assert not _placer(_recipe("samples", 2, 2), 0).moves_tokens
