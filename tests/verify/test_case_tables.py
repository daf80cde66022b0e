"""Fast cases cover every feature, each pair of axes and each kind of setting of all cases."""

import re
from itertools import combinations

from moefold.config.base.part import Part
from moefold.config.keys.paths import default_of, flat_settings, sections, tables
from tests.verify import same_bits_cases
from tests.verify.cases import AXES, Settings, axes_of
from tests.verify.oracle_cases import ORACLE_CASES
from tests.verify.routing_cases import KINDS

CASES = [*ORACLE_CASES, *same_bits_cases.CASES]
FAST = [case for case in CASES if not case.is_slow]
ONLY_SLOW = {
    "mapping of 8 ranks",
    "mapping of 16 ranks",
    "zero level",
    "schedule",
    "schedule with plain",
    "schedule with recompute",
    "schedule with offload",
    "llama 4",
    "zero experts",
    "offload under a schedule from a file",
    "offload of routing",
}
"""Wide cases of features that fast cases of other names have."""
FREE_TEXTS = ("pipeline_layout", "order", "moe_order", "schedule_csv")


def _kind_of(value: object) -> object:
    return value.kind if isinstance(value, Part) else value


def _default(section: str, key: str) -> object:
    """Return the default of a key, or of a setting of a table, with a part as its kind."""
    if "." in key:
        return _kind_of(default_of(section, key))
    return _kind_of(getattr(sections()[section](), key, None))


def _kinds(settings: Settings) -> set[tuple[str, object]]:
    """Return the settings that choose one of several kinds and are not defaults: words, switches, tables, layers."""
    of_sections = {"parallel": settings, **{name: settings.get(name, {}) for name in ("model", "moe", "train")}}
    found = set()
    for section, keys in of_sections.items():
        given = {f"{section}.{key}": _kind_of(value) for key, value in keys.items()}
        found |= {(name, "a table") for name, value in given.items() if name in tables() and isinstance(value, dict)}
        for name, value in flat_settings(given).items():
            key = name.partition(".")[2]
            is_kind = isinstance(value, str | bool) and key not in FREE_TEXTS
            if key.startswith("layers."):
                # Words of a column of the layers; numbers repeat a word.
                found |= {(name, word) for word in re.findall("[a-z]+", str(value))}
            elif is_kind and str(value) != str(_default(section, key)):
                found.add((name, value))
    return found


def test_every_feature_has_a_fast_case():
    assert {case.feature for case in CASES} - {case.feature for case in FAST} == ONLY_SLOW


def test_fast_cases_combine_each_pair_of_axes():
    found = {pair for case in FAST if case in ORACLE_CASES for pair in combinations(axes_of(case.settings), 2)}
    assert found == set(combinations(AXES, 2))


def test_fast_cases_have_every_kind_of_setting():
    every = {kind for case in CASES for kind in _kinds(case.settings)}
    fast = {kind for case in FAST for kind in _kinds(case.settings)}
    routing = {kind for model, moe in KINDS.values() for kind in _kinds({"model": model, "moe": moe})}
    assert every - fast - routing == set()


def test_no_case_is_listed_twice():
    for cases in (ORACLE_CASES, same_bits_cases.CASES):
        assert [case for i, case in enumerate(cases) if case in cases[:i]] == []
