"""Rules on the optimizer, learning-rate schedule, evaluation, checkpoints, data, failure handling and kernels."""

import math
from collections.abc import Iterator

from moefold.config.align import AlignConfig
from moefold.config.checkpoint import CheckpointConfig
from moefold.config.chosen import chosen_in
from moefold.config.data import DataConfig
from moefold.config.faults import FaultsConfig
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.lora import LoraConfig
from moefold.config.method_defaults import default_learning_rate, describe_method, method_settings
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.part import describe_part
from moefold.config.part_table import shown_value
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.config.run import RunConfig
from moefold.config.sites import SitesConfig
from moefold.config.suggestions import nearest_multiples
from moefold.config.train import TrainConfig
from moefold.message_text import Problem, Setting
from moefold.remote_path import HUB_SCHEME, is_remote

PACKED_KINDS = ("python-docs", "text", "tokens", "huggingface")
"""Kinds of data whose documents form one stream, which `data.packing` splits into samples."""


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


def validate_mtp(model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that some position of a sample has an MTP target at every depth."""
    if model.mtp_layers >= train.seq_len:
        rule = f"must be below train.seq_len={train.seq_len}: no position has a target so far ahead"
        yield Problem("model.mtp_layers", model.mtp_layers, rule, f"choose 0 to {train.seq_len - 1}")


def validate_packing(data: DataConfig) -> Iterator[Problem]:
    """Check that best-fit packing knows the documents, and that no document can vanish."""
    if data.packing != "best_fit" or data.kind not in PACKED_KINDS:
        return
    if data.document_end < 0 and not data.document_index:
        rule = "packs documents, and the recipe does not say where they end"
        way_out = (
            "set data.document_end to the token that ends documents, or data.document_index=true for files of "
            "`moefold tokenize`"
        )
        yield Problem("data.packing", "best_fit", rule, way_out)
    if data.streaming:
        rule = "reads all documents before it packs them, and data.streaming=true reads each once"
        yield Problem("data.packing", "best_fit", rule, "set streaming=false, or packing='concatenate'")
    if data.corrupt == "skip":
        rule = "packs the documents of all files together, and data.corrupt='skip' leaves files out"
        yield Problem("data.packing", "best_fit", rule, "set corrupt='fatal', or packing='concatenate'")


def validate_document_end(model: ModelConfig, data: DataConfig) -> Iterator[Problem]:
    """Check that the document-end token is in the vocabulary."""
    end = data.document_end
    vocab_size = model.vocab_size
    if end >= vocab_size:
        rule = f"must be below model.vocab_size={vocab_size}"
        way_out = "choose an id of the vocabulary, or -1 for samples of one document"
        yield Problem("data.document_end", end, rule, way_out)


def validate_resume(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that checkpoint.resume is not empty."""
    if not checkpoint.resume:
        yield Problem("checkpoint.resume", "", "must be 'auto', 'never' or the path of a checkpoint")


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
    validate_keep_every,
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


def validate_data_weights(data: DataConfig) -> Iterator[Problem]:
    """Check that data.weights has one positive number for each path."""
    if not data.weights:
        return
    num_paths = 1 if isinstance(data.path, str) else len(data.path)
    if len(data.weights) != num_paths:
        rule = f"must have one number for each of the {num_paths} paths of data.path"
        way_out = "list as many, or leave weights out to join the paths by their sizes"
        yield Problem("data.weights", list(data.weights), rule, way_out)
    if not all(0 < weight < math.inf for weight in data.weights):
        rule = "must be greater than 0"
        yield Problem("data.weights", list(data.weights), rule, "leave out the paths without a share")


def validate_data_source(data: DataConfig) -> Iterator[Problem]:
    """Check the column and the splits of a Hugging Face data set."""
    if not data.column:
        yield Problem("data.column", "", "must name the column of the text", "the default is 'text'")
    if not data.split:
        yield Problem("data.split", "", "must name a split", "the default is 'train'")
    if data.validation_split and data.validation_split == data.split:
        rule = "must not be the split that is trained on"
        way_out = "leave it out to hold out data.validation_fraction of it"
        yield Problem("data.validation_split", data.validation_split, rule, way_out)


def has_validation_split(data: DataConfig) -> bool:
    """Return whether evaluation uses a separate split."""
    return data.kind == "huggingface" and bool(data.validation_split)


DATA_RULES = (validate_data_weights, validate_data_source)


def validate_rollback(run: RunConfig, checkpoint: CheckpointConfig, faults: FaultsConfig) -> Iterator[Problem]:
    """Check that a rollback has checkpoints to load."""
    every = checkpoint.every
    steps = run.steps
    for key in ("nonfinite", "spike"):
        if getattr(faults, key) == "rollback" and not 0 < every < steps:
            rule = (
                f"needs checkpoints to go back to, and checkpoint.every={every} saves none before the end of the "
                f"run, run.steps={steps}"
            )
            way_out = f"set checkpoint.every below {steps}, or faults.{key}='skip'"
            yield Problem(f"faults.{key}", "rollback", rule, way_out)


def validate_peer_snapshots(checkpoint: CheckpointConfig, rl: RLConfig, sites: SitesConfig) -> Iterator[Problem]:
    """Check that snapshots contain the whole state of the run."""
    every = checkpoint.peer_every
    if every > 0 and rl.is_on:
        rule = "has no copy of rollouts and of the reference model of reinforcement learning"
        yield Problem("checkpoint.peer_every", every, rule, "set checkpoint.peer_every=0")
    if every > 0 and sites.is_active:
        rule = "has no copy of the state of the outer optimizer of sites"
        yield Problem("checkpoint.peer_every", every, rule, "set checkpoint.peer_every=0")


FAULT_RULES = (validate_rollback, validate_peer_snapshots)


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
