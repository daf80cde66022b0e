"""Verifiers: reward functions that compare a completion with the columns of its prompt. Pure and torch-free.

Each has TRL's signature, `f(prompts, completions, **columns) -> list[float]`, and returns 1.0 for a correct completion
and 0.0 for another. Expressions are parsed by a grammar and never executed.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""
RewardFunction = Callable[..., Sequence[float | None]]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")
MAX_EXPRESSION_CHARACTERS = 1000
"""A longer expression is wrong: the parser recurses."""
_MAX_DEPTH = 50
MAX_NUMBER_CHARACTERS = 1000
"""A longer number is wrong: Python converts at most 4300 digits, which a policy that repeats itself exceeds."""


def text_of(completion: Completion) -> str:
    """Return the text of a completion, of the last message in a conversation."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"]) if completion else ""


def exact(prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1.0 where the completion, without surrounding whitespace, is the column `answer`."""
    return [
        float(text_of(completion).strip() == str(wanted).strip())
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def number(prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1.0 where the last number of the completion equals the last number of the column `answer`."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        found = last_number(text_of(completion))
        rewards.append(float(found is not None and found == last_number(str(wanted))))
    return rewards


def sort(prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return the fraction of positions of the column `answer` that are right; 0.0 for another length."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = text_of(completion)
        same = sum(left == right for left, right in zip(text, str(wanted), strict=False))
        rewards.append(same / len(wanted) if len(text) == len(wanted) and wanted else 0.0)
    return rewards


def countdown(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **_: Any,
) -> list[float]:
    """Return 1.0 where the completion is an expression of exactly the column `numbers` with the value `target`."""
    rewards = []
    for completion, given, wanted in zip(completions, numbers, target, strict=True):
        parsed = evaluate(text_of(completion))
        is_right = parsed is not None and parsed[0] == wanted and Counter(parsed[1]) == Counter(given)
        rewards.append(float(is_right))
    return rewards


VERIFIERS: Mapping[str, RewardFunction] = {"exact": exact, "number": number, "sort": sort, "countdown": countdown}
"""The built-in values of reward.use."""
REQUIRED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "exact": ("answer",),
    "number": ("answer",),
    "sort": ("answer",),
    "countdown": ("numbers", "target"),
}
"""Columns of the prompts that each verifier reads."""


def column_fault(verifier: str, column: str, value: Any) -> str:
    """Return the rule that a value of a column breaks, with which every reward would be 0; empty if it breaks none."""
    if value is None:
        return "must not be null"
    if verifier == "number" and last_number(str(value)) is None:
        return "must have a number"
    if column == "target" and type(value) is not int:
        return "must be a whole number"
    if column == "numbers" and not (isinstance(value, list) and all(type(number) is int for number in value)):
        return "must be a list of whole numbers"
    return ""


TASK_VERIFIERS: Mapping[str, str] = {"sort": "exact", "add": "number", "countdown": "countdown"}
"""The verifier of each data.task."""


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; commas between digits are dropped.

    Returns:
        The number; None if there is none, or if it is longer than MAX_NUMBER_CHARACTERS.
    """
    found = _NUMBER.findall(text)
    if not found or len(found[-1]) > MAX_NUMBER_CHARACTERS:
        return None
    return Fraction(found[-1].replace(",", "").rstrip("."))


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Evaluate an expression of whole numbers, + - * / and parentheses.

    Returns:
        The value, and the numbers in their order; None if the text is no such expression, or divides by zero.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        return None
    tokens = []
    place = 0
    text = text.strip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        tokens.append(match[1])
        place = match.end()
    try:
        parser = _Parser(tokens)
        value = parser.sum(0)
    except (_SyntaxError, ZeroDivisionError):
        return None
    return (value, parser.numbers) if parser.is_at_end else None


class _SyntaxError(Exception):
    """The tokens are no expression."""


class _Parser:
    """Recursive descent: sum = product (+|- product)*, product = factor (*|/ factor)*, factor = number | (sum)."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self.numbers: list[int] = []

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._tokens)

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (operator := self._take("+-")) is not None:
            term = self._product(depth)
            value = value + term if operator == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while (operator := self._take("*/")) is not None:
            factor = self._factor(depth)
            value = value * factor if operator == "*" else value / factor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH or self.is_at_end:
            raise _SyntaxError
        if self._take("(") is not None:
            value = self.sum(depth + 1)
            if self._take(")") is None:
                raise _SyntaxError
            return value
        token = self._tokens[self._place]
        if not token.isdecimal():
            raise _SyntaxError
        self._place += 1
        self.numbers.append(int(token))
        return Fraction(int(token))

    def _take(self, options: str) -> str | None:
        """Consume the next token if it is one of some characters."""
        if self.is_at_end or self._tokens[self._place] not in options:
            return None
        self._place += 1
        return self._tokens[self._place - 1]
