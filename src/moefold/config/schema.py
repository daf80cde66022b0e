"""Recipe schema: frozen, typed dataclasses, validated by `config/load.py`.

The docstring under each field is the help of its recipe key. The schema does not import torch, so that a wrong recipe
is refused immediately.
"""

import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, cast

from moefold.config.base.field import SAME_RUN, ReadIf, VerifyAs
from moefold.config.base.part import keys_of
from moefold.config.groups.context import BatchShape, ContextPart
from moefold.config.model import ModelConfig
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.metrics import MetricsConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.config.sections.train import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Complete recipe: one dataclass per section."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: Annotated[ParallelConfig, VerifyAs.MAPPING, SAME_RUN] = field(default_factory=ParallelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: Annotated[DataConfig, VerifyAs.SAMPLES] = field(default_factory=DataConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    lora: Annotated[LoraConfig, ReadIf("lora.rank")] = field(default_factory=LoraConfig)
    checkpoint: Annotated[CheckpointConfig, VerifyAs.FILES, SAME_RUN] = field(default_factory=CheckpointConfig)
    metrics: Annotated[MetricsConfig, VerifyAs.FILES, SAME_RUN] = field(default_factory=MetricsConfig)
    faults: Annotated[FaultsConfig, VerifyAs.FILES, SAME_RUN] = field(default_factory=FaultsConfig)
    rl: Annotated[RLConfig, ReadIf("rl.group_size"), VerifyAs.ROLLOUTS] = field(default_factory=RLConfig)
    rollout: Annotated[RolloutConfig, ReadIf("rl.group_size"), VerifyAs.ROLLOUTS] = field(default_factory=RolloutConfig)
    reward: Annotated[RewardConfig, ReadIf("rl.group_size"), VerifyAs.ROLLOUTS] = field(default_factory=RewardConfig)
    sites: Annotated[SitesConfig, VerifyAs.ROUNDS] = field(default_factory=SitesConfig)

    @property
    def is_rl(self) -> bool:
        """Return whether the recipe is reinforcement learning."""
        return self.rl.is_on

    @property
    def trains_indexers_only(self) -> bool:
        """Return whether only the indexers of sparse attention learn, in their warm-up stage."""
        return self.model.trains_indexers_only(self.train)

    @property
    def trains_adapters_only(self) -> bool:
        """Return whether only low-rank adapters learn."""
        return self.lora.trains_adapters_only

    @property
    def num_job_ranks(self) -> int:
        """Ranks of the job: those that train, and those that only sample rollouts."""
        return self.rollout.num_job_ranks(self.parallel.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per data-parallel rank and step, including micro-batches of only padding."""
        return self.train.num_micro_batches(self.parallel.dp)

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes of the batches."""
        return BatchShape(
            global_batch_size=self.train.global_batch_size,
            micro_batch_size=self.train.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            seq_len=self.train.seq_len,
            vocab_size=self.model.vocab_size,
            mtp_layers=self.model.mtp_layers,
            dp=self.parallel.dp,
            cp=self.parallel.cp,
            context=cast(ContextPart, self.parallel.context),
            is_float64=self.run.dtype == "float64",
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on a rank, V/tp rounded up."""
        return self.parallel.vocab_rows(self.model.vocab_size)

    def for_inference(self) -> "Config":
        """Return the recipe without low-precision GEMMs and compilation.

        Inference computes in the type of the weights, even if they were trained with low-precision GEMMs, and its
        shapes change too often to be compiled.
        """
        return replace(
            self,
            run=replace(self.run, compile="none"),
            train=replace(self.train, precision="dtype"),
            moe=replace(self.moe, dispatch_precision="dtype"),
        )

    def loss_chunk_tokens(self, device_type: str) -> int:
        """Return the number of tokens whose logits are in memory at a time. 0 means all tokens of a micro-batch."""
        return self.train.loss_chunk_tokens(device_type, cp=self.parallel.cp, vocab_rows=self.vocab_rows)


def config_to_dict(cfg: Config) -> dict[str, Any]:
    """Convert the resolved config to plain data: every key of every section, ready for JSON."""
    tree: dict[str, Any] = json.loads(json.dumps({f.name: keys_of(getattr(cfg, f.name)) for f in fields(cfg)}))
    return tree


def write_config_json(cfg: Config, path: Path) -> None:
    """Write the resolved config as JSON, atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(config_to_dict(cfg), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
