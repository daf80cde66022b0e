"""Rules on what a run does when something goes wrong."""

from collections.abc import Iterator

from moefold.config.schema import Config


def rollback_faults(cfg: Config) -> Iterator[str]:
    """There is a checkpoint to go back to."""
    for key in ("nonfinite", "spike"):
        if getattr(cfg.faults, key) == "rollback" and cfg.checkpoint.every == 0:
            yield (
                f"faults.{key}='rollback' needs checkpoints to go back to, and checkpoint.every=0 saves none; "
                f"set checkpoint.every, or faults.{key}='skip'"
            )


FAULT_RULES = (rollback_faults,)
