"""Number of optimizer steps of a run whose length is given in epochs, from the length of its data."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from moefold.config.base.limits import MAX_STEPS
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RLConfig
from moefold.data.dataset import DataRequest
from moefold.data.sampler import StridedSampler
from moefold.data.tokenizer import load_tokenizer
from moefold.data.validate_source import check_data
from moefold.errors import ConfigError
from moefold.train.run_summary import MIN_UNBOUNDED_SAMPLES

if TYPE_CHECKING:
    from moefold.data.dataset import ProgramData


def resolve_epochs(cfg: Config, program_data: "ProgramData | None", *, is_first: bool) -> tuple[Config, str]:
    """Return a recipe with run.steps computed from run.epochs, and a message. It reads and tokenises the data.

    The steps are rounded up: the last step may go beyond the last epoch. Every process computes the same number.

    Args:
        is_first: whether this process reports the progress of tokenising, and the others wait for it.

    Raises:
        ConfigError: the length of the data is unknown, or the data cannot be read.
    """
    if reason := _unknown_length_reason(cfg.data, cfg.rl):
        raise ConfigError(f"run.epochs={cfg.run.epochs:g} needs the length of the data, and {reason}; set run.steps")
    number = _num_samples(cfg, program_data, is_first=is_first)
    if not 0 < number < MIN_UNBOUNDED_SAMPLES:
        raise ConfigError(
            f"run.epochs={cfg.run.epochs:g} needs the length of the data, and data.kind={cfg.data.kind!r} has no end; "
            "set run.steps"
        )
    # One step of reinforcement learning takes a prompt for each group of rollouts, and rounds are whole.
    size = cfg.train.global_batch_size // (cfg.rl.group_size if cfg.is_rl else 1)
    multiple = cfg.rl.updates if cfg.is_rl else 1
    steps = max(1, math.ceil(cfg.run.epochs * number / (size * multiple))) * multiple
    if steps > MAX_STEPS:
        raise ConfigError(f"run.epochs={cfg.run.epochs:g} is {steps} steps, and at most {MAX_STEPS} are allowed")
    unit = "prompts" if cfg.is_rl else f"samples of {cfg.train.seq_len:,} tokens"
    message = f"run.epochs={cfg.run.epochs:g} is run.steps={steps}: {number:,} {unit}, {size:,} in a step"
    return replace(cfg, run=replace(cfg.run, steps=steps)), message


def _unknown_length_reason(data: DataConfig, rl: RLConfig) -> str:
    """Return why the length of the data is certainly unknown, from the settings only, or "" if it may be known."""
    if data.streaming:
        return "data.streaming=true reads a stream, whose length is unknown"
    if data.kind == "synthetic":
        return "data.kind='synthetic' has no end"
    if rl.is_on and rl.mixed_only:
        return "rl.mixed_only=true takes as many prompts as it needs"
    return ""


def _num_samples(cfg: Config, program_data: "ProgramData | None", *, is_first: bool) -> int:
    """Return the number of samples in an epoch of this job, of all its data-parallel ranks together."""
    if program_data is not None:
        return len(program_data.train)
    data = cfg.data
    request = DataRequest.of(cfg)
    check_data(request)
    if cfg.is_rl:
        from moefold.data.prompts import open_prompts
        from moefold.rl.reward import check_columns

        tokenizer = load_tokenizer(data, vocab_size=cfg.model.vocab_size)
        return len(open_prompts(data, tokenizer, seed=cfg.run.seed, check=check_columns(cfg.data, cfg.reward)).train)
    if is_first and not data.drops_files:
        request.prepare()
    samples = request.open().train
    sites = cfg.sites
    return len(StridedSampler(samples, sites.count, sites.number) if sites.count > 1 else samples)
