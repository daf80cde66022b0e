"""Rules on what a run does when something goes wrong."""

from collections.abc import Iterator

from moefold.config.schema import Config


def validate_rollback(cfg: Config) -> Iterator[str]:
    """There is a checkpoint to go back to."""
    every, steps = cfg.checkpoint.every, cfg.run.steps
    for key in ("nonfinite", "spike"):
        if getattr(cfg.faults, key) == "rollback" and not 0 < every < steps:
            yield (
                f"faults.{key}='rollback' needs checkpoints to go back to, and checkpoint.every={every} saves none "
                f"before the end of the run, run.steps={steps}; set checkpoint.every below {steps}, or "
                f"faults.{key}='skip'"
            )


FAULT_RULES = (validate_rollback,)
