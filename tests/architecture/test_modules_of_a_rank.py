"""The modules of the package in a training process: after the import of the trainer, and after a rank's first step."""

import subprocess
import sys
from pathlib import Path

from moefold.config.base.part import Part
from moefold.config.base.part_registry import all_groups
from moefold.config.chosen import tables_in
from moefold.recipe import load_config
from moefold.train.callbacks.callback import Callback

PRODUCTS = ("cli", "convert", "inference", "planner", "rl", "serve", "sites")
"""Folders that training does not need unless the recipe asks for them."""
MAX_OF_TRAINER = 220
MAX_OF_RANK = 367
LISTED = "import sys; print(*(name for name in sys.modules if name.split('.')[0] == 'moefold'))"
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.toml"
SHORT = """
run.steps=1 train.warmup_steps=0 train.eval_every=0 parallel.world_size=2 parallel.tp=1 parallel.cp=1 parallel.pp=1
parallel.ep=2 train.micro_batch_size=1 train.global_batch_size=2
"""


class Listing(Callback):
    """Write the names of the loaded modules after the first step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_step(self, run, step) -> None:
        if run.is_first_rank:
            self._path.write_text(" ".join(name for name in sys.modules if name.split(".")[0] == "moefold"))


def folders(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if "." in name}


def run_python(code: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()


def test_the_trainer_needs_no_module_of_a_product():
    names = run_python(f"import moefold.train.trainer; {LISTED}")
    assert folders(names).isdisjoint(PRODUCTS)
    assert len(names) <= MAX_OF_TRAINER


def test_a_recipe_imports_the_kinds_that_it_names():
    loaded = run_python(
        "import sys; from moefold.recipe import load_config; from moefold.validate.config import check_config; "
        f"cfg = load_config({str(RECIPE)!r}); check_config(cfg); print(*sys.modules)"
    )
    parts = {".".join(name.split(".")[2:4]) for name in loaded if name.startswith("moefold.parts.")}
    named = {kind_in_words(value) for _, value in tables_in(load_config(RECIPE)) if isinstance(value, Part)}
    folders = {group.group for group in all_groups()}
    assert parts - folders <= named
    assert named <= parts


def kind_in_words(part: Part) -> str:
    return ".".join(type(part).__module__.split(".")[2:4])


def test_a_rank_has_no_module_of_a_product_after_its_first_step(tmp_path):
    """The rank is a fork of the process that has checked the recipe, whose modules it has too."""
    listing = tmp_path / "modules"
    words = [*SHORT.split(), f"run.dir={tmp_path / 'run'}"]
    code = (
        "from pathlib import Path; import moefold; from tests.architecture.test_modules_of_a_rank import Listing; "
        f"moefold.train_model({str(RECIPE)!r}, {words!r}, callbacks=(Listing(Path({str(listing)!r})),))"
    )
    run_python(code)
    names = listing.read_text().split()
    assert folders(names).isdisjoint(PRODUCTS)
    assert len(names) <= MAX_OF_RANK
