"""Names on the hub are distinguished from paths, and the advice is the name to write."""

import pytest

from moefold.config.suggestions import download_advice, is_hub_name


@pytest.mark.parametrize(
    ("name", "bare", "found"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", False, True),
        ("gpt2", True, True),
        ("gpt2", False, False),
        ("runs/quickstart", False, False),
        ("./a/b", False, False),
        ("/a", True, False),
        ("a/b/c", True, False),
        ("~/model", False, False),
        ("corpus/train.parquet", False, False),
        ("tokenizer.json", True, False),
        ("a b/c", False, False),
        ("a/b;rm", False, False),
        ("", True, False),
    ],
)
def test_names_on_the_hub_are_told_from_paths(name, bare, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(name, allows_bare_name=bare) is found
    assert bool(download_advice(name, allows_bare_name=bare)) is found


def test_a_misspelt_file_of_an_existing_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert not is_hub_name("mine/modle")


def test_the_advice_is_the_name_to_write():
    assert download_advice("allenai/c4", "dataset").endswith("'hf://datasets/allenai/c4' downloads it")
    assert download_advice("me/model").endswith("'hf://me/model' downloads it")
