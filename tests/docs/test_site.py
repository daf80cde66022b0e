"""The documentation site: its hooks, a strict build, and its pages in a headless browser."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from moefold.config.keys.help import recipe_keys
from moefold.config.keys.paths import sections
from tests.docs.browser import chromium, measure_pages, search, take_picture
from tests.docs.markdown_page import ROOT

STRAY_EMPHASIS = re.compile(r".{0,30}\w<(?:em|strong)>.{0,30}|.{0,30}</(?:em|strong)>\w.{0,30}")
NARROW = 400
WIDE = 1280


def load(name: str) -> ModuleType:
    """Load a program of docs/site, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", ROOT / f"docs/site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the site needs more packages: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> str:
    found = chromium()
    if found is None:
        pytest.skip("pictures of pages need a browser: apt-get install chromium")
    return found


def test_markdown_of_code_hosts_becomes_markdown_of_the_site():
    adapt = load("hooks").adapt
    text = "Words:\n* one\n  goes on\n* two\n\n```\nx:\n* y\n[a](../src)\n```\nTable\n| a |\n| --- |\n## b\n"
    adapted = adapt(text, "docs/page.md", "page.md")
    assert adapted == text.replace("Words:\n", "Words:\n\n").replace("Table\n", "Table\n\n").replace("##", "\n##")


@pytest.mark.parametrize(
    ("link", "path", "uri", "found"),
    [
        ("log.md#a", "docs/api.md", "api.md", "log.md#a"),
        ("log.md#2026-11-26-sites", "docs/api.md", "api.md", "log/2026.md#2026-11-26-sites"),
        ("../README.md", "docs/index.md", "index.md", "index.md"),
        ("../CONTRIBUTING.md#pages", "docs/index.md", "index.md", "contributing.md#pages"),
        ("../../README.md", "docs/tutorials/index.md", "tutorials/index.md", "../index.md"),
        ("../recipes/slurm.sbatch", "docs/cluster.md", "cluster.md", "files.md#recipes-slurm-sbatch"),
        ("design/", "docs/index.md", "index.md", "design/README.md"),
        ("docs/gpu.md", "CONTRIBUTING.md", "contributing.md", "gpu.md"),
        ("https://x.org/a.md", "docs/api.md", "api.md", "https://x.org/a.md"),
        ("#here", "docs/api.md", "api.md", "#here"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(link, path, uri, found):
    assert load("hooks").adapt(f"[x]({link})", path, uri) == f"[x]({found})"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_every_page_is_in_the_navigation_once():
    hooks = load("hooks")
    config = SimpleNamespace(nav=yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])
    listed = list(hooks._paths_of(hooks.on_config(config).nav))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    # Design notes are listed by their own page.
    pages = {page for page in pages if not re.match(r"design/\d", page)}
    generated = {*hooks.PAGES_OF_FILES.values(), hooks.PYTHON_PAGE, hooks.FILES_PAGE}
    assert sorted(pages - set(listed)) == [], "list the page in docs/index.md, in a section of hooks.TABS"
    assert sorted(set(listed) - pages - generated) == []
    assert len(listed) == len(set(listed))


def test_pages_outside_docs_bring_the_pages_that_they_link_to():
    found = load("hooks").files_of_links({"docs/README.md"})
    skills = {path.relative_to(ROOT).as_posix() for path in (ROOT / "skills").glob("*/SKILL.md")}
    assert "AGENTS.md" in found
    assert skills <= found
    assert not any(path.startswith("docs/") for path in found)


@pytest.mark.slow
def test_the_diagrams_are_those_that_their_program_draws(tmp_path):
    load("diagrams").main(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in (ROOT / "docs/images").glob("*.svg"))


@pytest.mark.slow
def test_the_site_has_every_page_and_an_index_for_the_search(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    assert [page for page in pages if not (site / page.with_suffix(".html")).is_file()] == []
    index = json.loads((site / "search/search_index.json").read_text())
    assert any("least-loaded" in entry["text"].lower() for entry in index["docs"])
    assert not list(site.rglob("*.py"))
    reference = (site / "python-reference.html").read_text()
    assert all(f'id="moefold.api.{name}"' in reference for name in ("train_model", "evaluate", "plan"))


@pytest.mark.slow
def test_no_asterisk_became_emphasis_in_a_word(site):
    found = []
    for page in sorted(site.rglob("*.html")):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{page.name}: {match[0]}" for match in STRAY_EMPHASIS.finditer(text)]
    assert found == []


@pytest.mark.slow
def test_each_recipe_key_has_an_anchor_of_its_name(site):
    text = (site / "recipe.html").read_text(encoding="utf-8")
    assert [key.name for section in sections() for key in recipe_keys(section) if f'id="{key.name}"' not in text] == []


@pytest.mark.slow
def test_no_page_is_broken_on_a_narrow_screen(site, browser, tmp_path):
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    found = measure_pages(site, pages, NARROW, tmp_path)
    assert sorted(found) == sorted(f"/{page}" for page in pages)
    assert {page: one["width"] for page, one in found.items() if one["width"] > NARROW} == {}
    assert {page: one["broken"] for page, one in found.items() if one["broken"]} == {}
    assert {page: one["foreign"] for page, one in found.items() if one["foreign"]} == {}
    assert [page for page, one in found.items() if not one["heading"] or not one["has_search"]] == []


QUERIES = {
    "oom": "how-to/run-out-of-memory.html",
    "out of memory": "how-to/run-out-of-memory.html",
    "lr": "recipe.html#train.lr",
    "learning rate": "recipe.html#train.lr",
    "train.lr": "recipe.html#train.lr",
    "learning_rate": "recipe.html#train.lr",
    "batch size": "recipe.html#train.global_batch_size",
    "recompute": "recipe.html#train.recompute",
    "megatron": "comparison.html",
    "torchtitan": "comparison.html",
    "dpo": "alignment.html",
    "qwen3": "tutorials/hugging-face-model.html",
    "grpo": "tutorials/grpo.html",
    "lora": "lora.html",
    "slurm": "cluster.html",
    "install": "install.html",
    "resume another cluster": "how-to/change-the-mapping.html",
    "slow rank": "how-to/find-a-slow-rank.html",
    "hang": "tutorials/debug-a-hang.html",
    "long context": "how-to/long-documents.html",
    "reinforcement learning": "rl.html",
    "tensorboard": "board.html",
    "mfu": "metrics.html",
    "nan": "silent-faults.html",
    "moefold plan": "planner.html",
}
"""Words that readers type, and the page that they look for."""
NUM_SEEN = 2
"""The first page, and the first of its sections."""


@pytest.mark.slow
def test_the_search_finds_the_words_of_readers(site, browser, tmp_path):
    found = {query: [_place(link) for link in links] for query, links in search(site, QUERIES, tmp_path).items()}
    seen = {query: links[:NUM_SEEN] for query, links in found.items()}
    assert {query: seen[query] for query, page in QUERIES.items() if page not in seen[query]} == {}
    assert [link for links in found.values() for link in links if link.startswith(("log", "files.html"))] == []


def _place(link: str) -> str:
    """Return the page and the anchor of a search result."""
    parts = urlsplit(link)
    return parts.path.lstrip("/") + (f"#{parts.fragment}" if parts.fragment else "")


@pytest.mark.slow
def test_a_page_that_is_too_wide_is_found(browser, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "wide.html").write_text('<h1>a</h1><div style="width:900px">x</div><img src="none.png">')
    found = measure_pages(site, ["wide.html"], NARROW, tmp_path / "profile")["/wide.html"]
    assert found["width"] >= 900
    assert len(found["broken"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_pages_are_light_or_dark_as_the_reader_prefers(site, browser, tmp_path, width):
    brightness = []
    for is_dark in (False, True):
        picture = tmp_path / f"{is_dark}.png"
        take_picture(site, "tutorials/first-run.html", (width, 900), is_dark, picture, tmp_path / f"profile-{is_dark}")
        pixels = imread(picture)[..., :3]
        assert pixels.shape[:2] == (900, width)
        # A page with text is not of one colour.
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
        brightness.append(float(np.median(pixels)))
    assert brightness[0] > 0.9
    assert brightness[1] < 0.3
