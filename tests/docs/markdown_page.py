"""Reading a page of the documentation: blocks of code with their markers, headings, anchors and links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENT_PAGES = [ROOT / "AGENTS.md", *sorted((ROOT / "skills").glob("*/SKILL.md"))]
"""Instructions for coding agents."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *AGENT_PAGES,
    *sorted((ROOT / "docs").rglob("*.md")),
]
RECORDS = [page for page in PAGES if page.name == "log.md" or page.parent.name == "design"]
"""Pages that stay as they were written: their links must work, their commands may be of an earlier version."""
KINDS = ("device file", "lengths file", "project file")
HTML_LINK = re.compile(r'<(?:a|img)\b[^>]*?\b(?:href|src)="([^"]+)"')
HTML_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str
    """Reason why no test runs it, from `<!-- not run: REASON -->` before the block or in the head of the page."""
    file: str
    """Name of the file that the block is, from `<!-- file: NAME -->`."""
    status: int
    """Exit status that the last command must have, from `<!-- exit status N -->`."""
    kind: str
    """Kind of file that TOML is if it is not a recipe, from `<!-- device file -->`: one of KINDS."""

    def __str__(self) -> str:
        """Return the place of the block in the repository."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> tuple[Block, ...]:
    """Return the fenced blocks of a page, in order."""
    found = list[Block]()
    markers: dict[str, str] = {}
    of_page = ""
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opened is not None:
            if line.strip() == opened[1]:
                found.append(_block(page, opened, body, markers, of_page))
                markers = {}
                opened = None
            else:
                body.append(line)
            continue
        fence = re.match(r"^\s*(```+|~~~+)(\w*)", line)
        if fence:
            opened = (number, fence[1], fence[2])
            body = []
        elif marker := re.match(
            r"^<!-- (not run: |file: |exit status |device file|lengths file|project file)(.*?) -->$", line.strip()
        ):
            markers[marker[1].strip(": ")] = marker[2]
        elif line.strip():
            if "not run" in markers and not found:
                of_page = of_page or markers["not run"]
            markers = {}
    assert opened is None, f"{name_of(page)}: a block is not closed"
    return tuple(found)


def _block(page: Path, opened: tuple[int, str, str], body: list[str], markers: dict[str, str], of_page: str) -> Block:
    return Block(
        page,
        opened[0],
        opened[2],
        "".join(f"{line}\n" for line in body),
        markers.get("not run", of_page),
        markers.get("file", ""),
        int(markers.get("exit status", "0")),
        next((kind for kind in KINDS if kind in markers), ""),
    )


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code and comments."""
    text = re.sub(r"^(```+|~~~+).*?^\1\s*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of the headings of a page, as code hosts and the site compute them, and those in HTML."""
    found = set(HTML_ANCHOR.findall(prose(page)))
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        if HTML_ANCHOR.match(heading):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.replace("`", "").lower()).strip().replace(" ", "-")
        name = slug
        count = 0
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.add(name)
    return frozenset(found)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the links and images of a page, except addresses of the web."""
    text = re.sub(r"`[^`\n]*`", "``", prose(page))
    for target in (*LINK.findall(text), *HTML_LINK.findall(text)):
        if not re.match(r"[a-z]+:", target):
            yield target
