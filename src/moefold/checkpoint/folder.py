"""The folder of checkpoints: which are complete, what they hold, which one a run resumes from. Torch-free.

A checkpoint is written under another name and renamed once complete, so `step-000100` is complete or absent.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefold.config.schema import Config
from moefold.errors import ConfigError

META_FILE = "moefold.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_FREE_MODEL_KEYS = frozenset({"preset", "init_std"})
"""Keys of [model] that do not change what the stored tensors mean."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint says of itself beside the tensors."""

    format: int
    step: int
    samples: int
    """Samples taken from the training data so far."""
    tokens: int
    """Tokens trained on so far."""
    seed: int
    model: dict[str, Any]
    parallel: dict[str, Any]
    """The mapping that wrote it, for the reader: any other one can load it."""


def checkpoint_folder(cfg: Config) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(cfg.checkpoint.dir) if cfg.checkpoint.dir else Path(cfg.run.dir) / "checkpoints"


def step_path(folder: Path, step: int) -> Path:
    """Name of the complete checkpoint of a step."""
    return folder / f"step-{step:06d}"


def draft_path(folder: Path, step: int) -> Path:
    """Name of a checkpoint that is being written."""
    return folder / f".step-{step:06d}.partial"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / META_FILE).is_file()]


def write_meta(path: Path, meta: CheckpointMeta) -> None:
    """Write the description into a checkpoint folder."""
    (path / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def read_meta(path: Path) -> CheckpointMeta:
    """Read the description of a checkpoint.

    Raises:
        ConfigError: the folder is no checkpoint of this program, or of a version that this one cannot read.
    """
    try:
        fields = json.loads((path / META_FILE).read_text(encoding="utf-8"))
        meta = CheckpointMeta(**fields)
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {str(path)!r} is no moefold checkpoint: it has no {META_FILE}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"checkpoint {str(path)!r} has a broken {META_FILE}: {error}") from None
    if meta.format != FORMAT:
        raise ConfigError(f"checkpoint {str(path)!r} has format {meta.format}; this version reads format {FORMAT}")
    return meta


def find_resume(cfg: Config) -> Path | None:
    """The checkpoint that a run continues from, or None for a new run.

    Raises:
        ConfigError: it is one of another model.
    """
    wish = cfg.checkpoint.resume
    if wish == "never":
        return None
    if wish == "auto":
        complete = complete_checkpoints(checkpoint_folder(cfg))
        if not complete:
            return None
        path = complete[-1]
    else:
        path = Path(wish)
    _refuse_other_model(path, read_meta(path), cfg)
    return path


def remove_older(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all."""
    if keep:
        for path in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(path)


def _refuse_other_model(path: Path, meta: CheckpointMeta, cfg: Config) -> None:
    ours = asdict(cfg.model)
    wrong = [
        f"{key} {meta.model.get(key)!r} there, {value!r} here"
        for key, value in ours.items()
        if key not in _FREE_MODEL_KEYS and meta.model.get(key) != value
    ]
    if wrong:
        raise ConfigError(
            f"checkpoint {str(path)!r} is of another model: {'; '.join(wrong)}; give the recipe its sizes, "
            "set another run.dir, or set checkpoint.resume='never' to start anew"
        )
