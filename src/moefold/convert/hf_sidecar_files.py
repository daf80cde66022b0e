"""Files next to the weights of a Hugging Face folder: tokenizer, recipe, duplicate tensors."""

from pathlib import Path

from moefold.bounded_read import MAX_RECIPE_BYTES, parse_toml, read_text
from moefold.config.model import ModelConfig
from moefold.convert.families.family import Family
from moefold.data.hf_tokenizer.tokenizer_folder import missing_file_reason, read_tokenizer_folder, tokenizer_file
from moefold.data.input_paths import TOKENIZER_FILE
from moefold.errors import ConfigError
from moefold.remote_copy import local_copy
from moefold.remote_path import is_remote

SIDECAR_DIR = "hf"
"""Folder of sidecar files from Hugging Face, in a checkpoint or next to the checkpoints of a run."""


RECIPE_FILE = "recipe.toml"
"""Recipe next to imported and upcycled weights that continues training from them."""


def find_sidecar_dir(checkpoint: Path) -> Path | None:
    """Return the folder of a checkpoint's sidecar files, in or next to the checkpoint, or None if it does not exist.

    Files of a remote checkpoint are copied to this machine.
    """
    for folder in (checkpoint / SIDECAR_DIR, checkpoint.parent / SIDECAR_DIR):
        if folder.is_dir():
            return local_copy(str(folder)) if is_remote(folder) else folder
    return None


def recipe_tokenizer(path: Path) -> str:
    """Return the tokenizer of the recipe next to imported or upcycled weights, or "" if there is none."""
    try:
        recipe = parse_toml(read_text(path / RECIPE_FILE, MAX_RECIPE_BYTES))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / RECIPE_FILE} cannot be read ({error}); repair or remove it") from error
    data = recipe.get("data")
    tokenizer = data.get("tokenizer", "") if isinstance(data, dict) else ""
    return tokenizer if isinstance(tokenizer, str) else ""


def tokenizer_unsupported_reason(folder: Path, alternative: str) -> str:
    """Return why a run cannot use a folder's tokenizer, with the way out `alternative`. Empty means that it can."""
    if (file := tokenizer_file(folder)).is_file():
        if file.name == TOKENIZER_FILE:
            return ""
        try:
            read_tokenizer_folder(folder)
        except ConfigError as error:
            return f"{error}, or {alternative}"
        return ""
    return f"{missing_file_reason(folder)}, or {alternative}"


HEAD_NAME = "lm_head.weight"
"""Name of the LM head in all families."""


EMBEDDING_NAME = "model.embed_tokens.weight"
"""Name of the embedding in all families."""


DUPLICATE_REASONS = {EMBEDDING_NAME: "the embedding again", HEAD_NAME: "the head again"}
"""Reason to ignore a duplicate tensor, by its original. Manifests record it."""


def find_duplicate_tensors(model: ModelConfig, family: Family) -> dict[str, str]:
    """Return the duplicate tensors that a folder may hold, each with its original.

    Duplicates are the head of tied embeddings, and the embedding and the head of each MTP layer. The published folder
    of DeepSeek-V3 has both, which transformers does not read. Folders of Qwen have no duplicates.
    """
    head = EMBEDDING_NAME if model.tie_embeddings else HEAD_NAME
    duplicates = {HEAD_NAME: EMBEDDING_NAME} if model.tie_embeddings else {}
    own_layers = model.mtp_layers if family.mtp_prefix == "model.layers." else 0
    for number in range(model.num_layers, model.num_layers + own_layers):
        duplicates[f"model.layers.{number}.embed_tokens.weight"] = EMBEDDING_NAME
        duplicates[f"model.layers.{number}.shared_head.head.weight"] = head
    return duplicates
