"""From a path to a model that computes: the one way in for evaluation, generation and lm-eval."""

from dataclasses import dataclass

import torch

from moefold.checkpoint.save_load import load_weights
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.convert.weights import load_hf_weights
from moefold.data.tokenizer import Tokenizer
from moefold.inference.source import ModelSource
from moefold.parallel.inference_model import InferenceModel
from moefold.validate.config import check_config


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model with its weights, and what belongs to it."""

    model: InferenceModel
    tokenizer: Tokenizer | None
    """None where nobody needs text."""
    cfg: Config
    groups: ParallelGroups


def load_model(
    source: ModelSource, cfg: Config, device: torch.device, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """Build the model under the config's mapping and read its weights; collective over all ranks.

    Args:
        source: from `find_source`.
        cfg: from `inference_config`.
        device: of this rank.
        tokenizer: from `open_tokenizer`, where text is read or written.

    Raises:
        ConfigError: the weights are damaged or incomplete; on every rank alike.
    """
    groups = ParallelGroups.create(check_config(cfg, is_training=False), device)
    model = InferenceModel(cfg, groups)
    load = load_hf_weights if source.kind == "huggingface" else load_weights
    load(source.path, model.named_parameters, model.named_buffers)
    return LoadedModel(model, tokenizer, cfg, groups)
