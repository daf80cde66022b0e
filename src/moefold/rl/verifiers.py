"""Verifiers: reward functions that compare a completion with the columns of its prompt.

Each has TRL's signature, `f(prompts, completions, **columns) -> list[float]`, and returns 1.0 for a correct completion,
else 0.0. Expressions are parsed and never executed.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
"""Text, or messages of a conversation."""
RewardFunction = Callable[..., Sequence[float | None]]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_EXPRESSION = re.compile(r"[\d\s+\-*/()]+")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_EXPRESSION_CHARACTERS = 1000
"""Maximum length of an expression, because its evaluation is recursive. A longer expression is wrong."""
_MAX_DEPTH = 50
MAX_NUMBER_CHARACTERS = 1000
"""Maximum length of a number. A longer number is wrong. Python converts at most 4300 digits, which a policy that
repeats itself may exceed."""


def text_of(completion: Completion) -> str:
    """Return the text of a completion, for a conversation of its last message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"]) if completion else ""


def exact(prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1.0 if the completion, without surrounding whitespace, is equal to the column `answer`."""
    return [
        float(text_of(completion).strip() == str(target).strip())
        for completion, target in zip(completions, answer, strict=True)
    ]


def number(prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1.0 if the last numbers of the completion and of the column `answer` are equal."""
    rewards = []
    for completion, target in zip(completions, answer, strict=True):
        last = last_number(text_of(completion))
        rewards.append(float(last is not None and last == last_number(str(target))))
    return rewards


def sort(prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return the fraction of correct positions of the column `answer`, or 0.0 for another length."""
    rewards = []
    for completion, target in zip(completions, answer, strict=True):
        text = text_of(completion)
        same = sum(left == right for left, right in zip(text, str(target), strict=False))
        rewards.append(same / len(target) if len(text) == len(target) and target else 0.0)
    return rewards


def countdown(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **_: Any,
) -> list[float]:
    """Return 1.0 if the completion is an expression of exactly the column `numbers` with the value `target`."""
    rewards = []
    for completion, allowed, value in zip(completions, numbers, target, strict=True):
        parsed = evaluate(text_of(completion))
        is_right = parsed is not None and parsed[0] == value and Counter(parsed[1]) == Counter(allowed)
        rewards.append(float(is_right))
    return rewards


VERIFIERS: Mapping[str, RewardFunction] = {"exact": exact, "number": number, "sort": sort, "countdown": countdown}
"""Built-in values of reward.use."""
REQUIRED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "exact": ("answer",),
    "number": ("answer",),
    "sort": ("answer",),
    "countdown": ("numbers", "target"),
}
"""Columns of the prompts that each verifier reads."""


def column_problem(verifier: str, column: str, value: Any) -> str:
    """Return the violated rule of a value of a column for which every reward would be 0, or empty if there is none."""
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
"""Verifier of each data.task."""


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly, without commas between digits.

    None if there is no number, or it is longer than MAX_NUMBER_CHARACTERS.
    """
    matches = _NUMBER.findall(text)
    if not matches or len(matches[-1]) > MAX_NUMBER_CHARACTERS:
        return None
    return Fraction(matches[-1].replace(",", "").rstrip("."))


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Evaluate an expression of whole numbers, + - * / and parentheses, and return the value, and its numbers in order.

    None if the text is not such an expression, or divides by zero.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS or not _EXPRESSION.fullmatch(text):
        return None
    if max(accumulate((character == "(") - (character == ")") for character in text)) > _MAX_DEPTH:
        return None
    # Python's own numbers have no leading zeros.
    plain = re.sub(r"\d+", lambda match: str(int(match[0])), " ".join(text.split()))
    numbers: list[int] = []
    try:
        return _value(ast.parse(plain, mode="eval").body, numbers), numbers
    except (SyntaxError, KeyError, RecursionError, ZeroDivisionError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """Return the exact value of a parsed expression, and append its numbers. Raise KeyError for other syntax."""
    if isinstance(node, ast.BinOp):
        left = _value(node.left, numbers)
        return _OPERATORS[type(node.op)](left, _value(node.right, numbers))
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int):
        raise KeyError(type(node))
    numbers.append(node.value)
    return Fraction(node.value)
