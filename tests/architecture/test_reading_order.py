"""The reading order of docs/architecture.md: its files exist, stand there once, and are a weekend's work."""

import re

from tests.architecture import rules

PAGE = rules.ROOT / "docs" / "architecture.md"
MOST_LINES = 10_000


def test_the_reading_order_is_a_weekend_of_files_that_exist():
    section = PAGE.read_text().split("## Reading order\n")[1].split("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", section)
    assert len(files) > 30
    assert sorted(set(files)) == sorted(files)
    assert sum(len((rules.SOURCE / name).read_text().splitlines()) for name in files) <= MOST_LINES
