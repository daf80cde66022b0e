"""The recipes of the checkout are in the wheel, and their paths are found from any folder."""

import tomllib
from pathlib import Path

from moefold.config.shipped_recipes import shipped_files, shipped_folder
from moefold.recipe import load_config

ROOT = Path(__file__).parents[2]


def test_all_recipes_of_the_checkout_ship():
    assert shipped_folder() == ROOT / "recipes"
    files = {file for files in shipped_files().values() for file in files}
    assert files == {path for path in (ROOT / "recipes").rglob("*") if path.is_file()}


def test_the_wheel_has_them_where_they_are_looked_for():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"recipes": "moefold/recipes"}


def test_paths_of_a_recipe_are_found_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("a.txt", "b.txt"):
        (inner / name).write_text("text")
    (inner / "recipe.toml").write_text('[data]\nkind = "text"\npath = ["a.txt", "b.txt", "c.txt"]\n')
    assert load_config(Path("inner/recipe.toml")).data.path == ("inner/a.txt", "inner/b.txt", "c.txt")
    monkeypatch.chdir(inner)
    assert load_config(Path("recipe.toml")).data.path == ("a.txt", "b.txt", "c.txt")
    # Only typed paths are relative to the current folder.
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("inner/recipe.toml"), ["data.path=a.txt"]).data.path == "a.txt"


def test_the_recipe_for_fine_tuning_finds_its_conversations_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = load_config(ROOT / "recipes/sft.toml").data.path
    assert isinstance(path, str)
    assert Path(path).is_file()
    monkeypatch.chdir(ROOT)
    assert load_config(Path("recipes/sft.toml")).data.path == "recipes/conversations.jsonl"
