"""Where the files lie that came with weights from Hugging Face: tokenizer, templates, configs. Torch-free."""

from pathlib import Path

SIDECAR_DIR = "hf"
"""Folder in a checkpoint, or beside the checkpoints of a run, with what came with the weights from Hugging Face."""
TOKENIZER_FILE = "tokenizer.json"
"""The tokenizer that moefold reads text with."""
UNSUPPORTED_TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)
"""What it does not read."""
RECIPE_FILE = "recipe.toml"
"""Beside imported and upcycled weights: a recipe that trains on from them."""


def find_sidecar_dir(checkpoint: Path) -> Path | None:
    """The folder of what came with a checkpoint's weights: in it, or beside it; None if there is none."""
    for folder in (checkpoint / SIDECAR_DIR, checkpoint.parent / SIDECAR_DIR):
        if folder.is_dir():
            return folder
    return None


def tokenizer_unsupported_reason(folder: Path, alternative: str) -> str:
    """Why a run from a folder could read no text with the model's own tokenizer, and the ways out; empty if it can.

    Args:
        folder: what came with the weights.
        alternative: the way out that takes no files.
    """
    if (folder / TOKENIZER_FILE).is_file():
        return ""
    others = [file.name for pattern in UNSUPPORTED_TOKENIZER_FILES for file in sorted(folder.glob(pattern))]
    if not others:
        return (
            f"{str(folder)!r} has no tokenizer ({TOKENIZER_FILE}), so the model could read no text; "
            f"add its files, or {alternative}"
        )
    return (
        f"{str(folder)!r} has {others[0]}, but no {TOKENIZER_FILE}, which moefold reads text with; save one with "
        f"transformers (AutoTokenizer.from_pretrained(HF_DIR).save_pretrained(HF_DIR)), or {alternative}"
    )
