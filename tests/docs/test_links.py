"""Every link of the documentation inside the repository leads to a file and to a heading that exist."""

import pytest

from tests.docs.markdown_page import PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_a_file_and_a_heading(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.is_dir() and (target / "README.md").is_file():
            target /= "README.md"
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


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
