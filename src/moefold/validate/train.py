"""Rules on the learning-rate schedule, evaluation, MTP, loss chunks, local paths and kernels."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.keys.learning_rates import default_learning_rate, describe_method, method_settings
from moefold.config.model import ModelConfig
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.message_text import Problem, Setting
from moefold.remote_path import HUB_SCHEME, is_remote
from moefold.validate.checkpoint import validate_keep_best, validate_resume, validate_upcycling
from moefold.validate.data import has_validation_split, validate_document_end, validate_packing


def validate_learning_rate(
    train: TrainConfig, data: DataConfig, align: AlignConfig, lora: LoraConfig, rl: RLConfig
) -> Iterator[Problem]:
    """Check that min_lr is at most lr."""
    schedule = chosen_in(train, LrSchedulePart)
    min_lr = getattr(schedule, "min_lr", None) if schedule.ends_at_min_lr else None
    if min_lr is not None and min_lr > train.lr:
        settings = method_settings(train, data, align, lora, rl)
        is_default = train.lr == default_learning_rate(settings)
        default = f", the default of {describe_method(settings)}" if is_default else ""
        rule = f"must be at most train.lr={train.lr}{default}"
        yield Problem(f"{schedule.key}.min_lr", min_lr, rule, f"choose 0.0 to {train.lr}")


def validate_warmup(run: RunConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that the warm-up fits into the run."""
    steps = run.steps
    if train.warmup_steps > steps:
        rule = f"must be at most run.steps={steps}"
        yield Problem("train.warmup_steps", train.warmup_steps, rule, f"choose 0 to {steps}")


def validate_evaluation(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    """Check that evaluation has held-out text."""
    if train.eval_every == 0 or has_validation_split(data) or (data.validation_fraction > 0 and not data.streaming):
        return
    if data.streaming:
        rule = "needs held-out text, and a stream has no held-out part"
        way_out = "set data.validation_split to a split of its own, or eval_every=0"
        yield Problem("train.eval_every", train.eval_every, rule, way_out)
    else:
        rule = "needs held-out text, and data.validation_fraction=0.0 holds out none"
        yield Problem("train.eval_every", train.eval_every, rule, "choose validation_fraction=0.05, or eval_every=0")


def validate_mtp(model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that some position of a sample has an MTP target at every depth."""
    if model.mtp_layers >= train.seq_len:
        rule = f"must be below train.seq_len={train.seq_len}: no position has a target so far ahead"
        yield Problem("model.mtp_layers", model.mtp_layers, rule, f"choose 0 to {train.seq_len - 1}")


def validate_local_paths(run: RunConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that files that a run writes continuously are on this machine or a mounted disk."""
    yield from _remote_path("run.dir", run.dir, "name a local folder, and the remote one by checkpoint.dir")
    yield from _remote_path("train.offload_dir", train.offload_dir, "name a folder of a local disk")
    for key, folder in (("checkpoint.dir", checkpoint.dir), ("checkpoint.resume", checkpoint.resume)):
        if folder.startswith(HUB_SCHEME):
            rule = "must be a folder: checkpoints of a run are not kept on the hub"
            yield Problem(key, folder, rule, "name a local folder or one of a store such as s3://")


def validate_local_files(moe: MoEConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Check that memory-mapped files are on this machine or a mounted disk."""
    yield from _remote_path("moe.replay", moe.replay, "copy the run there and name the folder")
    yield from _remote_path("rollout.folder", rollout.folder, "name a local folder")


def _remote_path(key: str, path: str, way_out: str) -> Iterator[Problem]:
    if is_remote(path):
        yield Problem(key, path, "must be a path of this machine, not a URL", way_out)


def validate_loss_chunk(parallel: ParallelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that a loss chunk has fewer tokens than a rank."""
    cp = parallel.cp
    tokens = train.seq_len * train.micro_batch_size // cp
    if train.loss_chunk >= tokens:
        rule = (
            f"must be below the {tokens} tokens of a rank, "
            f"seq_len*micro_batch_size/cp={train.seq_len}*{train.micro_batch_size}/{cp}: that is one chunk"
        )
        yield Problem("train.loss_chunk", train.loss_chunk, rule, f"choose 1 to {tokens - 1}, or 0 for all at once")


TRAIN_RULES = (
    validate_learning_rate,
    validate_warmup,
    validate_keep_best,
    validate_loss_chunk,
    validate_evaluation,
    validate_mtp,
    validate_document_end,
    validate_packing,
    validate_resume,
    validate_upcycling,
    validate_local_paths,
    validate_local_files,
)


def validate_kernels(run: RunConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check the kernels against run.dtype and train.precision."""
    name = run.kernels
    if name not in ("triton", "c"):
        return
    if run.dtype == "float64":
        verb = "sums" if name == "triton" else "computes"
        rule = f"{verb} in float32, which {Setting('run.dtype', 'float64')} is beyond"
        way_out = (
            f"set {Setting('run.kernels')} to 'auto' or 'plain', or {Setting('run.dtype')} to 'bfloat16' or 'float32'"
        )
        yield Problem("run.kernels", name, rule, way_out)
    if train.quantizes_gemms:
        own_kernels = "GEMMs" if name == "triton" else "activations between its GEMMs"
        rule = f"has {own_kernels} of its own, which {Setting('run.kernels', name)} would replace"
        yield Problem("train.precision", train.precision, rule, f"leave {Setting('run.kernels')} out")


def validate_compile(run: RunConfig) -> Iterator[Problem]:
    """Check run.compile against run.kernels and run.deterministic."""
    if run.compile == "none":
        return
    name = Setting("run.compile", run.compile)
    if run.kernels == "c":
        rule = f"would replace QK norm, RoPE and SwiGLU in C, which {Setting('run.kernels', 'c')} asks for"
        yield name.problem(rule, f"set {Setting('run.kernels')} to 'auto' or 'plain', or run.compile='none'")
    if run.deterministic:
        rule = "is incompatible with run.deterministic=true: Inductor may choose how a GPU sums by timing it"
        yield name.problem(rule, "set run.compile='none' or run.deterministic=false")


def compiles_parts(model: ModelConfig) -> bool:
    """Return whether a model has a part that run.compile='blocks' compiles."""
    has_head_norms = any(layer.attention.fuses_head_norms for layer in model.decoder_layers)
    has_shared_expert = model.routed is not None and model.routed.shared_width > 0
    return has_head_norms or has_shared_expert or model.has_dense_layers


KERNEL_RULES = (validate_kernels, validate_compile)
