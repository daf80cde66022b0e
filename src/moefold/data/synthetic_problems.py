"""Generated problems with known answers (data.kind="task"): sorting, addition, countdown.

A problem is a pure function of seed and number. The held-out problems are those whose prompt has a small hash, so no
prompt is in both parts, whatever the seed.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moefold.config.sections.data import DataConfig
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler
from moefold.data.tokenizer import Tokenizer
from moefold.errors import ConfigError
from moefold.integer_hash import draw_bits, hash_ints
from moefold.message_text import Problem, Setting

Draw = Callable[[int], int]
"""Returns a uniform number in [0, n)."""
MAX_COUNTDOWN_NUMBER = 20
"""Largest number. With 9 there are 1,959 problems of three numbers, which a small model memorises. With 20: 13,633."""
MAX_COUNTDOWN_TARGET = 99
_MAX_ATTEMPTS = 10_000
_HASH_RANGE = 2**32
_VALIDATION = 1


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """A prompt and the right answer to it."""

    prompt: str
    answer: str
    """A correct answer. Others may also be correct."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the reward function, by name."""


def sort_problem(draw: Draw, size: int) -> TaskProblem:
    """Draw digits to sort."""
    digits = "".join(str(draw(10)) for _ in range(size))
    answer = "".join(sorted(digits))
    return TaskProblem(f"{digits}->", answer, {"answer": answer})


def add_problem(draw: Draw, size: int) -> TaskProblem:
    """Draw two numbers of at most `size` digits to add."""
    first = draw(10**size)
    second = draw(10**size)
    return TaskProblem(f"{first}+{second}=", str(first + second), {"answer": str(first + second)})


def countdown_problem(draw: Draw, size: int) -> TaskProblem:
    """Draw numbers and a target that they reach by + - *, each used once.

    The prompt has the numbers in ascending order, so that training has no held-out problem in another order. The answer
    is one of many: random operators between the numbers in a random order.
    """
    for _ in range(_MAX_ATTEMPTS):
        shuffled = [1 + draw(MAX_COUNTDOWN_NUMBER) for _ in range(size)]
        text, target = _random_expression(draw, shuffled)
        if 0 <= target <= MAX_COUNTDOWN_TARGET:
            numbers = sorted(shuffled)
            prompt = f"{','.join(map(str, numbers))}={target}:"
            return TaskProblem(prompt, text, {"numbers": numbers, "target": target})
    raise AssertionError("some expression has a target in the range")


def _random_expression(draw: Draw, numbers: Sequence[int]) -> tuple[str, int]:
    """Combine numbers in their order by random operators, left to right. Products take parentheses around sums."""
    text = str(numbers[0])
    value = numbers[0]
    is_sum = False
    for number in numbers[1:]:
        operator = "+-*"[draw(3)]
        if operator == "*":
            text = f"({text})*{number}" if is_sum else f"{text}*{number}"
            value *= number
        else:
            text = f"{text}{operator}{number}"
            value = value + number if operator == "+" else value - number
        is_sum = operator != "*"
    return text, value


TASKS: Mapping[str, Callable[[Draw, int], TaskProblem]] = {
    "sort": sort_problem,
    "add": add_problem,
    "countdown": countdown_problem,
}
"""Generator of each data.task."""


def draw_numbers(key: int) -> Draw:
    """Return a function that draws uniform numbers from the stream of a key."""

    def words() -> Iterator[int]:
        block = 0
        while True:
            yield from draw_bits(hash_ints(key, block), 16).tolist()
            block += 1

    stream = words()
    # 64 bits modulo n < 2**32: the bias is below 2**-32.
    return lambda n: next(stream) % n


class Problems:
    """The endless problems of a task, by number."""

    def __init__(self, data: DataConfig, seed: int, *, is_validation: bool) -> None:
        """Select the training or the held-out problems, which are the same for every run.seed."""
        self._make = TASKS[data.task]
        self._size = data.task_size
        self._limit = round(data.validation_fraction * _HASH_RANGE)
        self._key = hash_ints(0, _VALIDATION) if is_validation else hash_ints(seed)
        self._is_validation = is_validation

    def problem(self, number: int) -> TaskProblem:
        """Return a problem. Raises ConfigError if the task has too few problems to hold some out."""
        for attempt in range(_MAX_ATTEMPTS):
            problem = self._make(draw_numbers(hash_ints(self._key, number, attempt)), self._size)
            digest = hashlib.sha256(problem.prompt.encode()).digest()
            if (int.from_bytes(digest[:4], "little") < self._limit) == self._is_validation:
                return problem
        split = "held-out" if self._is_validation else "training"
        raise ConfigError(
            f"data.validation_fraction={self._limit / _HASH_RANGE:g} leaves no {split} problem of this "
            f"{Setting('data.task_size')}; choose a larger task_size, or another fraction"
        )


NUM_SAMPLES = 2**40
"""Samples of a task, practically without limit."""
_PROBLEMS_A_SAMPLE = 2**20


class TaskSampler(Sampler):
    """Samples of problems with their answers, packed for supervised fine-tuning with the loss on the answers."""

    has_annotations = True

    def __init__(
        self, problems: Problems, tokenizer: Tokenizer, *, seq_len: int, num_samples: int = NUM_SAMPLES
    ) -> None:
        self.seq_len = seq_len
        self._problems = problems
        self._tokenizer = tokenizer
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def annotated_sample(self, index: int) -> Sample:
        """Return a sample of as many whole problems as fit. The rest is padding."""
        size = self.seq_len + 1
        end_id = self._tokenizer.separator_id
        assert end_id is not None, "checked before the run"
        tokens = np.full(size, end_id, dtype=np.int64)
        documents = np.zeros(size, dtype=np.int32)
        is_target = np.zeros(size, dtype=np.bool_)
        start = 0
        for document in range(_PROBLEMS_A_SAMPLE):
            documents[start:] = document
            problem = self._problems.problem(index % self._num_samples * _PROBLEMS_A_SAMPLE + document)
            prompt, answer = self._tokenizer.encode_batch([problem.prompt, problem.answer])
            stop = start + len(prompt) + len(answer) + 1
            if stop > size:
                break
            tokens[start : stop - 1] = np.concatenate((prompt, answer))
            is_target[start + len(prompt) : stop] = True
            start = stop
        return Sample(tokens, documents, is_target[1:], is_padding=np.arange(size) >= start)

    def origin(self, index: int) -> str:
        """Return the number of the sample's first problem."""
        return f"sample {index} of problems"


def open_task(
    data: DataConfig, tokenizer: Tokenizer, *, seq_len: int, seed: int
) -> tuple[TaskSampler, TaskSampler | None]:
    """Open the training samples of a task for supervised fine-tuning, and the validation samples or None.

    Raises:
        ConfigError: the tokenizer has no end-of-text token, or a problem does not fit into a sample.
    """
    check_task_tokenizer(data, tokenizer)
    training = TaskSampler(Problems(data, seed, is_validation=False), tokenizer, seq_len=seq_len)
    if not training.annotated_sample(0).weights.any():  # type: ignore[union-attr]
        raise ConfigError(
            f"train.seq_len={seq_len} is shorter than a problem of {Setting('data.task', data.task)}; raise it"
        )
    if data.validation_fraction == 0:
        return training, None
    return training, TaskSampler(Problems(data, seed, is_validation=True), tokenizer, seq_len=seq_len)


def check_task_tokenizer(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a tokenizer has no end-of-text token, which ends answers."""
    if tokenizer.separator_id is None:
        rule = "has no end-of-text token, so no answer would ever end"
        raise ConfigError(Problem("data.tokenizer", data.tokenizer, rule, "name a tokenizer with one, or 'bytes'"))
