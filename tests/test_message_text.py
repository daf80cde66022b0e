"""Text of messages: near numbers, near multiples, and choices."""

import pytest

from moefold.message_text import join_with_or, nearest_multiples, nearest_numbers


@pytest.mark.parametrize(
    ("value", "legal", "count", "words"),
    [
        (3, [1, 2, 4, 8], 6, "1, 2, 4 or 8"),
        (100, range(1, 200, 2), 6, "95, 97, 99, 101, 103 or 105"),
        (7, [5], 6, "5"),
        (6, [12, 3, 3], 6, "3 or 12"),
        (5, [1, 4, 6, 9], 2, "4 or 6"),
    ],
)
def test_nearest_numbers_are_ascending_and_few(value, legal, count, words):
    assert nearest_numbers(value, legal, count) == words


@pytest.mark.parametrize(("value", "step", "words"), [(250, 4, "248 or 252"), (3, 8, "8"), (9, 8, "8 or 16")])
def test_nearest_multiples_are_positive(value, step, words):
    assert nearest_multiples(value, step) == words


def test_words_as_a_choice():
    assert [join_with_or(["a"]), join_with_or(["a", "b"]), join_with_or(["a", "b", "c"])] == [
        "a",
        "a or b",
        "a, b or c",
    ]
