"""Verifiers parse arithmetic exactly, refuse other text, and find the last number."""

from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.config.sections.data import DataConfig
from moefold.data.synthetic_problems import Problems
from moefold.rl.verifiers import REQUIRED_COLUMNS, TASK_VERIFIERS, VERIFIERS, evaluate, last_number


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("3+4*2", 11, [3, 4, 2]),
        ("(3+4)*2", 14, [3, 4, 2]),
        (" 9 - 4 - 3 ", 2, [9, 4, 3]),
        ("8/4/2", 1, [8, 4, 2]),
        ("1/3", Fraction(1, 3), [1, 3]),
        ("((7))", 7, [7]),
    ],
)
def test_expressions_are_evaluated_exactly(text, value, numbers):
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text", ["", "3+", "+3", "-3", "3 4", "(3", "3)", "3**4", "2e3", "__import__('os')", "4/(2-2)", "3+x", "(" * 500]
)
def test_text_that_is_not_an_expression_is_refused(text):
    assert evaluate(text) is None


@given(st.text("0123456789+-*/() ", max_size=40))
def test_any_text_is_parsed_as_python_parses_it(text):
    parsed = evaluate(text)
    if parsed is not None:
        numbers = [Fraction(number) for number in parsed[1]]
        names = iter(numbers)
        # Python's own parser, on the same text with the numbers replaced by exact fractions.
        import re

        code = re.sub(r"\d+", "next_number()", text.strip())
        assert eval(code, {"next_number": lambda: next(names)}) == parsed[0]


def test_the_last_number_of_a_text_is_found():
    assert last_number("so 1,234.50 of 7.") == 7
    assert last_number("it is -3.5") == Fraction(-7, 2)
    assert last_number("none") is None


@pytest.mark.parametrize("text", ["9" * 5000, "1." + "9" * 5000, "1," * 5000 + "1"])
def test_a_number_of_endless_digits_is_wrong(text):
    assert VERIFIERS["number"]([""], [text], answer=["9"]) == [0.0]


@pytest.mark.parametrize("task", ["sort", "add", "countdown"])
def test_the_answer_of_a_task_is_verified_and_a_wrong_one_is_not(task):
    problems = Problems(DataConfig(kind="task", task=task), seed=1, is_validation=False)
    verifier = VERIFIERS[TASK_VERIFIERS[task]]
    for number in range(50):
        problem = problems.problem(number)
        assert set(REQUIRED_COLUMNS[TASK_VERIFIERS[task]]) <= set(problem.columns)
        columns = {name: [value] * 2 for name, value in problem.columns.items()}
        assert verifier([problem.prompt] * 2, [problem.answer, problem.answer + "+1"], **columns) == [1.0, 0.0]


def test_countdown_agrees_with_a_search_over_all_expressions():
    numbers = [2, 3, 7]
    reachable = set()
    for order, operators in product(set(permutations(numbers)), product("+-*", repeat=2)):
        a, b, c = order
        first, second = operators
        for text in (f"({a}{first}{b}){second}{c}", f"{a}{first}({b}{second}{c})"):
            parsed = evaluate(text)
            assert parsed is not None
            reachable.add(int(parsed[0]))
            verdict = VERIFIERS["countdown"]([""], [text], numbers=[numbers], target=[eval(text)])
            assert verdict == [1.0]
    assert VERIFIERS["countdown"]([""], ["2+3"], numbers=[numbers], target=[5]) == [0.0]
    assert VERIFIERS["countdown"]([""], ["2+3+7+0"], numbers=[numbers], target=[12]) == [0.0]
    assert 42 in reachable


def test_sort_gives_partial_rewards():
    assert VERIFIERS["sort"]([""] * 3, ["1234", "1243", "123"], answer=["1234"] * 3) == [1.0, 0.5, 0.0]


def test_messages_are_verified_by_their_last_text():
    assert VERIFIERS["exact"]([""], [[{"role": "assistant", "content": " 7 "}]], answer=[7]) == [1.0]
