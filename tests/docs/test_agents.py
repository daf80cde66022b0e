"""AGENTS.md and the skills: the names in text and commands exist, and every skill is listed and can be found."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.architecture.imports import TORCH_FREE
from tests.docs.markdown_page import AGENT_PAGES, ROOT, Block, blocks, name_of, prose

AGENTS, *SKILLS = AGENT_PAGES
FOLDERS = ("src/", "tests/", "docs/", "recipes/", "benchmarks/", "skills/")


def test_agents_md_lists_the_torch_free_folders():
    line = re.search(r"lower ones\. (.*?) must not import torch", AGENTS.read_text(), re.DOTALL)
    assert line is not None
    assert set(re.findall(r"`(\w+)/`", line[1])) == set(TORCH_FREE)


@pytest.mark.parametrize("page", SKILLS, ids=name_of)
def test_a_skill_has_a_name_and_a_description_and_is_listed(page):
    _, head, _ = page.read_text().split("---\n", 2)
    skill = yaml.safe_load(head)
    assert set(skill) == {"name", "description"}
    assert skill["name"] == page.parent.name
    assert 100 < len(skill["description"]) <= 1024
    assert "Use " in skill["description"]
    assert f"({name_of(page)})" in AGENTS.read_text()


@pytest.mark.parametrize("page", AGENT_PAGES, ids=name_of)
def test_paths_in_the_text_exist(page):
    assert [path for path in paths_in(prose(page)) if not (ROOT / path).exists()] == []


def paths_in(text: str) -> list[str]:
    """Return the paths of the repository that a text has as code."""
    return [code for code in re.findall(r"`([\w./-]+)`", text) if code.startswith(FOLDERS)]


@pytest.mark.parametrize("page", AGENT_PAGES, ids=name_of)
def test_the_names_in_commands_exist(page):
    missing = [f"{block}: {name}" for block in blocks(page) for name in missing_names(block)]
    assert missing == []


def missing_names(block: Block) -> list[str]:
    """Return the files, modules and targets of `make` in the commands of a block that do not exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing = []
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        missing += [word for word in words if word.startswith(FOLDERS) and not (ROOT / word).exists()]
        pairs = list(zip(words, words[1:], strict=False))
        modules = [word for option, word in pairs if option == "-m" and re.fullmatch(r"[\w.]+", word)]
        missing += [name for name in modules if importlib.util.find_spec(name) is None]
        missing += [word for command, word in pairs if command == "make" and word not in targets]
    return missing


def test_names_that_do_not_exist_are_found(tmp_path):
    text = (
        "make nothing\npython -m pytest tests/no_test.py\npython -m moefold.no_module > docs/no_page.md\n"
        "make check && make test\npython -m tools.command_page > docs/commands.md\n"
    )
    found = missing_names(Block(Path("x.md"), 1, "sh", text, "", "", 0, ""))
    assert found == ["nothing", "tests/no_test.py", "docs/no_page.md", "moefold.no_module"]
    assert paths_in("`src/moefold/x.py`, `moefold plan`, `tests/`") == ["src/moefold/x.py", "tests/"]
