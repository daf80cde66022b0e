"""Plan the shipped recipes for numbers of GPUs again, each by the command in its head, and write the table of them.

    python -m benchmarks.planned_recipes            # writes recipes/*/*-NxGPU.toml and the table of docs/recipes.md
    python -m benchmarks.planned_recipes olmoe      # only paths with this word, and the table

To add one, run `moefold plan` with --recipe at the root of the repository, and then this.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import takewhile
from pathlib import Path

from moefold.cli.main import main as run_moefold
from moefold.topology.layout import DEGREES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
BEGIN = "<!-- planned recipes: python -m benchmarks.planned_recipes -->"
END = "<!-- end of planned recipes -->"
COLUMNS = ("recipe", "GPUs", "samples x tokens a step", "mapping", "tokens/s per GPU", "MFU", "GiB")
_HEAD = re.compile(
    r"# The planned mapping of \S+ on (?P<gpus>\d+) x (?P<gpu>\S+), for steps of (?P<batch>\d+ x \d+) tokens\.\n"
    r"# Planned by: moefold (?P<command>plan .+)\n"
    r"# (?P<mapping>.+): predicted \S+ s a step, (?P<rate>[\d,]+) tokens/s per GPU, MFU (?P<mfu>\d+)%, "
    r"(?P<gib>[\d.]+) GiB on the fullest GPU\.\n"
)

REASONS = "# With one axis changed and all others planned again, a step takes: "
"""Beginning of the line with the reasons for a mapping."""
SEARCHED_AXES = ("tp", "cp", "pp", "ep", "etp", "mbs")
"""Axes that the reasons halve and double."""
FIXED_AXES = (*SEARCHED_AXES, "zero")
"""Axes that define a mapping, to price the mapping itself."""


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe that `moefold plan` wrote, with the facts in its head."""

    path: Path
    """Path in the repository, such as recipes/pretrain/mixtral-8x7b-64xh100.toml."""
    num_gpus: int
    gpu: str
    command: tuple[str, ...]
    """Arguments of moefold."""
    mapping: dict[str, str]
    """Mapping axes as the planner names them."""
    tokens_per_s: str
    """Predicted tokens per second of one GPU."""
    memory_gib: float
    """Predicted memory of the fullest GPU."""
    row: tuple[str, ...]
    """Cells of the table, in the order of `COLUMNS`."""


def planned_recipes() -> list[PlannedRecipe]:
    """Return the planned recipes of the repository, by path and number of GPUs."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*-*x*.toml") if path.parent.name != "recipes"]
    heads = [read_head(path) for path in paths if re.search(r"-\d+x[a-z]+\d+$", path.stem)]
    return sorted(heads, key=lambda recipe: (recipe.path.parent, recipe.path.stem.rpartition("-")[0], recipe.num_gpus))


def read_head(path: Path) -> PlannedRecipe:
    """Read the head of a planned recipe.

    Raises:
        ValueError: the head is not as `moefold plan --recipe` writes it.
    """
    match = _HEAD.match((ROOT / path).read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{path} has no head of moefold plan --recipe")
    mapping = dict(axis.split("=") for axis in match["mapping"].split())
    shown = [f"{axis}{mapping[axis]}" for axis in DEGREES if mapping[axis] != "1" or axis == "ep"]
    shown = [" ".join([*shown, f"mbs{mapping['mbs']}", f"ZeRO-{mapping['zero']}"])]
    if "recompute" in mapping:
        shown.append(f"recomputes {mapping['recompute'].replace('+', ', ')}")
    if "offload" in mapping:
        shown.append(f"{mapping['offload'].replace('+', ', ')} in host memory")
    link = f"[{path.relative_to('recipes').with_suffix('')}](../{path})"
    cells = (link, match["gpus"], match["batch"], "; ".join(shown), match["rate"], f"{match['mfu']} %", match["gib"])
    return PlannedRecipe(
        path=path,
        num_gpus=int(match["gpus"]),
        gpu=match["gpu"],
        command=tuple(shlex.split(match["command"])),
        mapping=mapping,
        tokens_per_s=match["rate"],
        memory_gib=float(match["gib"]),
        row=cells,
    )


def plan_again(recipe: PlannedRecipe) -> str:
    """Return the present output of the command of a recipe, run on a copy of the recipes.

    Raises:
        RuntimeError: the command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "recipes", Path(folder) / "recipes")
        with chdir(folder), redirect_stdout(StringIO()):
            recipe.path.unlink()
            if run_moefold(list(recipe.command)):
                raise RuntimeError(f"moefold {shlex.join(recipe.command)} failed")
            return recipe.path.read_text(encoding="utf-8")


def reasons(recipe: PlannedRecipe) -> str:
    """Return the line with the gain of each axis of a mapping over its neighbours: half, double, other ZeRO stages."""
    chosen_s = _fastest_s(recipe, [f"{axis}={value}" for axis, value in recipe.mapping.items() if axis in FIXED_AXES])
    assert chosen_s is not None, "the mapping of the recipe fits"
    texts = []
    for axis in SEARCHED_AXES:
        value = int(recipe.mapping[axis])
        others = [_change(recipe, chosen_s, axis, other) for other in (value // 2, value * 2) if other]
        texts.append(f"{axis}: {', '.join(others)}")
    stages = [stage for stage in (1, 3) if stage != int(recipe.mapping["zero"])]
    texts.append(f"zero: {', '.join(_change(recipe, chosen_s, 'zero', stage) for stage in stages)}")
    return f"{REASONS}{'; '.join(texts)}.\n"


def _change(recipe: PlannedRecipe, chosen_s: float, axis: str, value: int) -> str:
    seconds = _fastest_s(recipe, [f"{axis}={value}"])
    return f"{value} not possible" if seconds is None else f"{value} {100 * (seconds / chosen_s - 1):+.1f} %"


def _fastest_s(recipe: PlannedRecipe, fixed: Sequence[str]) -> float | None:
    """Return the seconds of a step of the fastest mapping with some axes; None: it is not legal, or does not fit."""
    words = list(recipe.command)
    # A family that the command takes may not have the changed axis.
    for option in {"--recipe", "--take"}.intersection(words):
        index = words.index(option)
        del words[index : index + 2]
    words += [] if "--fix" in words else ["--fix"]
    index = words.index("--fix") + 1
    own = list(takewhile(lambda word: not word.startswith("--"), words[index:]))
    # An axis with two values is refused.
    axes = {word.split("=")[0] for word in fixed}
    words[index : index + len(own)] = [*(word for word in own if word.split("=")[0] not in axes), *fixed]
    output = StringIO()
    with chdir(ROOT), redirect_stdout(output), redirect_stderr(StringIO()):
        if run_moefold([*words, "--top", "1", "--json"]):
            return None
    return float(json.loads(output.getvalue())["mappings"][0]["step_time_s"])


def table() -> str:
    """Return the table of the planned recipes in Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(recipe.row for recipe in planned_recipes())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_with_table(page: str) -> str:
    """Return a page with the table between its two marks."""
    before, _, tail = page.partition(BEGIN)
    _, _, after = tail.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(words: Sequence[str]) -> None:
    """Plan the recipes whose path contains one of some words, or all, and write the table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for recipe in planned_recipes():
        if not words or any(word in str(recipe.path) for word in words):
            path = ROOT / recipe.path
            before = path.read_text(encoding="utf-8")
            plan = plan_again(recipe)
            path.write_text(plan, encoding="utf-8")
            first, second, third, tail = plan.split("\n", 3)
            text = "\n".join((first, second, third, reasons(read_head(recipe.path)) + tail))
            path.write_text(text, encoding="utf-8")
            print(f"{'unchanged' if text == before else 'changed'}: {recipe.path}", flush=True)
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
