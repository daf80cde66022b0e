"""A rule between sections is called with the sections that its signature names."""

import inspect
from itertools import chain
from typing import get_type_hints

import pytest

from moefold.config.base.part_registry import built_in_kinds, find_part, groups
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.planner.search.constraints import MAPPING_RULES
from moefold.validate.config import RULES
from moefold.validate.moe import TRAINING_ONLY_RULES

EVERY_RULE = [*RULES, *TRAINING_ONLY_RULES, *chain.from_iterable(MAPPING_RULES.values())]
SECTIONS = get_type_hints(Config) | {"cfg": Config}
CHECKS = [find_part(group.group, kind).check for group in groups() for kind in built_in_kinds(group.group)]


def test_the_check_of_a_part_names_the_sections_that_it_reads():
    whole = {"self": None, "recipe": None, "args": None, "kwargs": None}
    names = {name for check in CHECKS for name in inspect.signature(check).parameters}
    assert names <= SECTIONS.keys() | whole.keys()


def test_a_part_is_asked_with_its_sections():
    part = find_part("schedule", "csv")(path="")
    assert list(apply_rule(part.check, Config())) == list(part.check(ParallelConfig())) != []


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: getattr(rule, "func", rule).__name__)
def test_a_rule_names_the_sections_that_it_reads(rule):
    hints = get_type_hints(getattr(rule, "func", rule))
    parameters = inspect.signature(rule).parameters.values()
    read = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    assert {name: hints[name] for name in read} == {name: SECTIONS[name] for name in read}


def test_a_rule_is_called_with_its_sections_in_its_own_order():
    cfg = Config()
    seen = []

    def rule(train, model, limit=3):
        seen.append((train, model, limit))
        return iter(["message"])

    assert list(apply_rule(rule, cfg)) == ["message"]
    assert seen == [(cfg.train, cfg.model, 3)]
