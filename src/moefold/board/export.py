"""Static export of the board: a folder that a browser opens without a server."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from moefold.board.metric_table import WEIGHTS
from moefold.board.page import DATA_SCRIPT, STATIC_FILES, page
from moefold.board.rollout_index import RolloutQuery
from moefold.board.run_list import MAX_OPEN, RunList
from moefold.board.run_reader import RunReader
from moefold.errors import ConfigError
from moefold.message_text import Setting, format_list

MAX_POINTS = 3000
"""Maximum points of a metric. Its minima and maxima are kept for any length of a run."""
MAX_ROLLOUTS = 1000
"""Number of newest rollouts of a run that are exported with their texts."""


def export_board(runs: RunList, folder: Path, *, force: bool = False) -> list[str]:
    """Read all runs to their ends and write the board into a folder, whole or not at all, and return their names."""
    if not runs.readers:
        raise ConfigError(
            f"--export has nothing to write: no run below {format_list([str(path) for path in runs.folders])}, where "
            "none has a metrics.jsonl or the config.json of a run"
        )
    option = Setting("--export", str(folder))
    if folder.exists() and not (force and _is_export(folder)):
        if _is_export(folder):
            raise ConfigError(f"{option} exists already; add --force to replace it, or name another folder")
        raise ConfigError(f"{option} exists and is not an export of a board; name another folder")
    summaries: list[dict[str, Any]] = []
    answers: dict[str, dict[str, Any]] = {}
    for reader in runs.readers:
        answers[reader.run.key] = _answers(reader)
        summaries.append(runs.summary(reader))
    data = {
        "exported_s": time.time(),
        "runs": summaries,
        "max_chosen": MAX_OPEN,
        "smoothing": WEIGHTS,
        "data": answers,
    }
    try:
        with _new_folder(folder) as draft:
            (draft / "static").mkdir()
            for name in STATIC_FILES:
                content = files("moefold.board").joinpath("static", name).read_bytes()
                (draft / "static" / name).write_bytes(content)
            (draft / "index.html").write_text(page(is_export=True), encoding="utf-8")
            # ASCII, so that no separator of lines ends the script.
            (draft / DATA_SCRIPT).write_text(
                f"window.MOEFOLD_BOARD = {json.dumps(data, allow_nan=False)};\n", encoding="ascii"
            )
    except OSError as error:
        raise ConfigError(f"{option} cannot be written: {error.strerror or error}") from None
    return [reader.run.name for reader in runs.readers]


def _answers(reader: RunReader) -> dict[str, Any]:
    """Return every answer that the page requests. Curves have all means, which need every step."""
    reader.read()
    while reader.summary()["has_more"]:
        reader.read()
    return {
        "series": reader.series(max_points=MAX_POINTS, weights=WEIGHTS),
        "experts": reader.experts(),
        "memory": reader.memory(),
        "ranks": reader.ranks(),
        "faults": reader.faults(),
        "rollouts": reader.rollouts(RolloutQuery(limit=MAX_ROLLOUTS)),
        "recipe": reader.recipe(),
    }


def _is_export(folder: Path) -> bool:
    return (folder / "index.html").is_file() and (folder / DATA_SCRIPT).is_file()


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder as a draft that is renamed at the end, so that an interrupted export leaves nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        draft.chmod(0o755)
        yield draft
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
