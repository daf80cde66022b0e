"""Every link of the documentation inside the repository leads to a file and to a heading that exist."""

import re
from pathlib import Path

import pytest

import moefold
from tests.docs.markdown_page import PAGES, ROOT, anchors, links, name_of, prose

CITATION = re.compile(r"(?<![\w./-])(docs/[\w/-]+\.md(?:#[\w-]+)?)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_to_a_file_and_a_heading(page):
    assert [link for link in links(page) if is_broken(link, page)] == []


def test_citations_in_the_code_lead_to_a_page_and_a_heading():
    files = [path for folder in ("src", "experiments/src") for path in sorted((ROOT / folder).rglob("*.py"))]
    cited = {(name_of(path), link) for path in files for link in CITATION.findall(path.read_text())}
    assert len(cited) >= 40
    broken = {(name, link) for name, link in cited if link == "docs/log.md" or is_broken(link, ROOT / "README.md")}
    assert broken == set(), "cite an entry of the log by its heading: docs/log.md#2026-11-26-sites"


def is_broken(link: str, page: Path) -> bool:
    """Return whether the file or the heading of a link of a page does not exist."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if target.is_dir() and (target / "README.md").is_file():
        target /= "README.md"
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_asterisk_of_a_product_is_read_as_emphasis(page):
    assert stray_asterisks(prose(page)) == [], "write a product in backticks: `tp*cp`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_table_has_an_empty_head(page):
    assert re.findall(r"^\|(?: *\|)+ *\n\| *-", prose(page), re.MULTILINE) == []


def test_no_docstring_of_the_interface_has_an_asterisk_of_a_product():
    names = {name: getattr(moefold, name) for name in moefold._MODULES}
    members = {
        f"{name}.{member}": value
        for name, one in names.items()
        if isinstance(one, type)
        for member, value in vars(one).items()
        if not member.startswith("_")
    }
    docs = {name: getattr(one, "__doc__", None) or "" for name, one in (names | members).items()}
    assert {name: found for name, doc in docs.items() if (found := stray_asterisks(doc))} == {}


def stray_asterisks(text: str) -> list[str]:
    """Return the asterisks between letters, digits or brackets outside of code: emphasis in Markdown."""
    return re.findall(r".{0,20}[\w)\]]\*+[\w(\[].{0,20}", re.sub(r"(`+).+?\1", "", text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ranks / (tp*cp*pp)", ["ranks / (tp*cp*pp)"]),
        ("`tp*cp`, ``2**24`` and pp\\*x", []),
        ("**bold** and *emphasis*, (**bold**)", []),
        ("2**24 logits", ["2**24 logits"]),
    ],
)
def test_stray_asterisks_are_found(text, found):
    assert stray_asterisks(text) == found


def test_every_design_note_is_listed():
    listed = (ROOT / "docs/design/README.md").read_text()
    notes = sorted(path.name for path in (ROOT / "docs/design").glob("[0-9]*.md"))
    assert [name for name in notes if f"({name})" not in listed] == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` / c: d\n\n[x](#a-b--c-d) [y](#no) `[z](none.md)` ![p](p.png) [w](https://x.org/)\n"
        '### <a id="e.f"></a>e.f\n\n[![a](https://x.org/b)](L)\n<a href="c.md"><img alt="x" src="d.png"></a>\n'
    )
    assert list(links(page)) == ["#a-b--c-d", "#no", "p.png", "L", "c.md", "d.png"]
    assert anchors(page) == {"a-b--c-d", "e.f"}
    assert [link for link in links(page) if is_broken(link, page)] == ["#no", "p.png", "L", "c.md", "d.png"]
