"""Runs of reinforcement learning with a tiny policy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.metrics import MetricsConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.metrics.undefined import undefined
from tests.models import model_of

ASCII_REWARD = """
def reward(prompts, completions, completion_ids, **columns):
    return [sum(token < 64 for token in ids) / 8 for ids in completion_ids]
"""


def recipe(tmp_path: Path, steps: int = 4, **rl: Any) -> Config:
    """A tiny policy that is rewarded for ids below 64, a quarter of those that a random policy samples."""
    (tmp_path / "reward.py").write_text(ASCII_REWARD)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{i}:", "answer": "a"}) + "\n" for i in range(20))
    )
    return Config(
        run=RunConfig(dir=str(tmp_path / "run"), seed=3, steps=steps, device="cpu", dtype="float64"),
        model=model_of(
            {
                "layers": 2,
                "hidden_size": 16,
                "attention.num_heads": 4,
                "attention.num_kv_heads": 2,
                "attention.head_dim": 4,
                "vocab_size": 256,
                "ffn.moe.num_experts": 4,
                "ffn.moe.top_k": 2,
                "ffn.moe.intermediate_size": 8,
                "init_std": 0.2,
            }
        ),
        # The load-balancing loss counts padding, which depends on the number of ranks.
        moe=MoEConfig(aux_loss=0.0),
        train=TrainConfig(
            seq_len=32,
            micro_batch_size=4,
            global_batch_size=16,
            lr=3e-2,
            lr_schedule="constant",
            optimizer=make_part("optimizer", "adamw", weight_decay=0.0),
        ),
        data=DataConfig(kind="prompts", path=str(tmp_path / "prompts.jsonl"), validation_fraction=0.1),
        checkpoint=CheckpointConfig(every=2),
        metrics=MetricsConfig(rollouts_every=1),
        rl=RLConfig(**{"group_size": 4, **rl}),
        rollout=RolloutConfig(max_tokens=8),
        reward=RewardConfig(use=f"{tmp_path / 'reward.py'}:reward", workers=1),
    )


class Interruption(Callback):
    """Ends a run as a crash would, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self.step:
            raise InterruptedError


def train_policy(cfg: Config, interrupted_at: int = 0) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    try:
        return Trainer(cfg, groups, callbacks=[Interruption(interrupted_at)]).run(StopSignals())
    except InterruptedError:
        return -1


def records(cfg: Config, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (Path(cfg.run.dir) / name).read_text().splitlines()]
    assert name != "metrics.jsonl" or not [key for record in found for key in undefined(record)]
    return found


def under(cfg: Config, folder: Path, **parallel: Any) -> Config:
    return replace(cfg, run=replace(cfg.run, dir=str(folder)), parallel=ParallelConfig(**parallel))


def weights(cfg: Config) -> dict[str, bytes]:
    """The files of weights and moments of the last checkpoint."""
    folder = Path(cfg.run.dir) / "checkpoints" / f"step-{cfg.run.steps:06d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
