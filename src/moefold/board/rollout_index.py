"""Index of rollouts.jsonl: the numbers of every rollout are in memory, texts are read when they are shown.

Texts are untrusted bytes of prompts and models: they are returned as plain strings that readers must not interpret.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.board.json_tail import JsonTail
from moefold.metrics.reader import finite_number, is_step
from moefold.metrics.writer import ROLLOUTS_FILE
from moefold.units import MIB

MAX_SEARCH_BYTES = 32 * MIB
"""Maximum bytes of rollouts per search. The answer has the start of the next search."""
MAX_TEXT_CHARS = 20_000
"""Maximum returned characters of a text. The others are only counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutQuery:
    """Selection of rollouts, newest first."""

    text: str = ""
    """Text that the prompt or the completion contains, ignoring case. Empty means any text."""
    step: int | None = None
    """Step of training. None means all steps."""
    min_reward: float | None = None
    max_reward: float | None = None
    before: int | None = None
    """Number of a rollout: only earlier rollouts are read. None means start at the newest."""
    limit: int = 20
    """Maximum rollouts in the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPage:
    """Answer to a query."""

    rollouts: list[dict[str, Any]]
    before: int | None
    """`before` of the next query, or None at the oldest rollout."""
    total: int
    """Number of rollouts in the file."""


class RolloutIndex:
    """Positions, steps and rewards of the rollouts of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.tail = JsonTail(run_dir / ROLLOUTS_FILE)
        self._generation = 0
        self._clear()

    def _clear(self) -> None:
        self._offsets = array("q")
        self._lengths = array("q")
        self._steps = array("q")
        self._rewards = array("d")

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self) -> None:
        """Read the new rollouts."""
        lines = self.tail.read()
        if self.tail.generation != self._generation:
            self._generation = self.tail.generation
            self._clear()
        for line in lines:
            step = line.record.get("step")
            self._offsets.append(line.offset)
            self._lengths.append(line.length)
            self._steps.append(step if is_step(step) else -1)
            self._rewards.append(finite_number(line.record.get("reward")))

    def find(self, query: RolloutQuery) -> RolloutPage:
        """Return the rollouts of a query, newest first. At most `MAX_SEARCH_BYTES` are read."""
        matches: list[dict[str, Any]] = []
        num_bytes = 0
        next_before: int | None = None
        for i in self._candidates(query):
            if len(matches) >= query.limit or num_bytes >= MAX_SEARCH_BYTES:
                next_before = i + 1
                break
            length = self._lengths[i]
            num_bytes += length
            record = self.tail.read_line(self._offsets[i], length)
            if record is None:
                continue
            rollout = shown_rollout(i, record)
            searched = "\n".join(message["text"] for message in (*rollout["prompt"], *rollout["completion"]))
            if query.text.casefold() in searched.casefold():
                matches.append(rollout)
        return RolloutPage(rollouts=matches, before=next_before, total=len(self))

    def _candidates(self, query: RolloutQuery) -> Iterator[int]:
        start = len(self) if query.before is None else max(0, min(query.before, len(self)))
        for i in range(start - 1, -1, -1):
            reward = self._rewards[i]
            if query.step is not None and self._steps[i] != query.step:
                continue
            # A rollout without a reward satisfies no limit.
            if query.min_reward is not None and not reward >= query.min_reward:
                continue
            if query.max_reward is not None and not reward <= query.max_reward:
                continue
            yield i


def shown_rollout(number: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rollout for the board. Values of unexpected types become texts or None."""
    numbers = {
        key: None if (value := finite_number(record.get(key))) != value else value
        for key in ("step", "reward", "adjusted_reward", "prompt_number", "sample_number", "tokens", "log_prob")
    }
    return {
        "number": number,
        **numbers,
        "finish_reason": str(record.get("finish_reason", ""))[:100],
        "prompt": _messages(record.get("prompt")),
        "completion": _messages(record.get("completion")),
    }


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the turns of a conversation, or a plain text as one turn of an empty role."""
    shown = []
    for turn in value if isinstance(value, list) else [value]:
        role, content = (turn.get("role", ""), turn.get("content")) if isinstance(turn, dict) else ("", turn)
        text = "" if content is None else str(content)
        left_out = max(0, len(text) - MAX_TEXT_CHARS)
        shown.append({"role": str(role)[:100], "text": text[:MAX_TEXT_CHARS], "left_out": left_out})
    return shown
