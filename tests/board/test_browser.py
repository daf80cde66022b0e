"""The page in a headless Chromium: live and exported, wide and narrow, light and dark, by keyboard."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `board`: pip install -e '.[board]'")

from moefold.board.export import export_board
from moefold.board.run_list import RunList
from tests.board.chromium import Page, open_page
from tests.board.run_files import step_metrics, write_faults, write_rollouts, write_run
from tests.docs.browser import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="needs a browser: apt-get install chromium"),
]
VIEWS = ("curves", "experts", "memory", "ranks", "faults", "rollouts", "recipes")
LOSS = "[...document.querySelectorAll('.card')].find((card) => card.querySelector('h3').title === 'loss')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser) -> Iterator[Page]:
    browser.leave()
    yield browser
    browser.leave()


@pytest.fixture
def folder(tmp_path) -> Path:
    run_dir = write_run(tmp_path / "runs/one", 40)
    write_rollouts(run_dir, 50)
    write_faults(run_dir)
    write_run(tmp_path / "runs/two", 25)
    return tmp_path / "runs"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "moefold", "board", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as board:
        assert board.stdout is not None
        try:
            yield board.stdout.readline().split()[-1]
        finally:
            board.terminate()


def set_value(page: Page, tag: str, index: int, value: str) -> None:
    """Set a field of the toolbar as a user does."""
    page.evaluate(
        f"(() => {{ const field = document.querySelectorAll('.toolbar {tag}')[{index}]; field.value = '{value}';"
        "field.dispatchEvent(new Event('change')); })()"
    )


def show(page: Page, address: str, view: str, width: int = 1280, theme: str = "light") -> None:
    page.open(f"{address}#view={view}", width, theme=theme)
    page.wait(f"document.getElementById('panel').dataset.ready === {view!r}")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_every_view_draws_without_an_error_and_fits_the_window(page, folder, tmp_path, width, theme):
    with served(folder) as address:
        for view in VIEWS:
            show(page, address, view, width, theme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            assert page.evaluate("document.getElementById('panel').innerText.trim().length") > 20, view
            page.screenshot(tmp_path / f"{view}.png", whole=True)
            assert (tmp_path / f"{view}.png").stat().st_size > 5000
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(247, 247, 248)", "dark": "rgb(22, 24, 29)"}[theme]
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
        page.evaluate("document.getElementById('theme').click()")
        assert page.problems == []


def test_a_running_job_is_followed_and_a_lost_server_is_reported(page, folder):
    with served(folder) as address:
        show(page, address, "curves")
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('0.125')")
        with (folder / "one/metrics.jsonl").open("a") as file:
            file.write(step_metrics(41, loss=7.125).to_json() + "\n" + '{"step": 42, "lo')
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('7.125')")
        page.wait("document.getElementById('runs').innerText.includes('41 of 40')")
        # A resumed run drops the later steps.
        write_run(folder / "one", 30, resume_step=20)
        page.wait("document.getElementById('runs').innerText.includes('30 of 30')")
        page.wait(f"!{LOSS}.querySelector('.u-legend').innerText.includes('7.125')")
        assert page.problems == []
    page.wait("document.getElementById('status').innerText.includes('not connected')")


def test_zoom_axes_and_smoothing(page, folder):
    with served(folder) as address:
        show(page, address, "curves")
        for index, value in ((0, "10"), (1, "20")):
            set_value(page, "input", index, value)
        page.wait("!document.querySelector('.reset').disabled")
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step21')")
        assert any("first=10&last=20" in address for address in page.requests)
        page.evaluate("document.querySelector('.reset').click()")
        page.wait("document.querySelector('.reset').disabled")
        # The middle half of steps 1 to 40, in one round of requests.
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step40')")
        page.requests.clear()
        page.drag(f"{LOSS}.querySelector('.u-over')", 0.25, 0.75)
        page.wait("!document.querySelector('.reset').disabled")
        page.wait("Math.abs(document.querySelector('.toolbar input').value - 11) <= 1")
        assert len([one for one in page.requests if "first=" in one]) == 2
        page.evaluate("document.querySelector('.reset').click()")
        page.wait("document.querySelector('.reset').disabled")
        for index, value in ((0, "tokens"), (0, "time_s"), (1, "0.9")):
            set_value(page, "select", index, value)
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('time20 s')")
        page.wait(f"{LOSS}.querySelectorAll('.u-legend .raw').length === 2")
        page.evaluate(f"{LOSS}.querySelector('button').click()")
        page.wait(f"{LOSS}.querySelector('button').getAttribute('aria-pressed') === 'true'")
        assert page.problems == []


def test_views_are_used_by_keyboard(page, folder):
    with served(folder) as address:
        show(page, address, "curves")
        page.evaluate(f"{LOSS}.querySelector('.plot').focus()")
        page.key("ArrowRight")
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step1')")
        page.key("ArrowRight")
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step2')")
        page.evaluate("document.getElementById('tab-curves').focus()")
        page.key("ArrowRight")
        page.wait("document.getElementById('panel').dataset.ready === 'experts'")
        assert page.evaluate("document.activeElement.id") == "tab-experts"
        page.evaluate("document.querySelectorAll('.heatmap canvas')[2].focus()")
        page.key("ArrowDown")
        page.key("ArrowDown")
        reading = "document.querySelectorAll('.heatmap .reading')[2].innerText"
        assert page.evaluate(reading) == "layer 0, expert 1, step 1: 1.00 times the mean"
        page.evaluate("document.querySelectorAll('.heatmap canvas')[1].focus()")
        page.key("ArrowDown")
        page.key("ArrowDown")
        page.key("Enter")
        page.wait("document.querySelectorAll('.heatmap figcaption')[2].innerText === 'Experts of layer 1 over steps'")
        # Runs are chosen by the space bar.
        page.evaluate("document.querySelector('#runs input[type=checkbox]').focus()")
        page.key(" ")
        page.wait("document.querySelectorAll('#runs input:checked').length === 1")
        page.wait("document.querySelectorAll('#panel option').length >= 1")
        assert page.problems == []


def check_rollouts(page: Page) -> None:
    """Search texts, load older ones, and find that markup of a model is text."""
    count = "document.querySelectorAll('.rollout').length"
    page.wait(f"{count} === 20")
    page.evaluate("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Older rollouts').click()")
    page.wait(f"{count} === 40")
    set_value(page, "input", 0, "<SCRIPT>")
    page.wait(f"{count} === 1")
    text = page.evaluate("document.querySelector('.rollout .completion pre').innerText")
    assert "</pre><script>window.broken = 1</script><img src=x" in text
    assert page.evaluate("document.querySelector('mark').innerText") == "<script>"
    assert page.evaluate("document.querySelectorAll('#panel script, #panel img').length") == 0
    assert page.evaluate("window.broken === undefined")


def test_rollouts_are_searched_and_their_markup_stays_text(page, folder):
    with served(folder) as address:
        show(page, address, "rollouts")
        check_rollouts(page)
        show(page, address, "faults")
        assert "onerror" in page.evaluate("document.querySelector('#panel table').innerText")
        assert page.evaluate("window.broken === undefined")
        assert page.problems == []


def test_recipes_that_differ_are_listed(page, folder):
    with served(folder) as address:
        show(page, address, "recipes")
        rows = "[...document.querySelectorAll('.recipes tbody tr')].map((row) => row.innerText)"
        found = page.evaluate(rows)
        assert [row.split("\t")[0] for row in found] == ["run.dir", "run.steps"]
        assert found[1].split("\t")[1:] == ["40", "25"]


def test_an_export_works_without_a_server(page, folder, tmp_path):
    export_board(RunList([folder]), tmp_path / "board")
    address = (tmp_path / "board/index.html").as_uri()
    for view in VIEWS:
        show(page, address, view)
        assert page.evaluate("document.getElementById('panel').innerText.trim().length") > 20, view
    show(page, address, "rollouts")
    check_rollouts(page)
    assert page.evaluate("document.getElementById('status').innerText").startswith("as of ")
    assert page.problems == []


def test_a_run_of_a_hundred_thousand_steps_shows_its_spike(page, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps({"step": step, "loss": 99.0 if step == 77_777 else 1 + 1 / step}) + "\n")
    with served(run_dir) as address:
        show(page, address, "curves")
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step100k')")
        points = f"{LOSS}.querySelector('.u-legend') && performance.getEntriesByType('resource')"
        sizes = page.evaluate(
            f"{points}.filter((one) => one.name.endsWith('/series')).map((one) => one.decodedBodySize)"
        )
        assert 0 < max(sizes) < 100_000
