"""Run folders that are written without training."""

import json
from pathlib import Path

from moefold.checkpoint.checkpoint_meta import META_FILE, CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.manifest import digest_file, write_manifest
from moefold.checkpoint.sample_order import sample_order
from moefold.config.base.limits import FORMAT
from moefold.config.schema import Config, config_to_dict
from moefold.data.fingerprint import fingerprint
from moefold.recipe import load_config

WORDS = ("model.preset=tiny", "data.kind=synthetic", "run.device=cpu", "train.seq_len=32", "run.steps=10")


def config(run_dir: Path, *words: str) -> Config:
    return load_config(None, [*WORDS, f"run.dir={run_dir}", *words])


def write_run(run_dir: Path, *words: str, steps: int, saved: int | None) -> None:
    """Write the files that a run of some steps leaves, with a checkpoint of step `saved`."""
    cfg = config(run_dir, *words)
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(config_to_dict(cfg)))
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    if saved is None:
        return
    path = step_path(Path(cfg.checkpoint.dir or run_dir / "checkpoints"), saved)
    path.mkdir(parents=True)
    order, model = sample_order(cfg), model_sizes(cfg.model)
    write_meta(
        path,
        CheckpointMeta(
            format=FORMAT,
            states=counted(step=saved) | {"data": {"data_files": fingerprint(cfg.data)}},
            order=order,
            model=model,
            parallel={},
        ),
    )
    write_manifest(path, {META_FILE: digest_file(path / META_FILE)})
