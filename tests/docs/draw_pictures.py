"""Draw the pictures of README.md and of the pages that show commands: `python -m tests.docs.draw_pictures [FOLDER]`.

Trains the quickstart in FOLDER (default build/pictures) if it is not there: some minutes on a few cores. Views of
the board need Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.board.board_process import served as board_served
from tests.board.chromium import Page, open_page
from tests.board.draw_pictures import open_view, page_keys

IMAGES = Path(__file__).parents[2] / "docs/images"
STAGE = ("world_size=4", "tp=2", "cp=2", "ep=4")
"""The ranks of one pipeline stage of the quickstart."""
OVERLAPPED = ("parallel.schedule=interleaved", "parallel.overlap_experts=true", "train.global_batch_size=128")
"""An interleaved step of few micro-batches, whose passes overlap."""
COLORS = 128


def moefold(*words: object) -> None:
    """Run a command of moefold."""
    subprocess.run([sys.executable, "-m", "moefold", *map(str, words)], check=True)


def draw_run(folder: Path) -> None:
    """Train the quickstart, and write loss.png and expert-load.png."""
    run = folder / "quickstart"
    if not (run / "loss.png").exists():
        moefold("train", "recipes/quickstart.toml", f"run.dir={run}")
    shutil.copyfile(run / "loss.png", IMAGES / "loss.png")
    moefold("inspect", run, "--force", "--picture", IMAGES / "expert-load.png")


def draw_ranks(page: Page, folder: Path) -> None:
    """Write board-ranks.png: the times of ranks on the board."""
    with board_served(folder) as address:
        open_view(page, address, f"view=ranks&runs={page_keys(page, address)['quickstart']}", 1180)
        page.screenshot(IMAGES / "board-ranks.png")


def reduce_colors(path: Path) -> None:
    """Store a picture of few colours with a palette, in a fraction of the bytes."""
    Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def main(argv: list[str]) -> None:
    """Train and draw."""
    folder = Path(argv[0] if argv else "build/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    moefold("layout", *STAGE, "--force", "--picture", IMAGES / "folding.png")
    moefold("layout", "recipes/quickstart.toml", "--force", "--picture", IMAGES / "layout.png")
    moefold("simulate", "recipes/mixtral-8x7b.toml", *OVERLAPPED, "--force", "--timeline", IMAGES / "timeline.png")
    draw_run(folder)
    with tempfile.TemporaryDirectory() as profile, open_page(Path(profile)) as page:
        draw_ranks(page, folder)
    for name in ("folding", "layout", "timeline", "expert-load", "board-ranks"):
        reduce_colors(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
