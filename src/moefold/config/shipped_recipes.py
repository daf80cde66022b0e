"""Shipped recipes: the folder recipes/ of a checkout, or its copy in an installed package."""

from pathlib import Path

EXTRA_FILES = {
    "dpo": ("preferences.jsonl",),
    "lora": ("conversations.jsonl",),
    "sft": ("conversations.jsonl",),
    "sort-align": ("plain.jinja",),
}
"""Additional files that a recipe reads, by recipe name."""
TEMPLATES = {"slurm": "slurm.sbatch"}
"""Shipped files other than recipes, by name."""


def shipped_folder() -> Path:
    """Return the folder of the shipped recipes."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def shipped_files() -> dict[str, tuple[Path, ...]]:
    """Return the files of each recipe or template by name. The first is the recipe or template itself.

    The name of a recipe is its path in the folder of recipes, without .toml: sft, pretrain/mixtral-8x7b.
    """
    folder = shipped_folder()
    files = dict[str, tuple[Path, ...]]()
    for path in folder.rglob("*.toml"):
        name = path.relative_to(folder).with_suffix("").as_posix()
        files[name] = (path, *(folder / extra for extra in EXTRA_FILES.get(name, ())))
    files |= {name: (folder / file,) for name, file in TEMPLATES.items() if (folder / file).is_file()}
    return dict(sorted(files.items()))
