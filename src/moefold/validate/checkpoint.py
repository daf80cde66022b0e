"""Rules on checkpoints: the best one, resuming, and upcycling."""

from collections.abc import Iterator

from moefold.config.base.part import describe_part
from moefold.config.model import ModelConfig
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.config.tables.toml_text import shown_value
from moefold.message_text import Problem, nearest_multiples


def validate_keep_best(train: TrainConfig, checkpoint: CheckpointConfig, rl: RLConfig) -> Iterator[Problem]:
    """Check that checkpoints have a held-out loss for their comparison."""
    every = checkpoint.every
    eval_every = train.eval_every
    if not checkpoint.keep_best:
        return
    if rl.is_on:
        rule = "compares held-out losses, and reinforcement learning is evaluated by rewards"
        way_out = "set checkpoint.keep_best=false, and keep=0 to keep all checkpoints"
        yield Problem("checkpoint.keep_best", True, rule, way_out)
    elif not eval_every:
        rule = "compares held-out losses, and train.eval_every=0 computes none"
        yield Problem("checkpoint.keep_best", True, rule, "set eval_every")
    elif every % eval_every:
        rule = (
            f"must be a multiple of train.eval_every={eval_every} with checkpoint.keep_best=true, so that each "
            "checkpoint has a held-out loss"
        )
        way_out = f"choose every={nearest_multiples(every, eval_every)}, or another eval_every"
        yield Problem("checkpoint.every", every, rule, way_out)


def validate_keep_every(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that every step whose checkpoint is kept has a checkpoint."""
    if checkpoint.every and checkpoint.keep_every % checkpoint.every:
        rule = f"must be a multiple of checkpoint.every={checkpoint.every}: only such steps have a checkpoint"
        way_out = f"choose {nearest_multiples(checkpoint.keep_every, checkpoint.every)}, or another every"
        yield Problem("checkpoint.keep_every", checkpoint.keep_every, rule, way_out)


def validate_resume(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that checkpoint.resume is not empty."""
    if not checkpoint.resume:
        yield Problem("checkpoint.resume", "", "must be 'auto', 'never' or the path of a checkpoint")


def validate_upcycling(model: ModelConfig, lora: LoraConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check the settings that are incompatible with initial weights from a dense model."""
    if not checkpoint.upcycle:
        return
    name = f"checkpoint.upcycle={shown_value(checkpoint.upcycle)}"
    if start := checkpoint.init_from:
        yield Problem("checkpoint.init_from", start, f"and {name} both give the first weights", "leave one of them out")
    if lora.rank:
        rule = f"{name} makes weights that no folder has, and lora.rank={lora.rank} needs a base"
        yield Problem("", None, rule, "run moefold upcycle, and name its result in checkpoint.init_from")
    part = model.routed
    if part is None:
        return
    if part.router.num_groups > 1:
        rule = (
            f"{name} makes groups of experts of its own, and model.ffn.moe.router.num_groups={part.router.num_groups} "
            "would choose between their members"
        )
        yield Problem("", None, rule, "set model.ffn.moe.router.num_groups=1")
    if part.zero_experts:
        rule = f"is incompatible with {name}: each token would lose the part of the dense layer that it routes to them"
        yield Problem("model.ffn.moe.zero_experts", part.zero_experts, rule, "leave one of them out")
    if part.router.uniform_weight(part.num_experts) is None:
        router = describe_part(getattr(part.router, "softmax", part.router))
        rule = (
            f"{router} weighs the experts of a token without a fixed sum, so that they do not add up to the dense layer"
        )
        yield Problem("", None, f"{rule} of {name}", "choose 'pre' or 'post'")
