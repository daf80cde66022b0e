"""The page of all commands equals the page that their parsers give."""

from pathlib import Path

from moefold.cli.main import COMMANDS
from tools.command_page import command_parsers, commands_page

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_in_docs_is_the_generated_one():
    assert PAGE.read_text(encoding="utf-8") == commands_page(), "run: python -m tools.command_page > docs/commands.md"


def test_every_command_and_option_is_described():
    page = commands_page()
    assert all(f"\n## moefold {name}\n" in page for name in COMMANDS)
    for name, _, parser in command_parsers():
        section = page.split(f"# moefold {name}\n")[1].split("\n## ")[0]
        for action in parser._actions:
            assert all(f"`{option}" in section for option in action.option_strings if action.dest != "help"), name
