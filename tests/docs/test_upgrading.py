"""The page for users of 0.1.0: it runs as it is written, and its table equals the table of the upgrade."""

import re
import sys
from pathlib import Path

import pytest

from moefold.config.upgrade.moved_keys import MOVED
from tests.docs.markdown_page import ROOT
from tests.docs.tutorial_run import lines_not_printed, run_tutorial

PAGE = ROOT / "docs/upgrading.md"


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path):
    printed = run_tutorial(PAGE, tmp_path, Path(sys.executable).parent)
    assert lines_not_printed(PAGE, printed) == []


def test_old_keys_have_the_new_names_of_the_page():
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `([\w.]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 20
    assert rows == [(old, str(MOVED[old])) for old, _ in rows]
