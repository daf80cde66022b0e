"""Test that the samples of all ranks, put together, are the samples of one rank under every mapping."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.config.chosen import chosen
from moefold.config.groups.context import ContextPart
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.errors import ConfigError
from moefold.parallel.batch import Batch
from moefold.parallel.context_parallel import sequence_positions
from moefold.train.batch_sharding import BatchSharder
from moefold.validate.config import check_config
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity


def _loader(cfg: Config, part: str = "train") -> tuple[BatchSharder, ParallelGroups, Tensor]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    data = DataRequest.of(cfg).open()
    cp = groups.attn.cp
    positions = torch.as_tensor(sequence_positions(chosen(cfg, ContextPart), cfg.train.seq_len, cp.size, cp.rank))
    return (
        BatchSharder(getattr(data, part), cfg.batch_shape, groups, positions),
        groups,
        positions,
    )


def _read(cfg: Config, first_sample: int) -> tuple[int, Tensor, Batch]:
    loader, groups, positions = _loader(cfg)
    return groups.attn.dp.rank, positions, loader.batch(first_sample)


def _evaluation(cfg: Config, num_samples: int) -> tuple[int, list[Batch]]:
    loader, groups, _ = _loader(cfg, "validation")
    return groups.attn.dp.rank, loader.to_eval_batches(*loader.read_eval_samples(num_samples))


@pytest.mark.parametrize(
    "mapping",
    [{"world_size": 2}, {"world_size": 4, "cp": 2}, {"world_size": 4, "tp": 2}],
)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_ranks_read_the_parts_of_one_batch(pool, mapping, micro_batch_size):
    train = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    cfg = tiny(train=train, **mapping)
    ((_, _, expected),) = pool.run(1, _read, tiny(train=train), 24)
    tokens = torch.zeros_like(expected.tokens)
    labels = torch.zeros_like(expected.columns["labels"])
    weights = torch.zeros_like(expected.columns["weights"])
    for dp_rank, positions, part in pool.run(cfg.parallel.world_size, _read, cfg, 24):
        count = 8 // cfg.parallel.dp
        rows = torch.arange(dp_rank * count, (dp_rank + 1) * count)[:, None]
        tokens[rows, positions] = part.tokens
        labels[rows, positions] = part.columns["labels"]
        weights[rows, positions] = part.columns["weights"]
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(labels, expected.columns["labels"])
    assert torch.equal(weights, expected.columns["weights"])
    assert float(weights.sum()) == pytest.approx(1.0)
    assert torch.equal(expected.tokens[:, 1:], expected.columns["labels"][:, :-1])


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_further_tokens_come_from_the_sample_and_end_with_it(pool, context):
    cfg = tiny(model={"mtp_layers": 3}, world_size=2, cp=2, context=context)
    ((_, _, whole),) = pool.run(1, _read, tiny(model={"mtp_layers": 3}), 24)
    for depth in (1, 2, 3):
        labels = whole.columns["mtp_labels"][:, depth - 1]
        weights = whole.columns["mtp_weights"][:, depth - 1]
        assert torch.equal(labels[:, :-depth], whole.columns["labels"][:, depth:])
        assert torch.count_nonzero(weights[:, -depth:]) == 0
        # Four samples of 16 positions: as many targets as positions that have one.
        assert weights[:, :-depth].unique().tolist() == pytest.approx([1 / (4 * (16 - depth))])
    for _, positions, part in pool.run(2, _read, cfg, 24):
        assert torch.equal(part.columns["mtp_labels"], whole.columns["mtp_labels"][..., positions])
        assert torch.equal(part.columns["mtp_weights"], whole.columns["mtp_weights"][..., positions])


def test_consecutive_batches_take_consecutive_samples(pool):
    cfg = tiny(train={"global_batch_size": 4})
    whole = tiny(train={"global_batch_size": 8})
    ((_, _, first),), ((_, _, second),), ((_, _, both),) = (
        pool.run(1, _read, *args) for args in ((cfg, 0), (cfg, 4), (whole, 0))
    )
    assert torch.equal(torch.cat((first.tokens, second.tokens)), both.tokens)


def _evaluated(pool, cfg: Config, num_samples: int) -> dict[tuple[int, ...], float]:
    """The weight of each sample, by its tokens, summed over ranks and batches."""
    found: dict[tuple[int, ...], float] = {}
    for _, batches in pool.run(cfg.parallel.world_size, _evaluation, cfg, num_samples):
        for batch in batches:
            for tokens, weights in zip(batch.tokens.tolist(), batch.columns["weights"].sum(1).tolist(), strict=True):
                if weights:
                    found[tuple(tokens)] = found.get(tuple(tokens), 0.0) + weights
    return found


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dp", [1, 2])
def test_an_evaluation_takes_each_sample_once_whatever_the_batch(pool, size, dp):
    expected = _evaluated(pool, tiny(train={"global_batch_size": 2}), 6)
    found = _evaluated(pool, tiny(train={"global_batch_size": size}, world_size=dp), 6)
    assert found == pytest.approx(expected)
    assert list(found.values()) == pytest.approx([1 / 6] * 6)


def test_an_evaluation_of_more_than_is_held_out_takes_all(pool, tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "tokens.npy", rng.integers(0, 32, 16 * 40 + 1, dtype=np.int32))
    data = DataConfig(kind="tokens", path=str(tmp_path / "tokens.npy"), validation_fraction=0.1)
    cfg = replace(tiny(), data=data)
    assert list(_evaluated(pool, cfg, 100).values()) == pytest.approx([1 / 4] * 4)


def _refused(cfg: Config) -> str:
    loader, _, _ = _loader(cfg, "validation")
    with pytest.raises(ConfigError) as error:
        loader.to_eval_batches(*loader.read_eval_samples(4))
    return str(error.value)


def test_an_evaluation_without_held_out_samples_is_refused(pool):
    cfg = replace(tiny(), data=DataConfig(kind="synthetic", validation_fraction=0.0))
    assert pool.run(1, _refused, cfg)[0].startswith("data.validation_fraction=0 holds no sample out")


def _refused_batch(cfg: Config) -> str:
    with pytest.raises(ConfigError) as error:
        _read(cfg, 0)
    return str(error.value)


def test_a_placement_of_documents_needs_documents(pool):
    """A Config made in Python has no given keys; `validate/unused.py` would refuse this one."""
    cfg = tiny(world_size=2, cp=2, context="planned", placement="documents")
    for message in pool.run(2, _refused_batch, cfg):
        assert message.startswith(
            "parallel.context.placement='documents' places documents, and the samples have none; set "
        )
