"""Documents packed into one sample give the same as each by itself, on one rank and under every axis."""

from unittest import mock

import numpy as np
import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.data.held_out import IndexRanges
from moefold.data.sample import Sample, SampleSource
from moefold.data.sampler import SplitSampler
from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from moefold.ops.documents import DocumentBounds
from moefold.parallel.parallelize import parallelize
from moefold.topology.layout import fold
from moefold.train.batch_sharding import BatchSharder
from moefold.validate.config import check_config
from tests.verify.recipes import tiny

LENGTHS = ((5, 1, 7, 3), (2, 14), (16,))
MODEL = {"attention.qk_norm": {}, "layers.ffn": "dense, moe"}


def _model(cfg: Config) -> Transformer:
    model = build_model(cfg).double()
    init_weights(model, cfg.model, cfg.run.seed)
    return model.train()


def _gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scaling", ["none", "yarn"])
def test_packed_documents_equal_each_by_itself(scaling):
    sizes = {"rope.scaling.original_seq_len": 8, "rope.scaling.factor": 4.0} if scaling == "yarn" else {}
    stretch = {"rope.scaling": scaling} | sizes
    cfg = tiny(model=MODEL | stretch, moe={"aux_loss": 0.0, "z_loss": 0.0})
    tokens = torch.randint(32, (3, 17), generator=torch.Generator().manual_seed(0))
    starts = torch.stack([torch.cat([torch.full((n,), sum(row[:i])) for i, n in enumerate(row)]) for row in LENGTHS])
    weights = torch.rand(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed, alone = _model(cfg), _model(cfg)
    packed.set_positions(torch.arange(16))
    loss = packed(tokens[:, :-1], labels=tokens[:, 1:], weights=weights, document_starts=starts)
    loss.backward()
    total = 0.0
    for b, row in enumerate(LENGTHS):
        for i, length in enumerate(row):
            span = slice(sum(row[:i]), sum(row[:i]) + length)
            alone.set_positions(torch.arange(length))
            targets = {"labels": tokens[b : b + 1, 1:][:, span], "weights": weights[b : b + 1, span]}
            part = alone(tokens[b : b + 1, :-1][:, span], **targets)
            part.backward()
            total += float(part.detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    expected = _gradients(alone)
    for name, gradient in _gradients(packed).items():
        assert (gradient - expected[name]).abs().max() <= 1e-11 * expected[name].abs().max(), name
    crossing = packed(tokens[:, :-1], labels=tokens[:, 1:], weights=weights)
    assert abs(float(crossing.detach()) - total) > 1e-3


class Weighted(SampleSource):
    """Samples with few counted targets, and none in the first."""

    seq_len = 16
    has_annotations = True

    def __len__(self) -> int:
        return 64

    def annotated_sample(self, number: int) -> Sample:
        rng = np.random.default_rng(number)
        tokens = rng.integers(0, 8, 17)
        if number % 3 == 2:
            return Sample(tokens)
        documents = np.cumsum(rng.random(17) < 0.2).astype(np.int32)
        return Sample(tokens, documents, rng.random(16) < (0.3 if number else 0.0))


def _weights(cfg: Config, positions: list[int]) -> tuple[int, np.ndarray, list[np.ndarray]]:
    groups = ParallelGroups.create(fold(world_size=cfg.parallel.world_size), torch.device("cpu"))
    split = SplitSampler(Weighted(), IndexRanges((range(64),)), order_key=None)
    loader = BatchSharder(split, cfg.batch_shape, groups, torch.tensor(positions))
    batches = loader.to_eval_batches(*loader.read_eval_samples(6))
    evaluation = [batch.columns["weights"].numpy() for batch in batches]
    return groups.attn.dp.rank, loader.batch(0).columns["weights"].numpy(), evaluation


@pytest.mark.parity
@pytest.mark.parametrize("dp", [1, 2])
def test_the_loss_is_the_mean_over_the_targets_that_count(pool, dp):
    cfg = tiny(world_size=dp)
    ranks = sorted(pool.run(dp, _weights, cfg, list(range(16))), key=lambda rank: rank[0])
    weights = np.concatenate([rank[1] for rank in ranks])
    expected = np.zeros((4, 16))
    for i in range(4):
        sample = Weighted().annotated_sample(i)
        expected[i] = 1.0 if sample.weights is None else sample.weights * (np.diff(sample.document_ids) == 0)
    assert weights == pytest.approx(expected / expected.sum())
    assert not weights[0].any()
    totals = [sum(batch.sum() for batch in rank[2]) for rank in ranks]
    assert sum(totals) == pytest.approx(1.0)
    # A share of the sequence gets its share of the weights.
    part = pool.run(dp, _weights, cfg, [0, 5, 6])[0][1]
    assert np.array_equal(part, ranks[0][1][:, [0, 5, 6]])


def _loss_of_known_bounds(cfg: Config) -> float:
    """Return this rank's loss of a step that gives every stage the bounds of its micro-batch."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    data = DataRequest.of(cfg).open()
    batch = BatchSharder(data.train, cfg.batch_shape, groups, model.positions).batch(0)
    starts = batch.columns["document_starts"].chunk(cfg.num_micro_batches)
    assert batch.document_bounds == tuple(DocumentBounds.of_starts(x) for x in starts)
    assert any(len(bounds) > 2 for micro_batch in batch.document_bounds for bounds in micro_batch.of_samples)
    layer_inputs = Transformer._layer_inputs

    def checked_layer_inputs(stage, columns, bounds):
        assert bounds == DocumentBounds.of_starts(columns["document_starts"])
        return layer_inputs(stage, columns, bounds)

    with mock.patch.object(Transformer, "_layer_inputs", checked_layer_inputs):
        return float(model.forward_backward(batch)[0])


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2},
        {"world_size": 2, "pp": 2},
        {"world_size": 2, "ep": 2, "overlap_experts": True},
        {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True},
    ],
)
def test_each_micro_batch_knows_its_bounds(pool, mapping):
    settings = {
        "model": {"vocab_size": 8},
        "data": {"document_end": 2},
        "train": {"micro_batch_size": 2, "global_batch_size": 16},
    }
    (expected,) = pool.run(1, _loss_of_known_bounds, tiny(**settings))
    found = pool.run(mapping["world_size"], _loss_of_known_bounds, tiny(**settings, **mapping))
    assert sum(found) == pytest.approx(expected, rel=1e-12)
