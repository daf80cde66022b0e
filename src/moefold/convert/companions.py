"""Where the files lie that came with weights from Hugging Face: tokenizer, templates, configs. Torch-free."""

from pathlib import Path

COMPANIONS = "hf"
"""Folder in a checkpoint, or beside the checkpoints of a run, with what came with the weights from Hugging Face."""
TOKENIZER = "tokenizer.json"
"""The tokenizer that moefold reads text with."""
RECIPE_FILE = "recipe.toml"
"""Beside imported and upcycled weights: a recipe that trains on from them."""


def find_companions(checkpoint: Path) -> Path | None:
    """The folder of what came with a checkpoint's weights: in it, or beside it; None if there is none."""
    for folder in (checkpoint / COMPANIONS, checkpoint.parent / COMPANIONS):
        if folder.is_dir():
            return folder
    return None
