"""Input files of a folder come in a fixed order; a missing path is answered with the most similar name."""

from pathlib import Path

import pytest

from moefold.data.input_paths import data_paths, existing_path, files_below
from moefold.errors import ConfigError


def test_files_come_by_name_and_folders_after_them(text_folder: Path):
    (text_folder / ".hidden").write_text("x")
    (text_folder / ".git").mkdir()
    (text_folder / ".git" / "config").write_text("x")
    (text_folder / "A").mkdir()
    (text_folder / "A" / "z.txt").write_text("x")
    names = [str(file.relative_to(text_folder)) for file in files_below(text_folder)]
    assert names == ["a.txt", "b.txt", "A/z.txt", "inner/c.txt"]


def test_named_folders_are_skipped(text_folder: Path):
    names = [file.name for file in files_below(text_folder, skipped_folders=frozenset({"inner"}))]
    assert names == ["a.txt", "b.txt"]


def test_a_link_in_a_circle_is_not_followed(text_folder: Path):
    (text_folder / "inner" / "up").symlink_to(text_folder, target_is_directory=True)
    assert len(list(files_below(text_folder))) == 3


def test_a_missing_file_is_answered_with_the_most_similar_name(text_folder: Path):
    with pytest.raises(ConfigError) as raised:
        existing_path("data.path", str(text_folder / "inner" / "cc.txt"))
    assert str(raised.value) == (
        f"data.path={str(text_folder / 'inner' / 'cc.txt')!r} does not exist; "
        f"did you mean {str(text_folder / 'inner' / 'c.txt')!r}?"
    )


def test_the_hint_is_for_the_first_part_that_is_missing(text_folder: Path):
    with pytest.raises(ConfigError, match="did you mean '.*/texts/inner'"):
        existing_path("data.path", str(text_folder / "iner" / "c.txt"))


def test_no_similar_name_and_a_file_as_a_folder(text_folder: Path):
    with pytest.raises(ConfigError, match="holds no similar name"):
        existing_path("data.path", str(text_folder / "wholly-other"))
    with pytest.raises(ConfigError, match="a.txt is a file, not a folder"):
        existing_path("data.path", str(text_folder / "a.txt" / "x"))


def test_home_and_relative_names_are_understood(text_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(text_folder))
    monkeypatch.chdir(text_folder / "inner")
    assert existing_path("k", "~/a.txt") == text_folder.resolve() / "a.txt"
    assert existing_path("k", "c.txt") == text_folder.resolve() / "inner" / "c.txt"


@pytest.mark.parametrize("path", ["", (), ("",)])
def test_an_empty_path_is_refused(path: str | tuple[str, ...]):
    with pytest.raises(ConfigError, match='data.path is empty, but data.kind="text" reads from it; name a file'):
        data_paths(path, "text")


def test_a_path_named_twice_is_refused(text_folder: Path):
    with pytest.raises(ConfigError, match="a.txt twice"):
        data_paths((str(text_folder / "a.txt"), str(text_folder / "inner" / ".." / "a.txt")), "text")


@pytest.mark.parametrize(
    ("key", "name", "command"),
    [
        ("--tokenizer", "gpt2", "'hf://gpt2' downloads it"),
        ("data.tokenizer", "Qwen/Qwen3-8B", "'hf://Qwen/Qwen3-8B' downloads it"),
        ("data.path", "allenai/c4", "'hf://datasets/allenai/c4' downloads it"),
        (
            "MODEL",
            "mistralai/Mixtral-8x7B-v0.1",
            "'hf://mistralai/Mixtral-8x7B-v0.1' downloads it",
        ),
    ],
)
def test_a_name_on_the_hub_is_answered_with_the_command_that_fetches_it(tmp_path, monkeypatch, key, name, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    with pytest.raises(ConfigError) as raised:
        existing_path(key, name)
    assert command in str(raised.value)
    assert "did you mean" not in str(raised.value)


def test_hidden_and_far_names_are_not_suggested(tmp_path):
    for name in (".git", ".gpt", "lmres"):
        (tmp_path / name).mkdir()
    for missing in ("gpt", "recipes", "git"):
        with pytest.raises(ConfigError, match="holds no similar name"):
            existing_path("k", str(tmp_path / missing))
    with pytest.raises(ConfigError, match=r"did you mean '.*/\.git'"):
        existing_path("k", str(tmp_path / ".giit"))
