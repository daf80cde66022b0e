"""The page of the board and its static files, served or exported."""

from importlib.resources import files
from pathlib import Path

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
STATIC_FILES = {
    file.name: _MEDIA_TYPES[suffix]
    for file in files("moefold.board").joinpath("static").iterdir()
    if (suffix := Path(file.name).suffix) in _MEDIA_TYPES
}
"""Files in `static/` without the page, with their media types."""
DATA_SCRIPT = "data.js"
"""Script of an export with the data. The page of a server does not load it."""


def page(*, is_export: bool = False) -> str:
    """Return the HTML of the page, with `is_export` of a static export with its data."""
    html = files("moefold.board").joinpath("static", "index.html").read_text(encoding="utf-8")
    placeholder = "<!-- data -->"
    assert placeholder in html, "the page has a place for the script of the data"
    return html.replace(placeholder, f'<script src="{DATA_SCRIPT}"></script>' if is_export else "")
