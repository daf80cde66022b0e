"""Refuse training stages whose step time the planner does not predict."""

from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.config.train import TrainConfig
from moefold.errors import ConfigError


def check_priced_stage(model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> None:
    """Check that the time model has the passes of a recipe's training stage.

    Raises:
        ConfigError: the recipe trains adapters alone, or is the warm-up of indexers, whose attention is dense.
    """
    if lora.trains_adapters_only:
        raise ConfigError(
            f"lora.rank={lora.rank} has no predicted step time: the time model has the gradients of all weights; "
            "plan with lora.rank=0, whose mappings have room for adapters, and add [lora] to the recipe"
        )
    if train.trains_indexers_only(model):
        raise ConfigError(
            "train.indexer_stage='warmup' has no predicted step time: the time model has attention over selected keys "
            "alone; choose 'sparse' to price the stage that follows, or model.attention.indexer=none to price dense "
            "attention"
        )
