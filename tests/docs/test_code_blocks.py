"""Code blocks of the documentation: commands parse, recipes validate, programs compile, unrun ones say why."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from moefold.cli.main import COMMANDS
from moefold.config.keys.paths import key_types, sections
from moefold.config.load import config_from_dict
from moefold.cost.hardware import load_device
from moefold.planner.lengths.distribution import load_distribution
from moefold.validate.config import check_config
from tests.cli.example_command import assert_command
from tests.docs.markdown_page import PAGES, RECORDS, ROOT, Block, blocks, name_of, prose

CURRENT = [page for page in PAGES if page not in RECORDS]
RUN_BY_TESTS = {
    "README.md": "tests/e2e/test_readme.py",
    "docs/api.md": "tests/test_api.py",
    "docs/extending.md": "tests/test_extending.py",
    "docs/tutorials/": "tests/docs/test_tutorials.py",
    "docs/upgrading.md": "tests/docs/test_upgrading.py",
}
"""Pages whose shell and Python blocks a test runs, except those that are marked."""
NAMED_PATH = re.compile(r"(?<![\w/])(?:experiments/)?(?:tests|docs)/[\w/.]*\w")
_VARIABLE = re.compile(r"\$\{?\w+\}?")
OPERATORS = frozenset({"|", "||", "&", "&&", ";", "(", ")", ">", ">>", "<", ">&", "do", "done"})


def commands_in(block: Block) -> list[str]:
    """Return the commands of moefold in a block: in shell, after launchers and in pipes. Elsewhere whole lines."""
    found = []
    for line in re.sub(r" *\\\n *", " ", block.text).splitlines():
        line = line.strip()
        if block.language not in ("sh", "bash"):
            start = r"\$ moefold" if block.language else r"(\$ )?moefold [a-z]"
            if not re.match(start, line):
                continue
            line = line.removeprefix("$ ")
        elif "moefold " not in line:
            continue
        lexer = shlex.shlex(_VARIABLE.sub("8", line.replace("2>&1", "")), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        found += _commands_of_words(list(lexer))
    return found


def _commands_of_words(words: list[str]) -> list[str]:
    found = []
    while "moefold" in words:
        words = words[words.index("moefold") :]
        end = next((number for number, word in enumerate(words) if word in OPERATORS), len(words))
        if end > 1:
            found.append(shlex.join(words[:end]))
        words = words[max(end, 1) :]
    return found


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_commands_can_be_typed(page):
    for block in blocks(page):
        for command in commands_in(block):
            try:
                assert_command(command)
            except AssertionError as error:
                raise AssertionError(f"{block}: {error}") from None


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_commands_and_keys_in_the_text_exist(page):
    text = prose(page)
    assert [
        name for name in re.findall(r"`moefold ([a-z][\w-]*)", text) if name.replace("_", "-") not in COMMANDS
    ] == []
    wrong = [
        f"{section}.{key}"
        for section, key in re.findall(r"`'?([a-z]+)\.([a-z_]+) ?=", text)
        if section in sections() and key not in (*key_types(section), "key")
    ]
    assert wrong == []


FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "benchmarks", "experiments", "tools")
    for path in (ROOT / folder).rglob("*.py")
]
OTHERS = ROOT / "docs/comparison.md"
"""Its paths belong to other projects."""


@pytest.mark.parametrize("page", [page for page in CURRENT if page != OTHERS], ids=name_of)
def test_names_in_the_text_are_in_the_files_that_it_gives(page):
    assert misplaced_names(prose(page)) == []


@pytest.mark.parametrize("page", [page for page in CURRENT if page != OTHERS], ids=name_of)
def test_files_in_the_text_exist(page):
    assert absent_files(prose(page)) == []


def absent_files(text: str) -> list[str]:
    """Return the passages "`folder/file.py`" and "`test_file.py`" that end no path of a file of the repository."""
    named = re.findall(r"`((?:(?:\w+/)+|test_)[a-z_0-9]+\.py)`", text)
    return [
        name
        for name in named
        if not re.search("[A-Z]", name) and not any(f"/{file}".endswith(f"/{name}") for file in FILES)
    ]


def test_an_absent_file_is_found():
    text = "`parallel/batch.py`, `parts/GROUP/part.py`, `parallel/no.py`, `test_links.py`, `test_no.py`"
    assert absent_files(text) == ["parallel/no.py", "test_no.py"]


def misplaced_names(text: str) -> list[str]:
    """Return the passages "`name` (`file.py`)" and "`name` in `file.py`" whose file is absent or lacks the name."""
    wrong = []
    for passage in re.finditer(r"`(?!torch\.)([\w.]+)` (?:\(|in )`(\w[\w/]*/\w+\.py)`", text):
        name = passage[1].rpartition(".")[2]
        defined = re.compile(rf"^\s*(?:(?:async )?def |class )?{name}\b *[:=(]", re.MULTILINE)
        found = [ROOT / file for file in FILES if f"/{file}".endswith(f"/{passage[2]}")]
        if not any(defined.search(path.read_text()) for path in found):
            wrong.append(passage[0])
    return wrong


def test_a_name_in_another_file_is_found():
    text = "`Batch` (`parallel/gradients.py`), `Batch` (`parallel/batch.py`), `Batch` in `parallel/no.py`"
    assert misplaced_names(text) == ["`Batch` (`parallel/gradients.py`", "`Batch` in `parallel/no.py`"]


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_data_and_programs_are_valid(page):
    for block in blocks(page):
        try:
            _check(block)
        except Exception as error:
            raise AssertionError(f"{block}: {error}") from error


def _check(block: Block) -> None:
    if block.language == "toml" and block.kind:
        tomllib.loads(block.text)
    elif block.language == "toml":
        cfg = config_from_dict(tomllib.loads(block.text))
        if block.page.parent.name == "how-to":
            check_config(cfg)
    elif block.language == "python":
        compile(block.text, str(block), "exec")
    elif block.language == "json":
        text = block.text
        while text.strip():
            _, end = json.JSONDecoder().raw_decode(text.lstrip())
            text = text.lstrip()[end:]
    elif block.language == "sh":
        done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        assert block.language in ("", "text", "csv", "jinja", "yaml"), "unknown language"


@pytest.mark.parametrize(("kind", "read"), [("device file", load_device), ("lengths file", load_distribution)])
def test_other_files_are_read_by_their_readers(kind, read, tmp_path):
    found = [block for page in CURRENT for block in blocks(page) if block.kind == kind]
    assert found
    for block in found:
        path = tmp_path / "file.toml"
        path.write_text(block.text)
        assert read(str(path))


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_a_block_that_no_test_runs_says_why(page):
    name = name_of(page)
    is_run = any(name.startswith(start) and (ROOT / test).exists() for start, test in RUN_BY_TESTS.items())
    unmarked = [
        str(block)
        for block in blocks(page)
        if block.language in ("sh", "python") and not block.not_run and not (is_run or block.file)
    ]
    assert unmarked == [], "write <!-- not run: REASON --> before the block, or in the head of the page"
    reasons = {block.not_run for block in blocks(page) if block.not_run}
    assert all(len(reason) > 10 for reason in reasons)
    named = [path for reason in reasons for path in NAMED_PATH.findall(reason)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("srun moefold train a.toml run.steps=3 2>&1 | tail -n 3\n", ["moefold train a.toml run.steps=3"]),
        ("torchrun -m moefold train \\\n  a.toml > log & wait\n", ["moefold train a.toml"]),
        ('echo "x y" | moefold generate runs/a && ls moefold\n', ["moefold generate runs/a"]),
    ],
)
def test_commands_are_found_in_shell_lines(text, commands):
    assert commands_in(Block(Path("x.md"), 1, "sh", text, "", "", 0, "")) == commands


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("toml", "[train]\nlerning_rate = 1\n"),
        ("toml", '[train]\nlr = "high"\n'),
        ("python", "def f(:\n"),
        ("json", '{"a": ...}\n'),
        ("sh", "for x in 1 2; do\n"),
        ("shell", "ls\n"),
    ],
)
def test_wrong_blocks_are_found(language, text):
    with pytest.raises(Exception, match="."):
        _check(Block(ROOT / "x.md", 1, language, text, "", "", 0, ""))


@pytest.mark.parametrize("command", ["moefold trian a.toml", "moefold train a.toml run.stepz=1", "moefold train --no"])
def test_wrong_commands_are_found(command):
    with pytest.raises(AssertionError):
        assert_command(command)
