"""Suggestions in refusals: the kinds that a key takes."""

import pytest

from moefold.config.base.part import KindOf
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.keys.paths import annotation_at, group_at, key_types, kind_settings, part_keys, sections, tables


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
