"""Draw the pictures of docs/board.md from real runs: `python -m tests.board.draw_pictures [FOLDER]`.

Trains what FOLDER (default build/board-pictures) does not have yet: some minutes on a few cores. Needs Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.board.board_process import served
from tests.board.chromium import Page, open_page

IMAGES = Path(__file__).parents[2] / "docs/images"
QUICKSTART = ("recipes/quickstart.toml", "run.steps=150", "metrics.memory_every=10")
RUNS = {
    "base": QUICKSTART,
    "lr-4e-3": (*QUICKSTART, "train.lr=4e-3"),
    "no-balancing": (*QUICKSTART, "moe.aux_loss=0.0"),
}
"""Settings of `moefold train` by the name of the run."""


def train(folder: Path) -> None:
    """Train the runs that a folder lacks."""
    for name, settings in RUNS.items():
        if not (folder / name).exists():
            command = [sys.executable, "-m", "moefold", "train", *settings, f"run.dir={folder / name}"]
            subprocess.run(command, check=True)


def open_view(page: Page, address: str, fragment: str, width: int = 1280, theme: str = "light") -> None:
    """Open a view and wait until it is drawn."""
    page.open(f"{address}#{fragment}", width, 860, theme=theme)
    view = fragment.partition("view=")[2].partition("&")[0]
    page.wait(f"document.getElementById('panel').dataset.ready === {view!r}")
    page.wait("!document.getElementById('runs').innerText.includes('reading')")


def draw(page: Page, address: str, folder: Path) -> None:
    """Write board-curves.png, board-experts.png and board-narrow.png into a folder."""
    keys = page_keys(page, address)
    trained = ",".join(keys[name] for name in RUNS)
    open_view(page, address, f"view=curves&runs={trained}&smooth=0.9")
    page.screenshot(folder / "board-curves.png")
    open_view(page, address, f"view=experts&runs={keys['no-balancing']}")
    page.evaluate("window.scrollTo(0, document.getElementById('tabs').offsetTop)")
    page.screenshot(folder / "board-experts.png")
    halves = []
    for fragment in (f"view=curves&runs={trained}&smooth=0.9", f"view=ranks&runs={keys['base']}"):
        open_view(page, address, fragment, 400, "dark")
        half = folder / f"half-{len(halves)}.png"
        page.screenshot(half)
        halves.append(Image.open(half))
        half.unlink()
    narrow = Image.new("RGB", (816, 860), "#777777")
    for i, picture in enumerate(halves):
        narrow.paste(picture, (416 * i, 0))
    narrow.save(folder / "board-narrow.png", optimize=True)


def page_keys(page: Page, address: str) -> dict[str, str]:
    """Return the keys of the runs by their names."""
    open_view(page, address, "view=recipes")
    answer: dict[str, str] = page.evaluate(
        "fetch('api/runs').then((answer) => answer.json())"
        ".then(({ runs }) => Object.fromEntries(runs.map((run) => [run.name, run.key])))"
    )
    return answer


def main(argv: list[str]) -> None:
    """Train and draw."""
    folder = Path(argv[0] if argv else "build/board-pictures")
    train(folder)
    with tempfile.TemporaryDirectory() as profile, open_page(Path(profile)) as page, served(folder) as address:
        draw(page, address, IMAGES)


if __name__ == "__main__":
    main(sys.argv[1:])
