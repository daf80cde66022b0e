"""Checked jobs of `moefold rollout`, made before any rank starts, without torch on the CPU. Messages name options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RewardConfig
from moefold.data.conversations.reward_prompt import override_want
from moefold.data.prompts import FilePrompts, Prompt, PromptSource, TaskPrompts, read_prompts
from moefold.data.synthetic_problems import Problems
from moefold.errors import ConfigError
from moefold.host.output_file import check_output_path, refuse_existing
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.jobs import cache_of_requests, choose_inference_device
from moefold.inference.notices import report_notices
from moefold.inference.sampling import SamplingParams
from moefold.inference.settings import (
    OPTION_NAMES,
    InferenceRequest,
    SamplingOptions,
    generate_oom_hint,
    launched_config,
)
from moefold.inference.source import ModelSource, find_source
from moefold.inference.text import TEXT_NAMES, open_tokenizer
from moefold.message_text import spelled_as
from moefold.rl.reward import check_columns, check_reward
from moefold.validate.rl import reward_problems

ROLLOUT_NAMES = {
    **TEXT_NAMES,
    "reward.use": "--reward",
    "reward.weights": "--reward-weight",
    "reward.on_error": "",
    "data.path": "--prompts",
    "data.skip_bad_rows": "--skip-bad-rows",
    "data.task_size": "--task-size",
    "data.task": "--task",
}
"""Options of `moefold rollout` by the recipe key in error messages."""


@dataclass(frozen=True, kw_only=True)
class RolloutRequest(SamplingOptions):
    """Model, prompts or task, rewards and output of `moefold rollout`."""

    model: str
    out: Path
    prompts: Sequence[str] = ()
    """Files of prompts. Empty means a task."""
    task: Literal["", "sort", "add", "countdown"] = ""
    task_size: int = 4
    count: int = 0
    """Number of prompts. 0: all prompts of the files, or 256 problems."""
    held_out: bool = False
    """If True, use problems that no training uses."""
    reward: Sequence[str] = ()
    """Names of reward functions, or empty for a task: its verifier."""
    reward_weight: Sequence[float] = ()
    """Weight of each function. Empty means 1."""
    samples: int = 8
    max_tokens: int = 64
    sampling: SamplingParams = SamplingParams()
    overrides: Sequence[str] = ()
    slots: int = 256
    cache_gib: float = 0.0
    force: bool = False
    skip_bad_rows: bool = False
    """If True, skip rows of the files that are not prompts, and log their number."""


@dataclass(frozen=True)
class RolloutJob:
    """Checked rollouts of some prompts."""

    source: ModelSource
    cfg: Config
    """Mapping and types of inference."""
    task_cfg: Config
    """Recipe of which only the prompts and the reward count."""
    device_type: str
    """Type of the devices of all ranks: "cpu" or "cuda"."""
    request: RolloutRequest
    settings: EngineSettings
    num_prompts: int


DEFAULT_PROBLEMS = 256


def prepare_rollouts(request: RolloutRequest, rank_env: RankEnv | None) -> RolloutJob:
    """Check a job before any rank starts.

    Raises:
        ConfigError: the model, a prompt, the reward, an option or the mapping cannot work, or the memory is too small.
    """
    _check_options(request)
    source = find_source(request.model, request.ignore_key)
    report_notices(source.notices, rank_env)
    source = replace(source, want=override_want(source.want, request.want))
    inference = InferenceRequest.of(request, request.overrides)
    cfg = launched_config(source, inference, "generate", rank_env)
    task_cfg = _task_config(request, source)
    prompts = open_rollout_prompts(
        task_cfg.data, task_cfg.reward, source, request, reports=rank_env is None or rank_env.rank == 0
    )
    num_prompts = request.count or (DEFAULT_PROBLEMS if request.task else len(prompts))
    if num_prompts > len(prompts):
        raise ConfigError(f"--count {num_prompts} must be at most the number of prompts, {len(prompts)}")
    with spelled_as(ROLLOUT_NAMES):
        for problem in reward_problems(task_cfg.reward):
            raise ConfigError(problem)
        check_reward(task_cfg.data, task_cfg.reward, [prompts.prompt(0)])
    longest = max(len(prompts.prompt(i).ids) for i in range(num_prompts)) + request.max_tokens
    cfg = launched_config(source, replace(inference, seq_len=longest), "generate", rank_env)
    settings = EngineSettings(
        slots=request.slots, pass_tokens=max(EngineSettings.pass_tokens, request.slots), cache_gib=request.cache_gib
    )
    largest = Request(prompt=(0,) * (longest - request.max_tokens), max_tokens=request.max_tokens)

    def cache_bytes(device_type: str) -> dict[str, int]:
        with spelled_as(OPTION_NAMES):
            settings.check()
            at_once = [largest] * min(request.slots, num_prompts * request.samples)
            num_bytes = cache_of_requests(cfg, device_type, [at_once], settings)
        return {f"the cache of {request.slots} rollouts": num_bytes}

    device_type = choose_inference_device(cfg, source, rank_env, cache_bytes, generate_oom_hint())
    return RolloutJob(source, cfg, task_cfg, device_type, request, settings, num_prompts)


def open_rollout_prompts(
    data: DataConfig, reward: RewardConfig, source: ModelSource, request: RolloutRequest, *, reports: bool = False
) -> PromptSource:
    """Open the prompts of a job, in the order of their files. Log notes on the tokenizer if `reports`."""
    tokenizer = open_tokenizer(source, request.tokenizer, reports=reports)
    if request.task:
        problems = Problems(data, request.sampling.seed, is_validation=request.held_out)
        return TaskPrompts(problems, tokenizer, source.want)
    with spelled_as(ROLLOUT_NAMES):
        check = check_columns(data, reward)
        prompts: list[Prompt] = read_prompts(data, tokenizer, source.want, check=check, reports=reports)
    return FilePrompts(prompts, None)


def _task_config(request: RolloutRequest, source: ModelSource) -> Config:
    """Return the recipe keys of prompts and reward."""
    data = DataConfig(
        kind="task" if request.task else "prompts",
        path=tuple(request.prompts),
        skip_bad_rows=request.skip_bad_rows,
        task=request.task or "sort",
        task_size=request.task_size,
        tokenizer=request.tokenizer or source.data.tokenizer,
        chat_template=request.chat_template or source.data.chat_template,
    )
    return Config(data=data, reward=RewardConfig(use=tuple(request.reward), weights=tuple(request.reward_weight)))


def _check_options(request: RolloutRequest) -> None:
    if bool(request.prompts) == bool(request.task):
        raise ConfigError("name prompts: either --prompts FILE.jsonl, or --task sort, add or countdown")
    if request.prompts and not request.reward:
        raise ConfigError("--reward is missing: exact, number, sort, countdown, or FILE.py:FUNCTION")
    if request.task and request.skip_bad_rows:
        raise ConfigError("--skip-bad-rows has no effect with --task, whose problems are generated; leave it out")
    if request.prompts and request.held_out:
        raise ConfigError("--held-out has no effect with --prompts; name a file of other prompts")
    for name in ("samples", "max_tokens", "task_size"):
        if (value := getattr(request, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if request.count < 0:
        raise ConfigError(f"--count {request.count} must be at least 0 (0: all)")
    request.sampling.check()
    if request.sampling.temperature == 0 and request.samples > 1:
        raise ConfigError(f"--temperature 0 makes all --samples {request.samples} of a prompt equal; set --samples 1")
    check_output_path("--out", request.out, (".jsonl",))
    refuse_existing("--out", request.out, force=request.force)
