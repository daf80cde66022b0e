"""Suggestions in refusals: near numbers, near multiples, and the kinds that a key takes."""

import pytest

from moefold.config.base.part import KindOf
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.suggestions import (
    annotation_at,
    group_at,
    join_with_or,
    key_types,
    kind_settings,
    nearest_multiples,
    nearest_numbers,
    part_keys,
    sections,
    tables,
)


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


def test_a_path_has_the_mark_that_the_list_of_all_kinds_gives_it():
    """Asked for one path, which imports few kinds, or read off every kind."""
    keys = [f"{section}.{key}" for section in sections() for key in key_types(section)]
    unknown = ["", "model", "nothing.at.all", "train.optimizer.nothing", "model.hidden_size.kind", "model.ffn.moe.x.y"]
    for path in (*keys, *kind_settings(), *unknown):
        assert annotation_at(path) == tables().get(path), path
        assert group_at(path) == part_keys().get(path), path


@pytest.mark.parametrize("mark", sorted(mark for mark in set(tables().values()) if isinstance(mark, KindOf)))
def test_a_key_takes_the_kinds_that_it_lists(mark):
    built_in = built_in_kinds(mark.group)
    assert {kind for kind in built_in if mark.takes(kind)} == {*(mark.kinds or built_in)}
    assert not mark.takes("no kind of any group")
