"""The [metrics] section: outputs in addition to metrics.jsonl."""

from dataclasses import dataclass
from typing import Annotated

from moefold.config.base.field import Bound, ReadIf, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Outputs of metrics in addition to metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events to RUN_DIR/tensorboard (needs the extra `track`)."""
    wandb: bool = False
    """Log to Weights & Biases, with the resolved recipe as its config (needs the extra `track`)."""
    wandb_project: Annotated[
        str,
        Bound(
            "must have at most 128 characters, and none of / \\ # ? % :",
            lambda name: len(name) <= 128 and not set(name) & set("/\\#?%:"),
        ),
        ReadIf("metrics.wandb"),
    ] = ""
    """Weights & Biases project. Empty: environment variable WANDB_PROJECT, or moefold."""
    wandb_entity: Annotated[str, ReadIf("metrics.wandb")] = ""
    """User or team that owns the project. Empty: WANDB_ENTITY, or the account's default."""
    wandb_name: Annotated[str, ReadIf("metrics.wandb")] = ""
    """Display name of the run. Empty: WANDB_NAME, or the name of the folder run.dir."""
    wandb_group: Annotated[str, ReadIf("metrics.wandb")] = ""
    """Group of the run. Empty: WANDB_RUN_GROUP, or none."""
    wandb_tags: Annotated[
        tuple[str, ...],
        Bound("must be a list of tags of 1 to 64 characters", lambda tags: all(1 <= len(tag) <= 64 for tag in tags)),
        ReadIf("metrics.wandb"),
    ] = ()
    """Tags of the run. Empty: WANDB_TAGS (separated by commas), or none."""
    per_layer: Annotated[bool, ReadIf("metrics.tensorboard metrics.wandb")] = False
    """Send TensorBoard and Weights & Biases one curve per MoE layer, in addition to mean and maximum over the
    layers."""
    peak_tflops: Annotated[float, at_least(0, "0: look the device up")] = 0.0
    """Peak TFLOP/s of one rank's device, for MFU. 0: looked up for a bfloat16 run's device, null if unknown."""
    memory_every: Annotated[int, at_least(0, "0: never")] = 0
    """Record every rank's memory by part, at its peak and after the passes, every this many steps. 0: never. Such a
    step is slower ([memory.md](memory.md))."""
    expert_counts_every: Annotated[int, at_least(0, "0: never")] = 1
    """Write each expert's routed tokens to RUN_DIR/expert_counts.bin every this many steps, for `moefold inspect`. 0:
    never."""
    rollouts_every: Annotated[int, at_least(0, "0: never"), ReadIf("rl.group_size")] = 10
    """Write prompts, completions and rewards to RUN_DIR/rollouts.jsonl every this many steps of reinforcement learning.
    0: never."""
    plot: bool = True
    """Draw RUN_DIR/loss.png at the end of a run."""
