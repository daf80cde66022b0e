"""Tutorials: each runs from start to end in an empty folder and prints the output on its page."""

import sys
from pathlib import Path

import pytest

from tests.docs.markdown_page import ROOT, Block, blocks
from tests.docs.tutorial_run import lines_not_printed, outputs, run_tutorial, script_of

TUTORIALS = [page for page in sorted((ROOT / "docs/tutorials").glob("*.md")) if page.name != "index.md"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_tutorial_runs_as_it_is_written(page, tmp_path):
    printed = run_tutorial(page, tmp_path, Path(sys.executable).parent)
    assert lines_not_printed(page, printed) == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_has_commands_and_shows_outputs(page):
    assert outputs(page)
    assert len([block for block in blocks(page) if block.language == "sh"]) >= 3
    assert not any(block.not_run for block in blocks(page))
    assert f"]({page.name})" in (page.parent / "index.md").read_text()


def test_a_line_that_was_not_printed_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```text\nstep  9/60  loss  7.25  lr 1.00e-04\nother 1\n  rank 2: step 21, forward of one\n"
        "equal: all 749 numbers\n#1  folded  tp1 pp2x8  2.88  11,400\ndone in 0.19 s\n#1  folded  tp1 pp4  2.8\n```\n"
    )
    printed = (
        "step 9/60  loss  2.5  lr 1.00e-04  0:10 left\n  rank 2: step 22, backward of another\n"
        "equal: all 748 numbers\n#1  folded  tp1 pp2x8  2.91  11,300\ndone in 1.2 s\n"
    )
    assert lines_not_printed(page, printed) == ["other 1", "equal: all 749 numbers", "#1  folded  tp1 pp4  2.8"]


def test_a_command_that_fails_fails_the_tutorial(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- exit status 3 -->\n```sh\nexit 3\n```\n\n<!-- file: a.txt -->\n```text\nb\n```\n")
    assert run_tutorial(page, tmp_path, tmp_path) == ""
    assert (tmp_path / "a.txt").read_text() == "b\n"
    page.write_text("```sh\nexit 3\n```\n")
    assert isinstance(blocks(page)[0], Block)
    with pytest.raises(AssertionError):
        run_tutorial(page, tmp_path, tmp_path)
    assert script_of(page).startswith("set -euo pipefail\n")
