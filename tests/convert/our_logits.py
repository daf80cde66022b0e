"""Logits of our model with the weights of a Hugging Face folder."""

from pathlib import Path
from typing import Literal

import torch

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.convert.families.hf_config import read_model_config
from moefold.convert.weight_sources import load_hf_weights
from moefold.model.transformer import build_model

SEQ_LEN = 16


def recipe(folder: Path, dtype: Literal["float32", "float64"] = "float32", **parallel: object) -> Config:
    """A recipe for the model of a folder."""
    return Config(
        run=RunConfig(device="cpu", dtype=dtype),
        model=read_model_config(folder),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4),
    )


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of our model with the weights of a folder, on one process, float64."""
    model = build_model(recipe(folder, "float64")).double()
    model.set_positions(torch.arange(tokens.shape[1]))
    load_hf_weights(folder, dict(model.named_parameters()), dict(model.named_buffers()))
    with torch.no_grad():
        return model.eval()(tokens).transpose(0, 1)
