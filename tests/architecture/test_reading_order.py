"""The reading order of docs/architecture.md: its files exist, stand there once, and are a weekend's work."""

import re
from collections import Counter

from tests.architecture import rules
from tests.architecture.imports import imports

PAGE = rules.ROOT / "docs" / "architecture.md"
MOST_LINES = 10_000
MOST_IMPORTERS = 6


def files_of_the_page() -> list[str]:
    """Return the files of the reading order, relative to the package."""
    section = PAGE.read_text().split("## Reading order\n")[1].split("\n## ")[0]
    return re.findall(r"`([\w/]+\.py)`", section)


def test_the_reading_order_is_a_weekend_of_files_that_exist():
    files = files_of_the_page()
    assert len(files) > 30
    assert sorted(set(files)) == sorted(files)
    assert sum(len((rules.SOURCE / name).read_text().splitlines()) for name in files) <= MOST_LINES


def test_a_module_that_many_listed_files_import_is_listed_too():
    listed = {name.removesuffix(".py").replace("/", ".") for name in files_of_the_page()}
    pairs = {(one.importer, one.imported) for one in imports(rules.SOURCE)}
    importers = Counter(imported for importer, imported in pairs if importer in listed and imported not in listed)
    assert importers
    assert {name: count for name, count in importers.items() if count >= MOST_IMPORTERS} == {}
