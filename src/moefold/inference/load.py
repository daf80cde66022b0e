"""Loading of a model for evaluation, generation and lm-eval."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moefold.checkpoint.load import load_weights
from moefold.comm.groups import ParallelGroups, current_world, errors_on_all_ranks
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.convert.weight_sources import load_hf_weights, load_merged_weights
from moefold.data.tokenizer import Tokenizer
from moefold.host.rank_env import RankEnv
from moefold.inference.settings import OPTION_NAMES, explain_oom
from moefold.inference.source import ModelSource
from moefold.launch.rank_errors import RankErrorHandler
from moefold.launch.ranks import init_distributed
from moefold.message_text import spelled_as
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.paged_decoder import decoding_notice
from moefold.terminal import print_escaped
from moefold.validate.config import check_config


@dataclass(frozen=True)
class LoadedModel:
    """One rank's shard of a model with its weights, tokenizer and mapping."""

    model: InferenceModel
    tokenizer: Tokenizer | None
    """None if no text is read or written."""
    parallel: ParallelConfig


@contextmanager
def joined_job(rank_env: RankEnv, device_type: str, oom_hint: str) -> Iterator[torch.device]:
    """Join the ranks of a command and yield this rank's device. Report errors, with a hint if memory ran out."""
    with (
        RankErrorHandler(rank_env, lambda: False),
        init_distributed(rank_env, device_type) as device,
        explain_oom(oom_hint),
    ):
        yield device


def report_decoding(loaded: LoadedModel, run: RunConfig) -> None:
    """Print `decoding_notice` on stderr of the first rank, unless the user chose the kernels."""
    notice = decoding_notice(loaded.model)
    if notice and loaded.model.groups.rank == 0 and run.kernels != "plain" and run.dtype != "float64":
        print_escaped(f"moefold: {notice}", file=sys.stderr)


def load_model(
    source: ModelSource, cfg: Config, device: torch.device, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """Build the model under the config's mapping and load its weights. It is collective over all ranks.

    Args:
        cfg: result of `inference_config`.
        tokenizer: result of `open_tokenizer`, if text is read or written.

    Raises:
        ConfigError: the weights are corrupt or incomplete. Raised on every rank.
        RunError: ranks that read each other's experts share no memory. Raised on every rank.
    """
    groups = ParallelGroups.create(check_config(cfg, is_training=False), device)
    with spelled_as(OPTION_NAMES):
        model = InferenceModel.build(cfg, groups)
    with errors_on_all_ranks(current_world()), model.writing_weights():
        if source.kind == "huggingface":
            load_hf_weights(source.path, model.named_parameters, model.named_buffers)
        elif source.has_adapters:
            load_merged_weights(source.path, model.named_parameters, model.named_buffers)
        else:
            load_weights(source.path, model.named_parameters, model.named_buffers)
    return LoadedModel(model, tokenizer, cfg.parallel)
