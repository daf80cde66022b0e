"""Every key of a recipe has help, with type and default, in the terminal and on the page."""

from pathlib import Path

from moefold.config.keys.help import keys_text, recipe_keys, section_help
from moefold.config.keys.paths import key_types, kind_settings, sections
from moefold.config.presets import preset_names
from tools.recipe_page import recipe_page

PAGE = Path(__file__).parents[3] / "docs" / "recipe.md"


def test_every_key_of_the_schema_has_help():
    for section in sections():
        assert section_help(section)
        names = [key.name for key in recipe_keys(section)]
        assert [name for name in names if name.count(".") == 1] == [f"{section}.{key}" for key in key_types(section)]
        assert [name for name in names if name.count(".") > 1] == [
            path for path in kind_settings() if path.startswith(f"{section}.")
        ]
        assert all(key.help.endswith((".", ")")) for key in recipe_keys(section))


def test_a_key_is_described_with_type_and_default():
    key = next(key for key in recipe_keys("parallel") if key.name == "parallel.context")
    assert (key.type, key.default) == ("one of 'allgather', 'planned', 'ring', 'ulysses'", '"ring"')
    assert key.help.startswith("Context-parallel attention under cp: how each rank attends to the whole sequence.")


def test_the_terminal_text_holds_every_key_and_preset():
    text = keys_text()
    assert all(f"  {key.name} = " in text for section in sections() for key in recipe_keys(section))
    assert all(f"  {name}\n" in text for name in preset_names())


def test_the_terminal_text_names_pages_and_no_markdown_links():
    text = keys_text()
    assert "(docs/kernels.md)" in text
    assert "](" not in text


def test_the_page_in_docs_is_the_generated_one():
    assert PAGE.read_text(encoding="utf-8") == recipe_page(), "run: python -m tools.recipe_page > docs/recipe.md"
