"""Documents packed into one sample are as if each were alone, on one rank and under every axis."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.sample import Sample
from moefold.data.sampler import IndexRanges, Split
from moefold.model.init import init_weights
from moefold.model.transformer import Transformer, build_model
from moefold.topology.layout import fold
from moefold.train.batch import BatchSharder
from tests.verify.recipes import tiny
from tests.verify.test_parity import assert_equals_oracle

LENGTHS = ((5, 1, 7, 3), (2, 14), (16,))
MODEL = {"qk_norm": True, "layer_pattern": "DM"}


def documents_of(cfg: Config) -> Config:
    """The recipe with documents of about eight tokens, cut out of one stream."""
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=8))
    return replace(cfg, data=replace(cfg.data, document_end=2))


def _model(cfg: Config) -> Transformer:
    model = build_model(cfg).double()
    init_weights(model, cfg.model, cfg.run.seed)
    return model.train()


def _gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scaling", ["none", "yarn"])
def test_packed_equals_each_document_alone(scaling):
    stretch = {
        "rope_scaling": scaling,
        "rope_original_seq_len": 8,
        "rope_scaling_factor": 4.0 if scaling == "yarn" else 1.0,
    }
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


MTP = {"mtp_layers": 2}
MLA = {
    "attention": "mla",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}


@pytest.mark.parity
@pytest.mark.parametrize("model", [MTP, MLA, MLA | {"attention_pattern": "WF", "sliding_window": 5}], ids=str)
@pytest.mark.parametrize("mapping", [{"cp": 2}, {"tp": 2, "context": "ulysses"}, {"pp": 2}], ids=str)
def test_latent_attention_and_further_tokens_keep_to_their_document(pool, model, mapping):
    cfg = tiny(model=model, train={"micro_batch_size": 2, "global_batch_size": 8}, world_size=2, **mapping)
    assert_equals_oracle(pool, documents_of(cfg))


MAPPINGS = [
    {"world_size": 1},
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "cp": 2},
    {"world_size": 2, "cp": 2, "context": "allgather"},
    {"world_size": 2, "cp": 2, "context": "ulysses"},
    {"world_size": 2, "pp": 2},
    {"world_size": 4, "cp": 4, "ep": 4},
    {"world_size": 4, "tp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"world_size": 2},
]


@pytest.mark.parity
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_mappings_equal_the_oracle(pool, mapping):
    cfg = documents_of(tiny(model={"qk_norm": True}, train={"micro_batch_size": 2, "global_batch_size": 8}, **mapping))
    assert_equals_oracle(pool, cfg)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize(
    "degrees", [{"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {"cp": 4, "pp": 2, "ep": 2, "etp": 2}], ids=str
)
def test_folded_mappings_equal_the_oracle(pool, degrees, context):
    cfg = documents_of(tiny(train={"global_batch_size": 8}, world_size=8, context=context, **degrees))
    assert_equals_oracle(pool, cfg)


class Weighted:
    """Samples of which few targets count, and in the first not one."""

    seq_len = 16

    def __len__(self) -> int:
        return 64

    def sample(self, number: int):
        return self.annotated_sample(number).tokens

    def annotated_sample(self, number: int) -> Sample:
        rng = np.random.default_rng(number)
        tokens = rng.integers(0, 8, 17)
        if number % 3 == 2:
            return Sample(tokens)
        documents = np.cumsum(rng.random(17) < 0.2).astype(np.int32)
        return Sample(tokens, documents, rng.random(16) < (0.3 if number else 0.0))


def _weights(cfg: Config, positions: list[int]) -> tuple[int, np.ndarray, list[np.ndarray]]:
    groups = ParallelGroups.create(fold(world_size=cfg.parallel.world_size), torch.device("cpu"))
    split = Split(Weighted(), IndexRanges((range(64),)), order_key=None)
    loader = BatchSharder(split, cfg, groups, torch.tensor(positions))
    evaluation = [batch.columns["weights"].numpy() for batch in loader.eval_batches(6)]
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
