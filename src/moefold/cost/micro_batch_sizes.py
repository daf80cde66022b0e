"""Sizes of one micro-batch on one rank, with the sections of its recipe."""

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
