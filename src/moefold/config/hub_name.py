"""Names on the Hugging Face hub where a file or folder is asked for, and how to fetch what they mean. Torch-free."""

import re
import shlex
from pathlib import Path
from typing import Literal

HubKind = Literal["model", "dataset"]
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILE_ENDINGS = frozenset(
    {".arrow", ".bin", ".csv", ".gz", ".jinja", ".json", ".jsonl", ".md", ".ndjson", ".npy", ".parquet", ".py"}
    | {".safetensors", ".toml", ".tsv", ".txt", ".zst"}
)
_LOCAL_FOLDER_NAMES = frozenset({"checkpoints", "data", "recipes", "runs", "src", "tests", "tokens"})
"""First folders of paths that users type in this program: a slip in one of these is no name on the hub."""


def is_hub_name(name: str, *, bare: bool = False) -> bool:
    """Whether a name that is no path here has the form of one on the hub: "owner/name", and "gpt2" with `bare`."""
    parts = name.split("/")
    if len(parts) not in ((1, 2) if bare else (2,)) or not all(map(_PART.fullmatch, parts)):
        return False
    if Path(name).suffix.lower() in _FILE_ENDINGS or (len(parts) == 2 and parts[0] in _LOCAL_FOLDER_NAMES):
        return False
    # Where the first folder is there, the second part is a slip.
    return len(parts) == 1 or not Path(parts[0]).exists()


def download_advice(name: str, kind: HubKind = "model", *, bare: bool = False) -> str:
    """Return the command that fetches what a name means on the hub; empty if it cannot be a name there.

    Args:
        name: what the user typed, which is no path here.
        kind: of the repository on the hub.
        bare: whether a name without an owner may be one: some old tokenizers have such names.
    """
    if not is_hub_name(name, bare=bare):
        return ""
    folder = name.rpartition("/")[2]
    option = " --repo-type dataset" if kind == "dataset" else ""
    return (
        f"it reads like a name on the Hugging Face hub, from which moefold downloads nothing: type `hf download "
        f"{shlex.quote(name)}{option} --local-dir {shlex.quote(folder)}`, then name the folder {folder!r}"
    )
