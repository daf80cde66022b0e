"""Rules on the optimizer, learning-rate schedule, evaluation, checkpoints, data, failure handling and kernels."""

import importlib.util
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
from moefold.config.model import ModelConfig, has_dense_layers
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.part import describe_part
from moefold.config.part_table import shown_value
from moefold.config.rl import RLConfig, RolloutConfig
from moefold.config.run import RunConfig
from moefold.config.sites import SitesConfig
from moefold.config.suggestions import nearest_multiples
from moefold.config.train import TrainConfig
from moefold.errors import ConfigError, Setting, install_command
from moefold.remote_path import HUB_SCHEME, is_remote

PACKED_KINDS = ("python-docs", "text", "tokens", "huggingface")
"""Kinds of data whose documents form one stream, which `data.packing` splits into samples."""


def validate_learning_rate(
    train: TrainConfig, data: DataConfig, align: AlignConfig, lora: LoraConfig, rl: RLConfig
) -> Iterator[str]:
    """Check that min_lr is at most lr."""
    schedule = chosen_in(train, LrSchedulePart)
    min_lr = getattr(schedule, "min_lr", None) if schedule.ends_at_min_lr else None
    if min_lr is not None and min_lr > train.lr:
        settings = method_settings(train, data, align, lora, rl)
        is_default = train.lr == default_learning_rate(settings)
        default = f", the default of {describe_method(settings)}" if is_default else ""
        yield f"{schedule.key}.min_lr={min_lr} must be at most train.lr={train.lr}{default}; choose 0.0 to {train.lr}"


def validate_warmup(run: RunConfig, train: TrainConfig) -> Iterator[str]:
    """Check that the warm-up fits into the run."""
    steps = run.steps
    if train.warmup_steps > steps:
        yield f"train.warmup_steps={train.warmup_steps} must be at most run.steps={steps}; choose 0 to {steps}"


def validate_evaluation(train: TrainConfig, data: DataConfig) -> Iterator[str]:
    """Check that evaluation has held-out text."""
    if train.eval_every == 0 or has_validation_split(data) or (data.validation_fraction > 0 and not data.streaming):
        return
    if data.streaming:
        yield (
            f"train.eval_every={train.eval_every} needs held-out text, and a stream has no held-out part; set "
            "data.validation_split to a split of its own, or eval_every=0"
        )
    else:
        yield (
            f"train.eval_every={train.eval_every} needs held-out text, and data.validation_fraction=0.0 holds out "
            "none; choose validation_fraction=0.05, or eval_every=0"
        )


def validate_keep_best(train: TrainConfig, checkpoint: CheckpointConfig, rl: RLConfig) -> Iterator[str]:
    """Check that checkpoints have a held-out loss for their comparison."""
    every = checkpoint.every
    eval_every = train.eval_every
    if not checkpoint.keep_best:
        return
    if rl.is_on:
        yield (
            "checkpoint.keep_best=true compares held-out losses, and reinforcement learning is evaluated by rewards; "
            "set checkpoint.keep_best=false, and keep=0 to keep all checkpoints"
        )
    elif not eval_every:
        yield "checkpoint.keep_best=true compares held-out losses, and train.eval_every=0 computes none; set eval_every"
    elif every % eval_every:
        yield (
            f"checkpoint.every={every} must be a multiple of train.eval_every={eval_every} with "
            f"checkpoint.keep_best=true, so that each checkpoint has a held-out loss; choose every="
            f"{nearest_multiples(every, eval_every)}, or another eval_every"
        )


def validate_mtp(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Check that some position of a sample has an MTP target at every depth."""
    if model.mtp_layers >= train.seq_len:
        yield (
            f"model.mtp_layers={model.mtp_layers} must be below train.seq_len={train.seq_len}: no position has "
            f"a target so far ahead; choose 0 to {train.seq_len - 1}"
        )


def validate_packing(data: DataConfig) -> Iterator[str]:
    """Check that best-fit packing knows the documents, and that no document can vanish."""
    if data.packing != "best_fit" or data.kind not in PACKED_KINDS:
        return
    if data.document_end < 0 and not data.document_index:
        yield (
            "data.packing='best_fit' packs documents, and the recipe does not say where they end; set "
            "data.document_end to the token that ends documents, or data.document_index=true for files of "
            "`moefold tokenize`"
        )
    if data.streaming:
        yield (
            "data.packing='best_fit' reads all documents before it packs them, and data.streaming=true reads each "
            "once; set streaming=false, or packing='concatenate'"
        )
    if data.corrupt == "skip":
        yield (
            "data.packing='best_fit' packs the documents of all files together, and data.corrupt='skip' leaves files "
            "out; set corrupt='fatal', or packing='concatenate'"
        )


def validate_document_end(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Check that the document-end token is in the vocabulary."""
    end = data.document_end
    vocab_size = model.vocab_size
    if end >= vocab_size:
        yield (
            f"data.document_end={end} must be below model.vocab_size={vocab_size}; choose an id of the vocabulary, "
            "or -1 for samples of one document"
        )


def validate_resume(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Check that checkpoint.resume is not empty."""
    if not checkpoint.resume:
        yield "checkpoint.resume='' must be 'auto', 'never' or the path of a checkpoint"


def validate_local_paths(run: RunConfig, train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Check that files that a run writes continuously are on this machine or a mounted disk."""
    yield from _remote_path("run.dir", run.dir, "name a local folder, and the remote one by checkpoint.dir")
    yield from _remote_path("train.offload_dir", train.offload_dir, "name a folder of a local disk")
    for key, folder in (("checkpoint.dir", checkpoint.dir), ("checkpoint.resume", checkpoint.resume)):
        if folder.startswith(HUB_SCHEME):
            yield (
                f"{key}={folder!r} must be a folder: checkpoints of a run are not kept on the hub; name a local folder "
                "or one of a store such as s3://"
            )


def validate_local_files(moe: MoEConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Check that memory-mapped files are on this machine or a mounted disk."""
    yield from _remote_path("moe.replay", moe.replay, "copy the run there and name the folder")
    yield from _remote_path("rollout.folder", rollout.folder, "name a local folder")


def _remote_path(key: str, path: str, way_out: str) -> Iterator[str]:
    if is_remote(path):
        yield f"{key}={path!r} must be a path of this machine, not a URL; {way_out}"


def validate_upcycling(model: ModelConfig, lora: LoraConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Check the settings that are incompatible with initial weights from a dense model."""
    if not checkpoint.upcycle:
        return
    name = f"checkpoint.upcycle={shown_value(checkpoint.upcycle)}"
    if start := checkpoint.init_from:
        yield f"checkpoint.init_from={start!r} and {name} both give the first weights; leave one of them out"
    if lora.rank:
        yield (
            f"{name} makes weights that no folder has, and lora.rank={lora.rank} needs a base; run moefold upcycle, "
            "and name its result in checkpoint.init_from"
        )
    part = model.routed
    if part is None:
        return
    if part.router.num_groups > 1:
        yield (
            f"{name} makes groups of experts of its own, and model.ffn.moe.router.num_groups="
            f"{part.router.num_groups} would choose between their members; set model.ffn.moe.router.num_groups=1"
        )
    if part.zero_experts:
        yield (
            f"model.ffn.moe.zero_experts={part.zero_experts} is incompatible with {name}: each token would lose the "
            "part of the dense layer that it routes to them; leave one of them out"
        )
    if part.router.uniform_weight(part.num_experts) is None:
        yield (
            f"{describe_part(getattr(part.router, 'softmax', part.router))} weighs the experts of a token without a "
            f"fixed sum, so that they do not add up to the dense layer of {name}; choose 'pre' or 'post'"
        )


def validate_loss_chunk(parallel: ParallelConfig, train: TrainConfig) -> Iterator[str]:
    """Check that a loss chunk has fewer tokens than a rank."""
    cp = parallel.cp
    tokens = train.seq_len * train.micro_batch_size // cp
    if train.loss_chunk >= tokens:
        yield (
            f"train.loss_chunk={train.loss_chunk} must be below the {tokens} tokens of a rank, "
            f"seq_len*micro_batch_size/cp={train.seq_len}*{train.micro_batch_size}/{cp}: that is one chunk; choose 1 "
            f"to {tokens - 1}, or 0 for all at once"
        )


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


def validate_data_weights(data: DataConfig) -> Iterator[str]:
    """Check that data.weights has one positive number for each path."""
    if not data.weights:
        return
    num_paths = 1 if isinstance(data.path, str) else len(data.path)
    if len(data.weights) != num_paths:
        yield (
            f"data.weights={list(data.weights)} must have one number for each of the {num_paths} paths of data.path; "
            "list as many, or leave weights out to join the paths by their sizes"
        )
    if not all(0 < weight < math.inf for weight in data.weights):
        yield f"data.weights={list(data.weights)} must be greater than 0; leave out the paths without a share"


def validate_data_source(data: DataConfig) -> Iterator[str]:
    """Check the column and the splits of a Hugging Face data set."""
    if not data.column:
        yield "data.column='' must name the column of the text; the default is 'text'"
    if not data.split:
        yield "data.split='' must name a split; the default is 'train'"
    if data.validation_split and data.validation_split == data.split:
        yield (
            f"data.validation_split={data.validation_split!r} must not be the split that is trained on; "
            "leave it out to hold out data.validation_fraction of it"
        )


def has_validation_split(data: DataConfig) -> bool:
    """Return whether evaluation uses a separate split."""
    return data.kind == "huggingface" and bool(data.validation_split)


DATA_RULES = (validate_data_weights, validate_data_source)


def validate_rollback(run: RunConfig, checkpoint: CheckpointConfig, faults: FaultsConfig) -> Iterator[str]:
    """Check that a rollback has checkpoints to load."""
    every = checkpoint.every
    steps = run.steps
    for key in ("nonfinite", "spike"):
        if getattr(faults, key) == "rollback" and not 0 < every < steps:
            yield (
                f"faults.{key}='rollback' needs checkpoints to go back to, and checkpoint.every={every} saves none "
                f"before the end of the run, run.steps={steps}; set checkpoint.every below {steps}, or "
                f"faults.{key}='skip'"
            )


def validate_peer_snapshots(checkpoint: CheckpointConfig, rl: RLConfig, sites: SitesConfig) -> Iterator[str]:
    """Check that snapshots contain the whole state of the run."""
    every = checkpoint.peer_every
    if every > 0 and rl.is_on:
        yield (
            f"checkpoint.peer_every={every} has no copy of rollouts and of the reference model of reinforcement "
            "learning; set checkpoint.peer_every=0"
        )
    if every > 0 and sites.is_active:
        yield (
            f"checkpoint.peer_every={every} has no copy of the state of the outer optimizer of sites; set "
            "checkpoint.peer_every=0"
        )


FAULT_RULES = (validate_rollback, validate_peer_snapshots)


def validate_kernels(run: RunConfig, train: TrainConfig) -> Iterator[str]:
    """Check the kernels against run.dtype and train.precision."""
    name = run.kernels
    if name not in ("triton", "c"):
        return
    if run.dtype == "float64":
        verb = "sums" if name == "triton" else "computes"
        yield (
            f"{Setting('run.kernels', name)} {verb} in float32, which {Setting('run.dtype', 'float64')} is beyond; set "
            f"{Setting('run.kernels')} to 'auto' or 'plain', or {Setting('run.dtype')} to 'bfloat16' or 'float32'"
        )
    if train.quantizes_gemms:
        own_kernels = "GEMMs" if name == "triton" else "activations between its GEMMs"
        yield (
            f"train.precision={train.precision!r} has {own_kernels} of its own, which {Setting('run.kernels', name)} "
            f"would replace; leave {Setting('run.kernels')} out"
        )


def validate_compile(run: RunConfig) -> Iterator[str]:
    """Check run.compile against run.kernels and run.deterministic."""
    if run.compile == "none":
        return
    name = f"run.compile={run.compile!r}"
    if run.kernels == "c":
        yield (
            f"{name} would replace QK norm, RoPE and SwiGLU in C, which {Setting('run.kernels', 'c')} asks for; set "
            f"{Setting('run.kernels')} to 'auto' or 'plain', or run.compile='none'"
        )
    if run.deterministic:
        yield (
            f"{name} is incompatible with run.deterministic=true: Inductor may choose how a GPU sums by timing it; set "
            "run.compile='none' or run.deterministic=false"
        )


def compiles_parts(model: ModelConfig) -> bool:
    """Return whether a model has a part that run.compile='blocks' compiles."""
    has_head_norms = any(layer.attention.fuses_head_norms for layer in model.decoder_layers)
    has_shared_expert = model.routed is not None and model.routed.shared_width > 0
    return has_head_norms or has_shared_expert or has_dense_layers(model)


def triton_unsupported_reason(run: RunConfig, device_type: str) -> str:
    """Return the reason why Triton cannot run on the device; "" if it can."""
    if run.dtype == "float64":
        return f"{Setting('run.dtype', 'float64')} is beyond its float32 sums"
    if importlib.util.find_spec("triton") is None:
        return f"the package triton is not installed ({install_command('gpu')})"
    if device_type == "cuda":
        return ""
    import triton

    # On a CPU, kernels run only in Triton's interpreter: for tests, hundreds of times slower than plain operations.
    return "" if triton.knobs.runtime.interpret else f"Triton has no compiler for device {device_type!r}"


def check_kernel_device(run: RunConfig, device_type: str) -> None:
    """Check that the recipe's kernels run on the ranks' devices; raise ConfigError if they do not."""
    if run.kernels == "triton" and (reason := triton_unsupported_reason(run, device_type)):
        raise ConfigError(
            f"{Setting('run.kernels', 'triton')} cannot run: {reason}; set {Setting('run.kernels')} to 'auto' or "
            "'plain'"
        )
    if run.kernels == "c" and device_type != "cpu":
        raise ConfigError(
            f"{Setting('run.kernels', 'c')} cannot run: it is for CPUs, and the device is {device_type!r}; set "
            f"{Setting('run.kernels')} to 'auto' or {Setting('run.device')} to 'cpu'"
        )


KERNEL_RULES = (validate_kernels, validate_compile)
