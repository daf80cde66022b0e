"""Test the board in a headless Chromium: served and exported, wide and narrow, light and dark, by keyboard."""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extra `board`: pip install -e '.[board]'")

from moefold.board.export import export_board
from moefold.board.run_list import MAX_OPEN, RunList
from moefold.metrics.writer import to_record
from tests.board.board_process import served
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
            file.write(json.dumps(to_record(step_metrics(41, loss=7.125))) + "\n" + '{"step": 42, "lo')
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
        # Without the mouse, the legend has the last values of the picture.
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step20')")
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


def assert_rollouts(page: Page) -> None:
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
        assert_rollouts(page)
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
    assert_rollouts(page)
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
        page.wait(f"{LOSS}.querySelector('.u-legend').innerText.includes('step100,000')")
        points = f"{LOSS}.querySelector('.u-legend') && performance.getEntriesByType('resource')"
        sizes = page.evaluate(
            f"{points}.filter((one) => one.name.endsWith('/series')).map((one) => one.decodedBodySize)"
        )
        assert 0 < max(sizes) < 100_000


def legend(metric: str = "loss") -> str:
    """JavaScript: the legend of a chart, with spaces for line ends."""
    card = LOSS.replace("'loss'", f"'{metric}'")
    return f"{card}.querySelector('.u-legend').innerText.replace(/\\s+/g, ' ')"


def drawn_names(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('#runs tbody label')].map((label) => label.innerText)")


def colors(page: Page) -> dict[str, str]:
    """Return the colours of the drawn runs in the table."""
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#runs tr.chosen')].map((row) => "
        "[row.querySelector('label').innerText, getComputedStyle(row.querySelector('.swatch')).background]))"
    )


def click_run(page: Page, name: str) -> None:
    find = f"[...document.querySelectorAll('#runs label.run-label')].find((one) => one.innerText === '{name}')"
    was_drawn = page.evaluate(f"{find}.querySelector('input').checked")
    page.evaluate(f"{find}.click()")
    page.wait(f"{find}.querySelector('input').checked === {str(not was_drawn).lower()}")


def write_spike(run_dir: Path) -> dict[int, float]:
    """Write a run of 10,000 steps with a spike of 12, and return the exponential mean of its loss by step."""
    run_dir.mkdir()
    means = {}
    mean = total = 0.0
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            loss = 4.5 if 6200 <= step < 6212 else 2.0 + 0.1 * math.sin(step)
            record = {"step": step, "loss": loss, "lr": 1e-3 * min(1, step / 5000), "tokens": 2048 * step}
            file.write(json.dumps(record | ({"eval_loss": 2.0 + 1 / step} if step % 100 == 0 else {})) + "\n")
            mean = 0.9 * mean + 0.1 * loss
            total = 0.9 * total + 0.1
            means[step] = mean / total
    return means


def go_to(page: Page, fragment: str) -> None:
    """Change the fragment of the address, as pasted into the same tab."""
    page.evaluate(f"(window.isOld = true, location.hash = '{fragment}')")
    page.wait("!window.isOld && document.getElementById('panel').dataset.ready === 'curves'")


def assert_smoothing(page: Page, means: dict[int, float], ranges: list[str]) -> None:
    """Compare the legend under the cursor with the mean over all steps, at several zooms."""
    for part in ranges:
        go_to(page, f"smooth=0.9{part}")
        page.wait(f"{legend()}.includes('value / smoothed')")
        # Points of the picture, by the keyboard: step, value and mean.
        page.evaluate(f"{LOSS}.querySelector('.plot').focus()")
        page.key("Home")
        for _ in range(5):
            text = page.evaluate(legend())
            step, mean = re.search(r"step([\d,]+), value / smoothed.* / ([\d.]+)", text).groups()
            assert float(mean) == pytest.approx(means[int(step.replace(",", ""))], abs=1e-3)
            page.key("PageDown")
        assert not page.evaluate(f"{legend('eval_loss')}.includes('smoothed')")
        assert not page.evaluate(f"{legend('lr')}.includes('smoothed')")


def test_smoothing_is_by_step_at_every_zoom(page, tmp_path):
    means = write_spike(tmp_path / "run")
    with served(tmp_path) as address:
        page.open(address, 1280)
        assert_smoothing(page, means, ["", "&from=5800&to=6800", "&from=6190&to=6240"])
        # The last value of a picture that ends after the spike.
        go_to(page, "smooth=0.9&from=5800&to=6215")
        page.wait(f"{legend()}.includes('step6,215')")
        assert page.evaluate(legend()).endswith(f"/ {means[6215]:.4g}")
        assert page.problems == []
        # A request to a server that has ended would be a problem of the next page.
        page.leave()
    export_board(RunList([tmp_path / "run"]), tmp_path / "board")
    page.open((tmp_path / "board/index.html").as_uri(), 1280)
    assert_smoothing(page, means, ["", "&from=6190&to=6240"])
    assert page.problems == []


def test_the_view_is_in_the_address_and_comes_back(page, folder):
    state = (
        "JSON.stringify([[...document.querySelectorAll('.toolbar select, .toolbar input')].map((one) => one.value),"
        f"{LOSS}.querySelector('button').getAttribute('aria-pressed'), {LOSS}.className.trim(),"
        "[...document.querySelectorAll('#runs input:checked')].length,"
        "document.querySelector('th[aria-sort]:not([aria-sort=none])').innerText])"
    )
    with served(folder) as address:
        show(page, address, "curves")
        click_run(page, "two")
        for index, value in ((0, "tokens"), (1, "0.97")):
            set_value(page, "select", index, value)
        for index, value in ((0, "10000"), (1, "50000")):
            set_value(page, "input", index, value)
        page.evaluate(f"[...{LOSS}.querySelectorAll('button')].forEach((button) => button.click())")
        page.evaluate("document.getElementById('sort-loss').click()")
        page.evaluate("document.getElementById('sort-loss').click()")
        page.wait("location.hash.includes('sort=-loss')")
        before = page.evaluate(state)
        assert json.loads(before) == [["tokens", "0.97", "10000", "50000"], "true", "card wide", 1, "loss ▼"]
        page.evaluate("location.reload()")
        page.wait("document.readyState === 'complete' && document.getElementById('panel').dataset.ready === 'curves'")
        page.wait(f"{LOSS}.querySelector('.u-over')")
        assert page.evaluate(state) == before
        # Finer points of the range in tokens are asked for in steps.
        assert any("first=4&last=25&smooth=0.97" in request for request in page.requests)
        # The link to skip the table keeps the address.
        page.evaluate("document.querySelector('.skip').click()")
        assert "smooth=0.97" in page.evaluate("location.hash")
        assert page.problems == []


def test_a_zoom_without_points_says_so_and_leads_back(page, folder):
    with served(folder) as address:
        page.open(f"{address}#from=5800&to=6800", 1280)
        page.wait(
            "document.querySelector('.missing').innerText.startsWith('No points in this range: the drawn runs end at')"
        )
        assert page.evaluate("[...document.querySelectorAll('.card')].every((card) => !card.clientWidth)")
        page.evaluate("document.querySelector('.missing button').click()")
        page.wait(f"{LOSS}.querySelector('.u-over').clientWidth > 0")
        assert page.evaluate("document.querySelector('.missing').innerText") == ""
        # One of the runs ends before the range; the range has no evaluation.
        for index, value in ((0, "31"), (1, "38")):
            set_value(page, "input", index, value)
        page.wait("document.querySelector('.missing').innerText.startsWith('No points in this range: two.')")
        held_out = LOSS.replace("'loss'", "'eval_loss'")
        page.wait(f"{held_out}.textContent.includes('No points in this range: Whole run')")
        page.evaluate(f"{held_out}.querySelector('.nothing button').click()")
        page.wait(f"{held_out}.querySelector('.u-over')")
        assert page.problems == []


def test_colours_of_runs_depend_on_no_order_of_clicks_and_no_reload(page, tmp_path):
    names = [f"run-{i}" for i in (1, 2, 3, 10, 11, 12, 20, 21, 22, 23)]
    for name in names:
        write_run(tmp_path / name, 3)
    with served(tmp_path) as address:
        show(page, address, "curves")
        page.evaluate("document.querySelector('.draw-shown').click()")
        page.wait("document.querySelectorAll('#runs tr.chosen').length === 10")
        first = colors(page)
        assert len(set(first.values())) == 10
        page.evaluate("document.querySelector('.draw-none').click()")
        page.wait("document.querySelectorAll('#runs tr.chosen').length === 0")
        for name in ("run-23", "run-2", "run-10"):
            click_run(page, name)
        assert colors(page) == {name: first[name] for name in ("run-23", "run-2", "run-10")}
        page.wait(f"{LOSS}.querySelectorAll('.u-legend .u-series').length === 4")
        show(page, address, "curves")
        assert colors(page).items() <= first.items()
        assert page.problems == []


def test_the_table_is_sorted_by_clicks_and_has_drawn_runs_first(page, tmp_path):
    for age, name in enumerate(("run-10", "run-2", "run-1", "other", "run-3", "run-20", "run-11")):
        run_dir = write_run(tmp_path / name, 1000 if name == "run-2" else 3)
        os.utime(run_dir / "metrics.jsonl", (time.time() - 4000 * age - 10,) * 2)
    with served(tmp_path) as address:
        show(page, address, "curves")
        newest = ["run-10", "run-2", "run-1", "other", "run-3", "run-20", "run-11"]
        assert drawn_names(page) == newest
        assert page.evaluate("document.querySelectorAll('#runs input:checked').length") == 4
        assert "1,000 of 1,000" in page.evaluate("document.getElementById('runs').innerText")
        click_run(page, "run-11")
        click_run(page, "run-10")
        assert drawn_names(page) == ["run-2", "run-1", "other", "run-11", "run-10", "run-3", "run-20"]
        page.evaluate("document.querySelector('.draw-none').click()")
        page.wait("document.querySelectorAll('#runs input:checked').length === 0")
        page.evaluate("document.getElementById('sort-run').click()")
        page.wait("document.querySelector('#runs tbody label').innerText === 'other'")
        assert drawn_names(page) == ["other", "run-1", "run-2", "run-3", "run-10", "run-11", "run-20"]
        page.evaluate("document.getElementById('sort-run').focus()")
        page.key("Enter")
        page.wait("document.querySelector('#runs tbody label').innerText === 'run-20'")
        assert page.evaluate("document.activeElement.id") == "sort-run"
        page.evaluate("document.getElementById('sort-step').click()")
        page.wait("document.querySelector('#runs tbody label').innerText === 'run-2'")
        assert page.problems == []


def test_more_runs_than_can_be_drawn_are_said_to_be(page, tmp_path):
    for i in range(MAX_OPEN + 2):
        write_run(tmp_path / f"run-{i}", 2)
    with served(tmp_path) as address:
        show(page, address, "curves")
        page.evaluate("document.querySelector('.draw-shown').click()")
        page.wait(f"document.querySelectorAll('#runs input:checked').length === {MAX_OPEN}")
        count = page.evaluate("document.querySelector('.run-count').innerText")
        assert count == f"{MAX_OPEN} of {MAX_OPEN + 2} drawn, the most at once: uncheck one to draw another"
        page.wait(f"{LOSS}.querySelectorAll('.u-legend .u-series').length === {MAX_OPEN + 1}")
        assert len(set(colors(page).values())) == MAX_OPEN
        assert page.problems == []


def test_a_folder_without_runs_waits_for_the_first(page, tmp_path):
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as address:
        page.open(address, 1280)
        page.wait("document.getElementById('panel').innerText.includes('No runs yet')")
        assert str(tmp_path / "runs") in page.evaluate("document.getElementById('panel').innerText")
        assert page.evaluate("document.getElementById('status').innerText") == "waiting for a run"
        write_run(tmp_path / "runs/first", 12)
        page.wait(f"{LOSS}.querySelector('.u-over')")
        assert drawn_names(page) == ["first"]
        assert page.problems == []


def test_damage_of_a_run_stands_in_its_row_and_the_others_go_on(page, tmp_path):
    for name in ("cut", "gone", "nan", "old", "good"):
        write_run(tmp_path / name, 20)
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    with (tmp_path / "nan/metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(json.dumps({"step": step, "loss": None, "nonfinite": {"loss": "nan"}}) + "\n")
    settings = json.loads((tmp_path / "old/config.json").read_text())
    del settings["moe"]
    (tmp_path / "old/config.json").write_text(json.dumps(settings))
    # A row, and the one below it.
    row = (
        "[...document.querySelectorAll('#runs tbody tr')].filter((one) => "
        "(one.previousSibling?.innerText.startsWith('{0}') && !one.querySelector('label')) || "
        "one.innerText.startsWith('{0}')).map((one) => one.innerText).join(' ')"
    )
    with served(tmp_path) as address:
        show(page, address, "curves")
        page.wait(f"{row.format('cut')}.includes('the last line is not complete; it is left out')")
        page.wait(f"{row.format('old')}.includes('config.json is of another version of moefold: it has no moe.')")
        page.wait(f"{row.format('nan')}.includes('nan') && {row.format('nan')}.includes('10,000')")
        (tmp_path / "gone").rename(tmp_path / ".gone")
        page.wait(f"{row.format('gone')}.includes('the folder is gone: this is what was read of it')")
        with (tmp_path / "good/metrics.jsonl").open("a") as file:
            file.write(json.dumps(to_record(step_metrics(21, loss=7.125))) + "\n")
        page.wait(f"{row.format('good')}.includes('7.125')")
        page.evaluate("document.querySelector('.draw-none')?.click()")
        for name in ("nan",):
            click_run(page, name)
        page.wait(f"{LOSS}.innerText.includes('10,000 values, none of them finite')")
        assert page.problems == []
