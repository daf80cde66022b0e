"""Folders that look like checkpoints and hold no tensor: enough for all that is decided before torch is there."""

from pathlib import Path

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.sample_order import sample_order
from moefold.config.base.limits import FORMAT
from moefold.config.base.part import values_by_key
from moefold.config.schema import Config, write_config_json
from tests.models import config_of


def described_run(run_dir: Path, steps: tuple[int, ...] = (10,), **sections: dict[str, object]) -> Config:
    """Write a run folder with checkpoints of these steps; the newest one is the largest."""
    cfg = config_of({"run": {"dir": str(run_dir)}, "model": {"preset": "tiny"}} | sections)
    for step in steps:
        path = run_dir / "checkpoints" / f"step-{step:06d}"
        path.mkdir(parents=True)
        write_meta(
            path,
            CheckpointMeta(
                format=FORMAT,
                states=counted(step=step),
                order=sample_order(cfg),
                model=model_sizes(cfg.model),
                parallel=values_by_key(cfg.parallel),
            ),
        )
    write_config_json(cfg, run_dir / "config.json")
    return cfg
