"""Base of the memory formulas: `LayerSizes` with the model and [train] of the recipe."""

from abc import ABC
from dataclasses import dataclass

from moefold.config.groups.layer_sizes import LayerSizes
from moefold.config.model import ModelConfig
from moefold.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchSizes(LayerSizes, ABC):
    """Sizes of one micro-batch for formulas that know the whole model."""

    model: ModelConfig
    train: TrainConfig
