"""Hooks of the documentation site: navigation from docs/index.md, generated pages, links that leave docs/.

The pages in docs/ are plain Markdown that a code host renders too. These hooks do what only the site needs.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!\\)(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^\s*(```|~~~)")
KEY_HEADING = re.compile(r'^### <a id="([\w.]+)"></a>(.+)$', re.MULTILINE)
LOG_HEADING = re.compile(r"^## (\d{4})(-\d\d-\d\d: .+)$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} ")
LIST_ITEM = re.compile(r"^(\s*)([*-]|\d+\.) +\S")
PAGES_OF_FILES = {
    "README.md": "index.md",
    "docs/README.md": "documentation.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that have a page of another name."""
PYTHON_PAGE = "python-reference.md"
FILES_PAGE = "files.md"
"""The page of all other files that pages link to: recipes, job files."""
VERSION_RULE = """.md-header__topic:first-child .md-ellipsis::after {{
  content: "{}";
}}
"""
LANGUAGES = {".py": "python", ".toml": "toml", ".sbatch": "sh", ".csv": "text", ".json": "json", ".jsonl": "json"}
TABS = {
    "Start here": "Start",
    "Tasks": "Guides",
    "Choosing a mapping": "Guides",
    "When something goes wrong": "Guides",
    "Reference": "Reference",
    "How it works": "Internals",
    "Measurements": "Internals",
}
"""The tab of the site under which the pages of a section of docs/index.md stand."""


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Append the pages that docs/index.md lists to the navigation, below those that mkdocs.yml lists."""
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))
    listed = set(_paths_of(config.nav))
    tabs: dict[str, list[object]] = {}
    for section, paths in _sections_of_index():
        pages = [path for path in paths if path not in listed]
        listed.update(pages)
        if pages:
            tabs.setdefault(TABS[section], []).append({section: pages})
    nav = [
        {"Guides": tabs["Guides"]},
        {"Reference": [*next(iter(tabs["Reference"][0].values())), PYTHON_PAGE, FILES_PAGE]},
        {
            "Internals": [
                *tabs["Internals"],
                {"Design notes": ["design/README.md"]},
                {"Project": ["contributing.md", "documentation.md", "changelog.md"]},
            ]
        },
    ]
    start, *others = config.nav
    start["Start"] += [path for section in tabs.get("Start", []) for pages in section.values() for path in pages]
    config.nav = [start, *others, *nav]
    config.copyright = f"moefold {_version()}, Apache-2.0"
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages: the Python interface, and files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    renamed = set(PAGES_OF_FILES) - {"README.md"}
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()} | renamed
    others = files_of_links(pages)
    shown = {path for path in others if _page_of(path) == FILES_PAGE}
    for path in sorted((others | renamed) - shown):
        files.append(File.generated(config, _page_of(path), content=(ROOT / path).read_text()))
    files.append(File.generated(config, FILES_PAGE, content=_files_page(sorted(shown))))
    files.append(File.generated(config, PYTHON_PAGE, content=_python_page()))
    for year, text in _log_by_year().items():
        files.append(
            File.generated(config, f"log/{year}.md", content=f"---\nhide: [toc]\n---\n# Log of {year}\n\n{text}")
        )
    files.append(File.generated(config, "site/version.css", content=VERSION_RULE.format(_version())))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Adapt a page to the site: links to files outside docs/, and the blank lines that lists and tables need."""
    uri = page.file.src_uri
    if uri == "log.md":
        return _log_index(markdown)
    if uri.startswith("log/"):
        return adapt(markdown, "docs/log.md", uri)
    # The anchor of a recipe key is the heading's own, so that the search finds the key by itself.
    markdown = KEY_HEADING.sub(r"### \2 { #\1 }", markdown)
    names = {site: path for path, site in PAGES_OF_FILES.items() if path != "README.md"}
    if uri in names:
        return adapt(markdown, names[uri], uri)
    return adapt(markdown, f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri, uri)


def adapt(markdown: str, path: str, uri: str) -> str:
    """Return the Markdown of a page of the repository as the site needs it.

    Args:
        markdown: the text.
        path: the file in the repository, which relative links start from.
        uri: the page of the site.
    """
    lines: list[str] = []
    in_fence = False
    for line in markdown.split("\n"):
        if FENCE.match(line):
            in_fence = not in_fence
        elif not in_fence:
            if _needs_blank_line(lines[-1] if lines else "", line):
                lines.append("")
            line = LINK.sub(lambda link: link[1] + _target(link[2], path, uri) + link[3], line)
        lines.append(line)
    return "\n".join(lines)


def _needs_blank_line(before: str, line: str) -> bool:
    """Return True at a heading, or at the first line of a list or table, that follows other text without a blank line.

    Code hosts start a part there, Python-Markdown continues the paragraph or the table.
    """
    if not before.strip():
        return False
    if HEADING.match(line):
        return True
    if before.startswith("#"):
        return False
    if item := LIST_ITEM.match(line):
        is_in_list = LIST_ITEM.match(before) or before.startswith("  ")
        return not is_in_list and not item[1]
    return line.startswith("|") and not before.lstrip().startswith("|")


def _target(link: str, path: str, uri: str) -> str:
    """Return a link as the site needs it: from the page that a file has on the site to the page of its target."""
    target, hash_sign, anchor = link.partition("#")
    if not target or ":" in target or target.startswith("/"):
        return link
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    page = _page_of(found)
    if page == FILES_PAGE:
        hash_sign, anchor = "#", _anchor_of(found)
    elif page == "log.md" and re.match(r"\d{4}-", anchor):
        page = f"log/{anchor[:4]}.md"
    return posixpath.relpath(page, posixpath.dirname(uri) or ".") + hash_sign + anchor


def _page_of(path: str) -> str:
    """Return the page of the site for a file or folder of the repository."""
    if path in PAGES_OF_FILES:
        return PAGES_OF_FILES[path]
    if path.startswith("docs/"):
        name = path.removeprefix("docs/")
        return f"{name}/README.md" if (ROOT / path).is_dir() else name
    return path if path.endswith(".md") else FILES_PAGE


def _anchor_of(path: str) -> str:
    return re.sub(r"[/.]", "-", path)


def files_of_links(pages: set[str]) -> set[str]:
    """Return the files outside docs/ that pages link to, and those that such a file links to if it is a page."""
    found: set[str] = set()
    waiting = sorted(pages)
    while waiting:
        path = waiting.pop()
        for target in _linked_files(path, (ROOT / path).read_text()):
            if not target.startswith("docs/") and target != "README.md" and target not in found:
                found.add(target)
                if target.endswith(".md") and target not in pages:
                    waiting.append(target)
    return found


def _linked_files(path: str, markdown: str) -> Iterator[str]:
    for _, link, _ in LINK.findall(markdown):
        target = link.partition("#")[0]
        if target and ":" not in target:
            found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if (ROOT / found).exists():
                yield found


def _files_page(paths: list[str]) -> str:
    """Return the page of files outside docs/: the names in a folder, and other files as blocks of code."""
    lines = ["# Recipes and other files", "", "Files of the repository that the pages link to.", ""]
    for path in paths:
        source = ROOT / path
        lines += [f"## {path} {{ #{_anchor_of(path)} }}", ""]
        if source.is_dir():
            names = sorted(child.name for child in source.iterdir() if not child.name.startswith(("_", ".")))
            lines += [f"* `{name}`" for name in names]
        else:
            lines += [f"````{LANGUAGES.get(source.suffix, 'text')}", source.read_text().rstrip("\n"), "````"]
        lines.append("")
    return "\n".join(lines)


def _version() -> str:
    import moefold

    return moefold.__version__


def _log_by_year() -> dict[str, str]:
    """Return the parts of the log by year, newest first."""
    text = (ROOT / "docs/log.md").read_text()
    starts = list(LOG_HEADING.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    found: dict[str, str] = {}
    for start, end in zip(starts, ends, strict=True):
        found[start[1]] = found.get(start[1], "") + text[start.start() : end]
    return found


def _log_index(markdown: str) -> str:
    """Return the head of the log, and a list of its entries by year, which have pages of their own."""
    from pymdownx.slugs import slugify

    slug = slugify(case="lower")
    lines = [markdown[: next(LOG_HEADING.finditer(markdown)).start()]]
    seen: dict[str, int] = {}
    for year, text in _log_by_year().items():
        lines += [f"## {year}", ""]
        for heading in LOG_HEADING.finditer(text):
            name = slug((heading[1] + heading[2]).replace("`", ""), "-")
            seen[name] = seen.get(name, -1) + 1
            anchor = f"{name}_{seen[name]}" if seen[name] else name
            date, _, title = heading[2].partition(": ")
            lines.append(f"* {date[1:]} [{title}](log/{year}.md#{anchor})")
        lines.append("")
    return "\n".join(lines)


def _python_page() -> str:
    """Return the page of the Python interface, which mkdocstrings fills from the docstrings."""
    import moefold

    lines = [
        "# Python reference",
        "",
        "Every name that `import moefold` offers, from the docstrings. [The Python API](api.md) explains how they are",
        "used together.",
        "",
    ]
    for name in sorted(moefold._MODULES, key=lambda name: (name[0].isupper(), name.lower())):
        lines += [f"::: moefold.{moefold._MODULES[name]}.{name}", ""]
    return "\n".join(lines)


def _sections_of_index() -> Iterator[tuple[str, list[str]]]:
    """Yield each section of docs/index.md that lists pages, and the pages."""
    text = (ROOT / "docs/index.md").read_text()
    for part in text.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        if heading in TABS:
            rows = [line.split(" | ")[0] for line in body.splitlines() if line.startswith("| [")]
            paths = [link for row in rows for _, link, _ in LINK.findall(row) if link.endswith(".md")]
            yield heading, [path for path in paths if path != "design/README.md"]


def _paths_of(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _paths_of(value)
    elif isinstance(nav, list):
        for value in nav:
            yield from _paths_of(value)
