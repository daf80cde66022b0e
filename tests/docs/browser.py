"""A headless Chromium for pages of the site: pictures, and measures of their layout in a narrow frame."""

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
FRAME = """<!doctype html><body style="margin:0"><script>
const pages = {pages}, width = {width}, found = {{}};
async function measure(page) {{
  const frame = document.createElement("iframe");
  frame.style = `width:${{width}}px;height:900px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const doc = frame.contentDocument;
  found[page] = {{
    width: doc.documentElement.scrollWidth,
    broken: [...doc.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
    heading: doc.querySelector("h1") ? doc.querySelector("h1").innerText : "",
    has_search: !!doc.querySelector(".md-search__input"),
    foreign: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name)
      .filter(name => !name.startsWith(location.origin)),
  }};
  frame.remove();
}}
(async () => {{
  for (const page of pages) await measure(page);
  await fetch("/found", {{method: "POST", body: JSON.stringify(found)}});
}})();
</script>"""


SEARCH = """<!doctype html><body style="margin:0"><script>
const queries = {queries}, found = {{}};
async function results(query) {{
  const frame = document.createElement("iframe");
  frame.style = "width:1280px;height:900px;border:0";
  frame.src = "/index.html?q=" + encodeURIComponent(query);
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  let links = [];
  for (let wait = 0; !links.length && wait < 300; wait++) {{
    await new Promise(done => setTimeout(done, 100));
    links = [...frame.contentDocument.querySelectorAll(".md-search-result__link")].map(link => link.href);
  }}
  frame.remove();
  return links;
}}
(async () => {{
  for (const query of queries) found[query] = await results(query);
  await fetch("/found", {{method: "POST", body: JSON.stringify(found)}});
}})();
</script>"""


def chromium() -> str | None:
    """Return the path of Chromium or Chrome, None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class _Server(http.server.ThreadingHTTPServer):
    """A server of a folder that keeps the posts of a page."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
        self.posted: queue.Queue[str] = queue.Queue()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that the browser closes early."""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass

    def do_POST(self) -> None:
        self.server.posted.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()


@contextmanager
def served(folder: Path) -> Iterator[_Server]:
    """Serve a folder at a free port of the loopback interface."""
    server = _Server(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measure_pages(site: Path, pages: Sequence[str], width: int, profile: Path) -> dict[str, dict[str, object]]:
    """Return the layout of pages in a frame of a width: scroll width, broken pictures, heading, foreign requests."""
    return _posted_by(FRAME.format(pages=json.dumps([f"/{page}" for page in pages]), width=width), site, profile)


def search(site: Path, queries: Sequence[str], profile: Path) -> dict[str, list[str]]:
    """Return the addresses of the results of the site's own search for each query, best first."""
    return _posted_by(SEARCH.format(queries=json.dumps(list(queries))), site, profile)


def _posted_by(program: str, site: Path, profile: Path) -> Any:
    """Open a page next to the pages of the site and return its post."""
    page = site / "page-of-a-test.html"
    page.write_text(program)
    try:
        with served(site) as server, _browser(profile, f"{server.address}/{page.name}"):
            return json.loads(server.posted.get(timeout=LIMIT_S))
    finally:
        page.unlink()


def take_picture(site: Path, page: str, size: tuple[int, int], is_dark: bool, picture: Path, profile: Path) -> None:
    """Write a picture of a page as PNG."""
    flags = (
        f"--screenshot={picture}",
        f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        "--virtual-time-budget=4000",
    )
    with served(site) as server, _browser(profile, f"{server.address}/{page}", *flags) as process:
        assert process.wait(LIMIT_S) == 0


@contextmanager
def _browser(profile: Path, address: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the browser in a process group of its own, and end the group."""
    program = chromium()
    assert program is not None
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", *flags, address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
