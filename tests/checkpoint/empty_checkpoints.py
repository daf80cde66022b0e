"""Checkpoints without tensors: the metadata and a manifest."""

from pathlib import Path

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest
from moefold.checkpoint.sample_order import sample_order
from moefold.config.base.limits import FORMAT
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from tests.models import model_of

MODEL = model_of({"layers": 2})


def meta(step: int, model: ModelConfig = MODEL) -> CheckpointMeta:
    return CheckpointMeta(
        format=FORMAT,
        states=counted(step=step, samples=8 * step, tokens=64 * step),
        order=sample_order(Config()),
        model=model_sizes(model),
        parallel={},
    )


def write(folder: Path, step: int, model: ModelConfig = MODEL) -> Path:
    path = step_path(folder, step)
    path.mkdir(parents=True)
    write_meta(path, meta(step, model))
    seal(path)
    return path


def seal(path: Path) -> None:
    """Write a manifest that agrees with the files, whatever they are."""
    write_manifest(path, {file.name: digest_file(file) for file in path.iterdir() if file.name != MANIFEST_FILE})


def recipe(folder: Path, resume: str = "auto", every: int = 5, model: ModelConfig = MODEL) -> Config:
    return Config(
        model=model, checkpoint=CheckpointConfig(dir=str(folder), every=every, at_end=every > 0, resume=resume)
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
