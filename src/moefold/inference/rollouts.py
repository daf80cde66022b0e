"""Scored rollouts: every rank samples its share of the prompts and scores it, and all ranks get all groups."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RewardConfig
from moefold.data.conversations.chat import end_of_turn_marker, load_chat_template
from moefold.data.prompts import Prompt, has_conversations
from moefold.data.tokenizer import Tokenizer
from moefold.inference.engine.engine import StopCondition
from moefold.inference.engine.requests import Completion, Request
from moefold.inference.sampling import SamplingParams
from moefold.inference.text_stream import has_stop_string
from moefold.rl.reward import FailedReward, Reward, check_columns
from moefold.rl.rollout import Rollout, RolloutGroup

Adjust = Callable[[NDArray[np.float64], Sequence[Rollout]], NDArray[np.float64]]
"""Returns the rewards of a group from its scores."""


RolloutKey = tuple[int, int]
"""Numbers of the prompt and of the sample."""


@dataclass(frozen=True)
class StopRule:
    """Conditions that end a rollout, in addition to the limit of tokens."""

    eos_ids: frozenset[int]
    """End-of-text tokens, and end-of-turn tokens of a conversation."""
    string: str = ""
    """Text that ends a turn of a conversation if no single token does. "": no such text."""


@dataclass(frozen=True)
class CollectedRollouts:
    """Groups of all ranks."""

    groups: list[RolloutGroup]
    """Groups in the order of the prompts."""
    failures: list[FailedReward]
    rollout_s: float
    """Seconds of sampling on the slowest rank. The job's rate is the number of all groups divided by it."""
    reward_s: float
    """Additional seconds until all ranks had the rewards."""
    shards: list[int] = field(default_factory=list)
    """Data-parallel rank that sampled each group."""
    expert_ids: dict[RolloutKey, NDArray[np.integer]] = field(default_factory=dict)
    """Experts of the rollouts that this rank sampled, as in `Completion`, if the engine records them."""


class CompletionEngine(Protocol):
    """Generator of completions: `GenerationEngine`, or a server. It is collective over the ranks of a mapping."""

    def generate(self, requests: Sequence[Request], *, is_complete: StopCondition | None = None) -> list[Completion]:
        """Return a completion of every request, in their order. See `GenerationEngine.generate`."""
        ...


class RolloutCollector:
    """Collector that samples and scores groups of rollouts on all ranks of a mapping.

    The first rank of tp and pp scores them.
    """

    def __init__(
        self,
        engine: CompletionEngine,
        reward: Reward,
        tokenizer: Tokenizer,
        groups: ParallelGroups,
        *,
        stop: StopRule,
        max_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._reward = reward
        self._tokenizer = tokenizer
        self._groups = groups
        self._stop = stop
        self._max_tokens = max_tokens
        self._shard = groups.attn.dp_cp
        self._is_scoring = groups.attn.tp.rank == 0 and groups.pp.rank == 0

    def collect(
        self,
        indices: Sequence[int],
        open_prompt: Callable[[int], Prompt],
        group_size: int,
        sampling: SamplingParams,
        adjust: Adjust = lambda scores, rollouts: scores,
    ) -> CollectedRollouts:
        """Sample and score completions. It is collective over all ranks.

        Args:
            indices: numbers of the prompts, the keys of the random numbers.
            adjust: computes rewards from scores.

        Raises:
            RunError: a reward function failed and reward.on_error stops the run.
        """
        recorder = self._groups.recorder
        started_s = self._clock()
        recorder.set_phase("sampling rollouts")
        # Every rank samples whole groups, so that the samples of a prompt share its cache.
        own_indices = np.array_split(np.asarray(indices, dtype=np.int64), self._shard.size)[self._shard.rank].tolist()
        prompts = [open_prompt(index) for index in own_indices]
        requests = self._requests(own_indices, prompts, group_size, sampling)
        completions = self._engine.generate(requests, is_complete=self._is_complete if self._stop.string else None)
        rollouts = [_to_rollout(request, completion) for request, completion in zip(requests, completions, strict=True)]
        own_s = self._clock() - started_s
        recorder.set_phase("computing rewards")
        scored = None
        if self._is_scoring:
            scored = self._score(prompts, rollouts, group_size, adjust), self._reward.pop_failures()
        gathered = current_world().all_gather_object((self._shard.rank, scored, own_s))
        rollout_s = max(seconds for _, _, seconds in gathered)
        reward_s = max(0.0, self._clock() - started_s - rollout_s)
        by_shard: dict[int, tuple[list[RolloutGroup], list[FailedReward]]] = {
            shard: groups for shard, groups, _ in gathered if groups is not None
        }
        found_groups: list[RolloutGroup] = []
        failures: list[FailedReward] = []
        shards: list[int] = []
        for shard in sorted(by_shard):
            found_groups += by_shard[shard][0]
            shards += [shard] * len(by_shard[shard][0])
            failures += by_shard[shard][1]
        expert_ids = {
            (request.prompt_number, request.sample_number): completion.expert_ids
            for request, completion in zip(requests, completions, strict=True)
            if completion.expert_ids is not None
        }
        return CollectedRollouts(found_groups, failures, rollout_s, reward_s, shards, expert_ids)

    def completion_text(self, rollout: Rollout) -> str:
        """Return the text of a rollout, without the final stop token or stop text."""
        tokens = rollout.tokens
        if rollout.finish_reason == "eos":
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens)
        return text.partition(self._stop.string)[0] if rollout.finish_reason == "stop" else text

    def _requests(
        self, indices: Sequence[int], prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams
    ) -> list[Request]:
        return [
            Request(
                prompt=prompt.ids,
                prompt_number=index,
                sample_number=number,
                max_tokens=self._max_tokens,
                eos_ids=self._stop.eos_ids,
                sampling=sampling,
            )
            for index, prompt in zip(indices, prompts, strict=True)
            for number in range(group_size)
        ]

    def _is_complete(self, number: int, tokens: Sequence[int]) -> bool:
        return has_stop_string(self._tokenizer, [self._stop.string], tokens)

    def _score(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], group_size: int, adjust: Adjust
    ) -> list[RolloutGroup]:
        groups = [tuple(rollouts[i : i + group_size]) for i in range(0, len(rollouts), group_size)]
        texts = [[self.completion_text(rollout) for rollout in group] for group in groups]
        ids = [[rollout.tokens.tolist() for rollout in group] for group in groups]
        scores = self._reward.score(prompts, texts, ids, self._groups.recorder.note_progress)
        return [
            RolloutGroup(prompt, group, score.total, adjust(score.total, group), score.by_function)
            for prompt, group, score in zip(prompts, groups, scores, strict=True)
        ]


def stop_rule(data: DataConfig, reward: RewardConfig, tokenizer: Tokenizer) -> StopRule:
    """Return the conditions that end a rollout: the end of text, and in conversations of the assistant's turn."""
    eos_ids = frozenset() if tokenizer.separator_id is None else frozenset({tokenizer.separator_id})
    if data.kind != "prompts" or not has_conversations(data, tokenizer, check_columns(data, reward)):
        return StopRule(eos_ids)
    turn_ids, marker = end_of_turn_marker(load_chat_template(data, tokenizer), tokenizer)
    return StopRule(eos_ids | turn_ids, marker)


def rollout_records(group: RolloutGroup, completion_text: Callable[[Rollout], str]) -> list[dict[str, Any]]:
    """Return one record for each rollout of a group, with TRL's columns of scored completions and the prompt's columns.

    The completion of a conversation is a list of one message.
    """
    records = []
    for i, (rollout, score, reward) in enumerate(zip(group.rollouts, group.scores, group.rewards, strict=True)):
        text = completion_text(rollout)
        is_chat = not isinstance(group.prompt.source, str)
        record = {
            "prompt": group.prompt.source,
            "completion": [{"role": "assistant", "content": text}] if is_chat else text,
            "reward": _number(score),
            "adjusted_reward": _number(reward),
            "prompt_number": rollout.prompt_number,
            "sample_number": rollout.sample_number,
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.tokens),
            "log_prob": float(rollout.log_probs.sum()),
        }
        if group.by_function:
            record["rewards"] = {name: _number(scores[i]) for name, scores in group.by_function.items()}
        records.append({**group.prompt.columns, **record})
    return records


def _number(score: float) -> float | None:
    """Return a score as a JSON value, null for NaN."""
    return None if np.isnan(score) else float(score)


def token_records(group: RolloutGroup, completion_text: Callable[[Rollout], str]) -> list[dict[str, Any]]:
    """Return the records of `rollout_records` with the ids of prompt and completion, and the sampler's log-probs."""
    return [
        {
            **record,
            "prompt_ids": rollout.prompt_ids.tolist(),
            "completion_ids": rollout.tokens.tolist(),
            "log_probs": rollout.log_probs.tolist(),
        }
        for record, rollout in zip(rollout_records(group, completion_text), group.rollouts, strict=True)
    ]


def _to_rollout(request: Request, completion: Completion) -> Rollout:
    return Rollout(
        prompt_number=request.prompt_number,
        sample_number=request.sample_number,
        prompt_ids=np.array(request.prompt, dtype=np.int64),
        tokens=np.array(completion.tokens, dtype=np.int64),
        log_probs=np.array(completion.log_probs, dtype=np.float64),
        finish_reason=completion.finish_reason,
    )
