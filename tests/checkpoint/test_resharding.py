"""Save under one mapping, load under another: the next steps equal an uninterrupted oracle's."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.load import load_checkpoint
from moefold.checkpoint.stored_tensors import differing_tensors, stored_tensors
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.comm.groups import ParallelGroups
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.parallel.parallelize import parallelize
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from moefold.verify.compare import run_oracle
from tests.checkpoint.resumed_steps import train_steps
from tests.slow import slow
from tests.verify.recipes import LATENT, tiny, without_mapping
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity

MAPPINGS: dict[str, dict[str, object]] = {
    "one rank": {},
    "tensor and pipeline": {"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "zero": 2},
    "interleaved": {"world_size": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "etp": 2},
    "context, experts, zero 3": {"world_size": 4, "cp": 2, "ep": 4, "zero": 3},
    "replicated data": {"world_size": 4, "ep": 2, "zero": 0},
    "uneven experts": {"world_size": 8, "tp": 2, "etp": 2, "zero": 1},
    "V": {"world_size": 4, "pp": 2, "ep": 2, "schedule": "zbv", "virtual_stages": 2, "pipeline_layout": "E|ttt||tL"},
}
FAST = [("tensor and pipeline", "context, experts, zero 3")]
NEWER: dict[str, dict[str, object]] = {
    "two replicas": {"world_size": 2, "ep": 2, "zero": 0},
    "zero bubble": {"world_size": 4, "pp": 2, "tp": 2, "schedule": "zero-bubble", "ep": 2, "zero": 2},
    "DualPipeV": {"world_size": 4, "pp": 2, "ep": 2, "schedule": "dualpipev", "virtual_stages": 2},
    "leftover layers": {"world_size": 4, "pp": 2, "cp": 2, "pipeline_layout": "Ettt|tL", "schedule": "zero-bubble"},
    "DualPipeV of two ranks": {"world_size": 2, "pp": 2, "schedule": "dualpipev", "virtual_stages": 2, "zero": 2},
    "zero bubble of two ranks": {"world_size": 2, "pp": 2, "schedule": "zero-bubble", "zero": 2},
    "two shards of sequences": {"world_size": 2, "cp": 2, "ep": 2, "zero": 3},
}
NEWER_PAIRS = [
    *slow(
        [
            ("DualPipeV of two ranks", "zero bubble of two ranks"),
            ("DualPipeV", "zero bubble"),
            ("zero bubble", "V"),
            ("V", "DualPipeV"),
            ("one rank", "DualPipeV"),
            ("DualPipeV", "uneven experts"),
            ("leftover layers", "interleaved"),
            ("context, experts, zero 3", "leftover layers"),
        ]
    ),
]
"""Ways to and from the schedules that split the backward pass, and layouts of stages that are not even."""
PAIRS = [pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.slow]) for pair in permutations(MAPPINGS, 2)]
"""Every way from one mapping to another: 42."""


def _losses_of_oracle(cfg: Config) -> list[float]:
    """Return the losses of the oracle, which no mapping changes."""
    return [step.loss for step in run_oracle(without_mapping(cfg), 4).steps]


LATENT_MODEL = LATENT | {
    "layers": 2,
    "tie_embeddings": False,
    "attention.qk_norm": "none",
    "mtp_layers": 1,
}


def _recipe(name: str, run_dir: Path, global_batch_size: int = 4, **model: object) -> Config:
    cfg = tiny(
        model={
            "tie_embeddings": True,
            "layers": 4,
            "attention.qk_norm": {},
            "ffn.moe.num_experts": 4,
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            **model,
        },
        moe={"bias_update_rate": 0.1},
        train={"global_batch_size": global_batch_size},
        **(MAPPINGS | NEWER)[name],
    )
    run = RunConfig(dir=str(run_dir), seed=3, steps=4, device="cpu", dtype="float64")
    return replace(cfg, run=run)


LOOKS_BACK = {"aux_kind": "last_global_batch", "aux_loss": 0.5}


@pytest.mark.parametrize(("before", "after"), PAIRS + NEWER_PAIRS)
def test_resume_under_another_mapping_equals_the_uninterrupted_oracle(pool, tmp_path, before, after):
    # DualPipeV wants four micro-batches of each of two replicas.
    size = 8 if "DualPipeV" in (before, after) else 4
    first, second = (_recipe(name, tmp_path, size) for name in (before, after))
    losses = pool.run(first.parallel.world_size, train_steps, first, 0, 2, "")[0]
    saved = str(tmp_path / "checkpoints" / "step-000002")
    losses += pool.run(second.parallel.world_size, train_steps, second, 2, 4, saved)[0]
    assert losses == pytest.approx(_losses_of_oracle(first), rel=1e-9)


def _resave(cfg: Config, saved: str, step: int) -> None:
    """Load a checkpoint under a mapping, and save it again under another step."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    training = TrainingStep(parallelize(cfg, groups), cfg)
    load_checkpoint(Path(saved), training.parameters, training.buffers, training.optimizer)
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    write_checkpoint(cfg, state, TrainState(states=counted(step=step, samples=0, tokens=0)))


@pytest.mark.parametrize(
    ("optimizer", "between"),
    [("muon", "two replicas"), *slow([("adamw", "uneven experts"), ("muon", "uneven experts")])],
)
def test_rounded_moments_come_through_other_mappings_bit_for_bit(pool, tmp_path, optimizer, between):
    """Steps with them agree to 8 bits between mappings; stored moments must agree to the last bit."""
    saved = [str(tmp_path / "checkpoints" / f"step-{step:06d}") for step in (2, 3, 4)]
    configs = [_recipe(name, tmp_path) for name in ("tensor and pipeline", between, "one rank")]
    rounded = make_part("optimizer", optimizer, moment_dtype="bfloat16")
    configs = [
        replace(cfg, train=replace(cfg.train, optimizer=rounded), checkpoint=CheckpointConfig()) for cfg in configs
    ]
    pool.run(4, train_steps, configs[0], 0, 2, "")
    pool.run(configs[1].parallel.world_size, _resave, configs[1], saved[0], 3)
    pool.run(1, _resave, configs[2], saved[1], 4)
    kinds = {tensor.dtype for tensor in stored_tensors(Path(saved[0])) if tensor.name.startswith("optimizer.")}
    assert "bfloat16" in kinds
    for other in saved[1:]:
        assert differing_tensors(Path(saved[0]), Path(other)) == []


UNEVEN_VOCAB = {
    "vocab_size": 19,
    "tie_embeddings": False,
    "head_bias": True,
    "attention.num_heads": 12,
    "attention.num_kv_heads": 12,
}
"""Three tp ranks have 7 + 7 + 5 rows; two have 10 and 9, cut over dp = 3 into 4 + 4 + 2 and 3 + 3 + 3."""
UNEVEN_MAPPINGS = [{"world_size": 6, "tp": 2, "zero": 3}, {}, {"world_size": 3, "tp": 3}, {"world_size": 4, "tp": 4}]


@pytest.mark.parametrize("count", [2, *slow([(4,)])])
def test_a_vocabulary_that_tp_does_not_divide_reshards_bit_for_bit(pool, tmp_path, count):
    sizes = {"model": UNEVEN_VOCAB, "train": {"seq_len": 24, "global_batch_size": 6}}
    recipes = [tiny(**sizes, **mapping) for mapping in UNEVEN_MAPPINGS[:count]]
    run = RunConfig(dir=str(tmp_path), seed=3, steps=4, device="cpu", dtype="float64")
    configs = [replace(cfg, run=run, checkpoint=CheckpointConfig()) for cfg in recipes]
    saved = [str(tmp_path / "checkpoints" / f"step-{step:06d}") for step in range(2, 2 + count)]
    losses = pool.run(6, train_steps, configs[0], 0, 2, "")[0]
    for i, cfg in enumerate(configs[1:]):
        pool.run(cfg.parallel.world_size, _resave, cfg, saved[i], i + 3)
        assert differing_tensors(Path(saved[0]), Path(saved[i + 1])) == []
    assert {tensor.shape[0] for tensor in stored_tensors(Path(saved[-1])) if "head.weight" in tensor.name} == {19}
    last = replace(configs[-1], run=replace(run, dir=str(tmp_path / "next")))
    losses += pool.run(last.parallel.world_size, train_steps, last, 2, 4, saved[0])[0]
    assert losses == pytest.approx(_losses_of_oracle(configs[0]), rel=1e-9)


def test_latents_and_multi_token_prediction_resume_under_another_mapping(pool, tmp_path):
    """The last stage of a pipeline has the embedding too, and the checkpoint has it once."""
    first, second = (
        _recipe(name, tmp_path, **LATENT_MODEL) for name in ("zero bubble of two ranks", "two shards of sequences")
    )
    saved = str(tmp_path / "checkpoints" / "step-000002")
    before, after = run_each(pool, 2, train_steps, (first, 0, 2, ""), (second, 2, 4, saved))
    losses = before[0] + after[0]
    assert losses == pytest.approx(_losses_of_oracle(first), rel=1e-9)


def _looking_back(name: str, run_dir: Path) -> Config:
    cfg = _recipe(name, run_dir)
    return replace(cfg, moe=replace(cfg.moe, **LOOKS_BACK))


@pytest.mark.parametrize("after", ["two replicas", *slow([("replicated data",), ("context, experts, zero 3",)])])
def test_a_loss_that_looks_back_at_the_last_step_resumes_under_another_dp(pool, tmp_path, after):
    first, second = _looking_back("one rank", tmp_path), _looking_back(after, tmp_path)
    assert second.parallel.dp != first.parallel.dp
    losses = pool.run(1, train_steps, first, 0, 2, "")[0]
    saved = str(tmp_path / "checkpoints" / "step-000002")
    losses += pool.run(second.parallel.world_size, train_steps, second, 2, 4, saved)[0]
    assert losses == pytest.approx(_losses_of_oracle(first), rel=1e-9)


def test_a_loss_that_looks_back_may_begin_at_a_resume(pool, tmp_path):
    without = _recipe("one rank", tmp_path)
    expected = _losses_of_oracle(without)
    pool.run(1, train_steps, without, 0, 2, "")
    saved = str(tmp_path / "checkpoints" / "step-000002")
    losses = pool.run(2, train_steps, _looking_back("two replicas", tmp_path), 2, 4, saved)[0]
    # The step's own loss comes of the weights that were saved; the one after it has seen another gradient.
    assert losses[0] == pytest.approx(expected[2], rel=1e-9)
    assert losses[1] != pytest.approx(expected[3], rel=1e-6)


# The fast row fails if a step after the resume reads other moments than those that were loaded.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("two replicas", "one rank"),
        *slow(
            [
                ("replicated data", "one rank"),
                ("tensor and pipeline", "context, experts, zero 3"),
                ("uneven experts", "one rank"),
                ("replicated data", "interleaved"),
            ]
        ),
    ],
)
def test_muon_resumes_under_another_mapping(pool, tmp_path, before, after):
    first, second = (_recipe(name, tmp_path) for name in (before, after))
    first, second = (replace(cfg, train=replace(cfg.train, optimizer="muon")) for cfg in (first, second))
    losses = pool.run(first.parallel.world_size, train_steps, first, 0, 2, "")[0]
    saved = str(tmp_path / "checkpoints" / "step-000002")
    losses += pool.run(second.parallel.world_size, train_steps, second, 2, 4, saved)[0]
    assert losses == pytest.approx(_losses_of_oracle(first), rel=1e-9)
