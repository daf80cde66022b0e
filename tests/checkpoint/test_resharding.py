"""Save under one mapping, load under another: the next steps are those of the oracle that was never interrupted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.store import load_checkpoint, save_checkpoint
from moefold.config.checks import check_config
from moefold.config.schema import Config, RunConfig
from moefold.data import open_dataset
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import TrainingStep
from moefold.verify.compare import run_oracle
from tests.verify.recipes import tiny, without_mapping

pytestmark = pytest.mark.parity

MAPPINGS: dict[str, dict[str, object]] = {
    "one rank": {},
    "tensor and pipeline": {"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "zero": 2},
    "interleaved": {"world_size": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "etp": 2},
    "context, experts, zero 3": {"world_size": 4, "cp": 2, "ep": 4, "zero": 3},
    "replicated data": {"world_size": 4, "ep": 2, "zero": 0},
    "uneven experts": {"world_size": 8, "tp": 2, "etp": 2, "zero": 1},
}
PAIRS = [
    ("one rank", "tensor and pipeline"),
    ("tensor and pipeline", "context, experts, zero 3"),
    ("context, experts, zero 3", "interleaved"),
    ("interleaved", "replicated data"),
    ("replicated data", "uneven experts"),
    ("uneven experts", "one rank"),
]


LATENT = {
    "tie_embeddings": False,
    "qk_norm": False,
    "attention": "mla",
    "q_lora_rank": 5,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "mtp_layers": 1,
}


def _recipe(name: str, run_dir: Path, **model: object) -> Config:
    cfg = tiny(
        model={
            "tie_embeddings": True,
            "num_layers": 4,
            "qk_norm": True,
            "num_experts": 4,
            "router_score": "sigmoid",
            "expert_bias": True,
            **model,
        },
        moe={"bias_update_rate": 0.1},
        train={"global_batch_size": 8},
        **MAPPINGS[name],
    )
    run = RunConfig(dir=str(run_dir), seed=3, steps=4, device="cpu", dtype="float64")
    return replace(cfg, run=run)


def _train(cfg: Config, first: int, last: int, resume: str) -> list[float]:
    """Train steps first+1 .. last after loading `resume`, save, and return the losses."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    samples = 0
    if resume:
        meta = load_checkpoint(Path(resume), training.parameters, training.buffers, training.optimizer)
        assert meta.step == first
        samples = meta.samples
    data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    loader = BatchLoader(data.train, cfg, groups, model.positions)
    losses = []
    for step in range(first + 1, last + 1):
        losses.append(training.run(loader.batch(samples), step).loss)
        samples += cfg.train.global_batch_size
    save_checkpoint(
        cfg,
        training.parameters,
        training.buffers,
        training.optimizer,
        step=last,
        samples=samples,
        tokens=0,
        is_first_rank=groups.rank == 0,
    )
    return losses


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resume_under_another_mapping_equals_the_uninterrupted_oracle(pool, tmp_path, before, after):
    first, second = _recipe(before, tmp_path), _recipe(after, tmp_path)
    losses = pool.run(first.parallel.world_size, _train, first, 0, 2, "")[0]
    saved = str(tmp_path / "checkpoints" / "step-000002")
    losses += pool.run(second.parallel.world_size, _train, second, 2, 4, saved)[0]
    expected = [step.loss for step in run_oracle(without_mapping(first), 4).steps]
    assert losses == pytest.approx(expected, rel=1e-9)


def test_latents_and_multi_token_prediction_resume_under_another_mapping(pool, tmp_path):
    """The last stage of a pipeline has the embedding too, and the checkpoint has it once."""
    first, second = (_recipe(name, tmp_path, **LATENT) for name in ("tensor and pipeline", "context, experts, zero 3"))
    losses = pool.run(4, _train, first, 0, 2, "")[0]
    losses += pool.run(4, _train, second, 2, 4, str(tmp_path / "checkpoints" / "step-000002"))[0]
    expected = [step.loss for step in run_oracle(without_mapping(first), 4).steps]
    assert losses == pytest.approx(expected, rel=1e-9)
