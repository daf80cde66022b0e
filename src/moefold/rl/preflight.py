"""Checks of the prompts and the reward function of reinforcement learning, before ranks start."""

from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RolloutConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.prompts import PromptSource, open_prompts
from moefold.data.tokenizer import load_tokenizer, report_notes
from moefold.errors import ConfigError
from moefold.message_text import Setting
from moefold.rl.reward import check_columns, check_reward

MAX_CHECKED_PROBLEMS = 1000
"""Maximum number of checked problems of a task. All prompts of files are checked."""


def check_rollout_data(cfg: Config) -> int:
    """Check that prompts exist and fit into a sample with their completions, and that the reward function works.

    Returns the tokens of the longest prompt with rollout.max_tokens.
    """
    tokenizer = load_tokenizer(cfg.data, vocab_size=cfg.model.vocab_size)
    report_notes(tokenizer)
    prompts = open_prompts(
        cfg.data, tokenizer, seed=cfg.run.seed, check=check_columns(cfg.data, cfg.reward), reports=True
    )
    num_prompts = cfg.rl.updates * cfg.train.global_batch_size // cfg.rl.group_size
    if len(prompts.train) < num_prompts:
        raise ConfigError(
            f"{Setting('data.path', cfg.data.path)} has {len(prompts.train)} prompts to train on, and a step needs "
            f"{num_prompts} (rl.updates * train.global_batch_size / rl.group_size); give more prompts, or lower "
            "train.global_batch_size"
        )
    sources = [source for source in (prompts.train, prompts.validation) if source is not None]
    longest = max(_check_lengths(cfg.train, cfg.data, cfg.rollout, source) for source in sources)
    check_reward(
        cfg.data, cfg.reward, [prompts.train.prompt(i) for i in range(min(len(prompts.train), _num_checked(cfg.data)))]
    )
    return longest


def _check_lengths(train: TrainConfig, data: DataConfig, rollout: RolloutConfig, source: PromptSource) -> int:
    longest = max(
        (source.prompt(i) for i in range(min(len(source), _num_checked(data)))), key=lambda prompt: len(prompt.ids)
    )
    length = len(longest.ids) + rollout.max_tokens
    if length > train.seq_len + 1:
        raise ConfigError(
            f"train.seq_len={train.seq_len} is too short for the prompt of {longest.location}, {len(longest.ids)} "
            f"tokens, with rollout.max_tokens={rollout.max_tokens}; set train.seq_len to {length - 1} or more, or "
            "lower max_tokens"
        )
    return length


def _num_checked(data: DataConfig) -> int:
    return MAX_CHECKED_PROBLEMS if data.kind == "task" else 2**62
