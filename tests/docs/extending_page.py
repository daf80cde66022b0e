"""Code blocks of docs/extending.md, which register parts of a program."""

import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def blocks(language: str, heading: str) -> list[str]:
    """Return the code of a section of the page."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def register(heading: str) -> None:
    """Run the code of a section in a module of its own, on a rank of the pool, which ends after its task."""
    module = ModuleType("extension")
    sys.modules["extension"] = module
    for block in blocks("python", heading):
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
