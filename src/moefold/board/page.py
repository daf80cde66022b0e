"""The page of the board and its static files, served or exported."""

from importlib.resources import files

SCRIPT = "text/javascript; charset=utf-8"
STATIC_FILES = {
    "board.css": "text/css; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": SCRIPT,
    "uPlot.LICENSE.txt": "text/plain; charset=utf-8",
    "theme.js": SCRIPT,
    "elements.js": SCRIPT,
    "address.js": SCRIPT,
    "source.js": SCRIPT,
    "runs.js": SCRIPT,
    "curves.js": SCRIPT,
    "heatmap.js": SCRIPT,
    "experts.js": SCRIPT,
    "memory.js": SCRIPT,
    "ranks.js": SCRIPT,
    "faults.js": SCRIPT,
    "rollouts.js": SCRIPT,
    "recipes.js": SCRIPT,
    "board.js": SCRIPT,
}
"""Files in `static/` with their media types, scripts in the loading order of the page."""
DATA_SCRIPT = "data.js"
"""Script of an export with the data; the page of a server does not load it."""


def page(*, is_export: bool = False) -> str:
    """Return the HTML of the page, with `is_export` of a static export with its data."""
    html = files("moefold.board").joinpath("static", "index.html").read_text(encoding="utf-8")
    placeholder = "<!-- data -->"
    assert placeholder in html, "the page has a place for the script of the data"
    return html.replace(placeholder, f'<script src="{DATA_SCRIPT}"></script>' if is_export else "")
