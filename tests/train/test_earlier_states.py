"""Runs whose checkpoints an earlier version wrote go on with the same losses.

The archive has the checkpoint of one step of each run of `RUNS`, and the losses of the run without a stop.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.recipe import load_config
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config

pytestmark = pytest.mark.parity

ARCHIVE = Path(__file__).parents[1] / "checkpoint" / "written_by_11325967.tar.gz"
EXPECTED = "expected.json"
"""Name of the file of {run: losses}."""
STEPS = 10
COMMON = (
    "run.device=cpu",
    "run.dtype=float64",
    f"run.steps={STEPS}",
    "run.seed=3",
    "model.layers=1",
    "model.hidden_size=8",
    "model.vocab_size=256",
    "model.attention.num_heads=2",
    "model.attention.num_kv_heads=1",
    "model.ffn.moe.num_experts=4",
    "model.ffn.moe.intermediate_size=4",
    "model.tie_embeddings=true",
    "train.seq_len=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.lr=1e-2",
    "checkpoint.keep=0",
    "checkpoint.at_end=false",
)
TEXT = ("data.kind=text", "data.path=text.txt")
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    # Its first spike leads back to a checkpoint, and its moments are reset.
    "pretraining": (
        9,
        2,
        (
            *TEXT,
            "parallel.world_size=2",
            "parallel.ep=2",
            "checkpoint.every=3",
            "train.eval_every=2",
            "train.reset_moments_every=4",
            "train.lr_schedule=constant",
            "faults.spike=rollback",
            "faults.spike_window=3",
            "faults.spike_factor=0.3",
            "faults.max_rollbacks=1000",
            "faults.replica_check_every=2",
        ),
    ),
    # The mean of its round is received and not applied yet.
    "outer optimizer": (
        4,
        1,
        (
            *TEXT,
            "checkpoint.every=4",
            "sites.method=diloco",
            "sites.count=1",
            "sites.every=2",
            "sites.overlap=1",
            "sites.lr=0.7",
            "sites.momentum=0.9",
        ),
    ),
    # Rollouts of older weights wait for training, and the reference model was reset.
    "rollouts": (
        6,
        1,
        (
            "data.kind=prompts",
            "data.path=prompts.jsonl",
            "checkpoint.every=2",
            "train.eval_every=1",
            "train.lr_schedule=constant",
            "rl.objective=cispo",
            "rl.group_size=2",
            "rl.kl=0.1",
            "rl.staleness=1",
            "rl.reset_patience=1",
            "rollout.max_tokens=4",
            "reward.use=reward.py:reward",
            "reward.workers=1",
        ),
    ),
}
"""The step of each run's checkpoint in the archive, the number of ranks, and its settings."""


def _train(name: str, folder: str) -> list[float]:
    """Train a run to its end in a folder; return the losses of all steps."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        cfg = load_config(None, [*COMMON, f"run.dir={name.replace(' ', '-')}", *RUNS[name][2]])
        Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu"))).run(StopSignals())
        lines = (Path(cfg.run.dir) / "metrics.jsonl").read_text().splitlines()
    finally:
        os.chdir(before)
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_from_a_checkpoint_of_an_earlier_version(pool, tmp_path, name):
    subprocess.run(["tar", "-xzf", str(ARCHIVE), "-C", str(tmp_path)], check=True)
    step, ranks, _ = RUNS[name]
    (found, *_) = pool.run(ranks, _train, name, str(tmp_path))
    # The last bits of a sum depend on the processor.
    assert found == pytest.approx(json.loads((tmp_path / EXPECTED).read_text())[name], rel=1e-10)
    assert len(found) == STEPS > step
