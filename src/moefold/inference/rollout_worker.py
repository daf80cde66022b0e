"""Worker of `moefold rollout`: samples and scores completions on each rank, and writes them on the first."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TextIO

import numpy as np

from moefold.host.rank_env import RankEnv
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.load import joined_job, load_model, report_decoding
from moefold.inference.rollout_job import ROLLOUT_NAMES, RolloutJob, open_rollout_prompts
from moefold.inference.rollouts import RolloutCollector, rollout_records, stop_rule
from moefold.inference.settings import generate_oom_hint
from moefold.inference.text import open_tokenizer
from moefold.message_text import spelled_as
from moefold.rl.reward import Reward
from moefold.rl.rollout import RolloutGroup
from moefold.rl.round_statistics import mean_rewards

ROUNDS_OF_SLOTS = 8
"""Rollouts that are sampled before scoring and writing, as a multiple of the slots of all ranks."""


def rollout_worker(job: RolloutJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the job, sample, and write rollouts and summary on the first rank. Return the exit status."""
    with joined_job(rank_env, device_type, generate_oom_hint()) as device, spelled_as(ROLLOUT_NAMES):
        request, task = job.request, job.task_cfg
        tokenizer = open_tokenizer(job.source, request.tokenizer)
        prompts = open_rollout_prompts(job.task_cfg.data, job.task_cfg.reward, job.source, request)
        loaded = load_model(job.source, job.cfg, device, tokenizer)
        report_decoding(loaded, job.cfg.run)
        summary = RolloutSummary(request.samples)
        is_first = rank_env.rank == 0
        with (
            Reward(task.data, task.faults, task.reward, num_ranks=task.num_job_ranks) as reward,
            request.out.open("w", encoding="utf-8") if is_first else nullcontext() as file,
        ):
            collector = RolloutCollector(
                GenerationEngine(loaded.model, job.settings, request.sampling),
                reward,
                tokenizer,
                loaded.model.groups,
                stop=stop_rule(job.task_cfg.data, job.task_cfg.reward, tokenizer),
                max_tokens=request.max_tokens,
            )
            shards = loaded.model.groups.attn.dp_cp.size
            at_once = max(shards, ROUNDS_OF_SLOTS * job.settings.slots * shards // request.samples)
            for first in range(0, job.num_prompts, at_once):
                indices = range(first, min(first + at_once, job.num_prompts))
                collected = collector.collect(indices, prompts.prompt, request.samples, request.sampling)
                summary.add(collected.groups, collected.rollout_s)
                if file is not None:
                    _write(file, collected.groups, collector)
        if is_first:
            print(json.dumps(summary.record()))
    return 0


def _write(file: TextIO, groups: Sequence[RolloutGroup], collector: RolloutCollector) -> None:
    for group in groups:
        for record in rollout_records(group, collector.completion_text):
            # Rewards are not adjusted here.
            del record["adjusted_reward"]
            file.write(json.dumps(record) + "\n")


class RolloutSummary:
    """Means over all rollouts, and the probability that at least one of k rollouts is right."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._scores: list[np.ndarray] = []
        self._scores_by_function: list[Mapping[str, np.ndarray]] = []
        self._num_tokens = 0
        self._num_truncated = 0
        self._rollout_s = 0.0

    def add(self, groups: Sequence[RolloutGroup], rollout_s: float) -> None:
        """Add the groups of all ranks."""
        self._rollout_s += rollout_s
        for group in groups:
            self._scores.append(group.scores)
            self._scores_by_function.append(group.by_function)
            self._num_tokens += sum(len(rollout.tokens) for rollout in group.rollouts)
            self._num_truncated += sum(rollout.is_truncated for rollout in group.rollouts)

    def record(self) -> dict[str, object]:
        """Return the summary as JSON values. A rollout is right if its reward is at least 1."""
        scores_PG = np.stack(self._scores)
        scored = scores_PG[~np.isnan(scores_PG)]
        right_P = (scores_PG >= 1).sum(1)
        sizes = [2**i for i in range(self._samples.bit_length()) if 2**i <= self._samples]
        return {
            "prompts": len(scores_PG),
            "rollouts": scores_PG.size,
            "reward": float(scored.mean()) if scored.size else None,
            "reward_std": float(scored.std()) if scored.size else None,
            "rewards": mean_rewards(self._scores_by_function),
            "pass_at": {str(k): pass_at_k(right_P, self._samples, k) for k in sizes},
            "truncated": self._num_truncated / scores_PG.size,
            "tokens": self._num_tokens,
            "rollout_s": self._rollout_s,
        }


def pass_at_k(right_P: np.ndarray, samples: int, k: int) -> float:
    """Return the mean probability that k of a prompt's samples include a right one (arXiv:2107.03374 sec. 2.1).

    right_P counts the right samples of each prompt, [P]. The k samples are drawn without replacement.
    """
    wrong_P = samples - right_P
    missed_P = np.ones(len(right_P))
    for i in range(k):
        missed_P *= np.maximum(wrong_P - i, 0) / (samples - i)
    return float(1 - missed_P.mean())
