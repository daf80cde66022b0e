"""Model source: resolve a path to a checkpoint, run folder or Hugging Face folder and read its metadata."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moefold.checkpoint.checkpoint_meta import META_FILE, CheckpointMeta, read_meta
from moefold.checkpoint.find_checkpoint import names_best, newest_checkpoint, skipped_checkpoints
from moefold.checkpoint.run_tokenizer import find_run_tokenizer, have_same_ids, recorded_fingerprint
from moefold.config.model import ModelConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.run import SECTIONS_OF_USE
from moefold.convert.families.hf_config import inspect_folder, is_hf_folder, read_hf_config
from moefold.convert.hf_sidecar_files import find_sidecar_dir, recipe_tokenizer
from moefold.convert.preflight import weights_path
from moefold.convert.run_config import find_run_config, parse_run_config, read_settings
from moefold.data.conversations.reward_prompt import RewardPrompt, stored_reward_prompt
from moefold.data.hf_tokenizer.tokenizer_folder import declared_ends, tokenizer_file
from moefold.data.input_paths import CHAT_TEMPLATE_FILE, CONFIG_FILE, existing_path
from moefold.errors import ConfigError
from moefold.remote_path import is_remote

DEFAULT_CONTEXT_TOKENS = 2048
"""Context length of a model whose metadata lacks it."""


@dataclass(frozen=True)
class ModelSource:
    """Location of a model's weights and the metadata needed for inference."""

    path: Path
    """Step folder of a checkpoint, or Hugging Face folder."""
    kind: Literal["checkpoint", "huggingface"]
    model: ModelConfig
    moe: MoEConfig
    """Routing settings of the training run, or the defaults if the run is unknown."""
    data: DataConfig
    """Data settings, with only the tokenizer fields set."""
    dtype: Literal["bfloat16", "float32", "float64"]
    """Dtype of the stored weights, or float32 for any other type."""
    context: int
    """Context length in tokens, from the training run or the Hugging Face config."""
    trained_len: int = 0
    """Sequence length of the training run, or 0 for a Hugging Face folder and for weights not trained here."""
    eos_ids: frozenset[int] = frozenset()
    """End-of-text ids of a Hugging Face folder, or of the folder that a checkpoint's weights were imported from."""
    uses_hf_text_start: bool = False
    """True if texts start with the special tokens of the Hugging Face tokenizer: a Hugging Face folder, or weights
    imported from one and not trained further."""
    tokenizer_fingerprint: str = ""
    """Fingerprint of the tokenizer of the training, for a checkpoint without a copy of it. Empty if it is unknown."""
    want: RewardPrompt | None = None
    """Reward prompt of a model that was trained with align.method="condition"."""
    has_adapters: bool = False
    """True if the checkpoint only has adapters, for merging into the base weights that its metadata names."""
    notices: tuple[str, ...] = ()
    """Notes for the user: damaged later checkpoints of the run, ignored keys of a Hugging Face folder."""


def find_source(name: str, ignored_keys: Collection[str] = ()) -> ModelSource:
    """Find the model at a path and read its metadata. No tensors are read.

    Args:
        name: a checkpoint (`step-000100`), or a Hugging Face folder. A folder of checkpoints or a run folder stands for
            its newest complete checkpoint, RUN/best for the checkpoint with the lowest held-out loss.

    Raises:
        ConfigError: there is no complete model, or its format version is not supported.
    """
    path = _path_of_model(name)
    if not path.is_dir() and not names_best(path):
        raise ConfigError(f"MODEL={name!r} is a file; name a checkpoint, a run folder or a Hugging Face folder")
    if (checkpoint := newest_checkpoint(path)) is not None:
        skipped = skipped_checkpoints(path, checkpoint)
        notices = tuple(f"skipped a damaged checkpoint, {description}" for description in skipped)
        return replace(checkpoint_source(checkpoint), notices=notices)
    if is_hf_folder(path):
        return _hf_source(path, ignored_keys)
    raise ConfigError(
        f"MODEL={name!r} holds no model: no {META_FILE} (a checkpoint), no complete step-* folder (a run, or its "
        f"checkpoints) and no {CONFIG_FILE} with a model_type (a Hugging Face folder); name a folder that does. "
        "A run saves its model at its end (checkpoint.at_end=true, the default) and every checkpoint.every steps"
    )


def _path_of_model(name: str) -> Path:
    """Return the path for the name of a model. RUN/best need not exist."""
    if is_remote(name):
        return weights_path(name)
    return Path(name) if names_best(Path(name)) else existing_path("MODEL", name)


def checkpoint_source(path: Path) -> ModelSource:
    """Return the model of a checkpoint folder. Raise ConfigError if its metadata cannot be read."""
    meta = read_meta(path)
    keys = ("seed", "seq_len")
    data = {key: value for key, value in meta.order.items() if key not in keys and "." not in key}
    cfg = parse_run_config({"model": meta.model | {"preset": ""}, "data": data}, path / META_FILE)
    run = find_run_config(path, cfg.model, SECTIONS_OF_USE)
    moe = MoEConfig() if run is None else replace(run.moe, trace_every=0, replay="")
    # Old checkpoints do not record a dtype.
    is_float64 = (meta.dtype or ("" if run is None else run.run.dtype)) == "float64"
    dtype: Literal["float64", "float32"] = "float64" if is_float64 else "float32"
    context = int(meta.order.get("seq_len", DEFAULT_CONTEXT_TOKENS))
    trained_len = int(meta.order.get("seq_len", 0)) if "tokenizer" in meta.order else 0
    want = stored_reward_prompt(meta.order, str(path))
    has_adapters = bool(meta.lora)
    source = ModelSource(
        path, "checkpoint", cfg.model, moe, cfg.data, dtype, context, trained_len, want=want, has_adapters=has_adapters
    )
    is_trained = "tokenizer" in meta.order
    return _with_hf_text_settings(_with_run_tokenizer(source, meta) if is_trained else source, is_trained=is_trained)


def _with_run_tokenizer(source: ModelSource, meta: CheckpointMeta) -> ModelSource:
    """Return the checkpoint source with the tokenizer and the chat template next to it, if any."""
    saved = find_run_tokenizer(source.path)
    if saved is None:
        return replace(source, tokenizer_fingerprint=recorded_fingerprint(meta))
    data = source.data
    if tokenizer_file(saved).is_file():
        data = replace(data, tokenizer=str(tokenizer_file(saved)), chat_template="")
    elif data.chat_template:
        data = replace(data, chat_template=str(saved / CHAT_TEMPLATE_FILE))
    return replace(source, data=data)


def _with_hf_text_settings(source: ModelSource, *, is_trained: bool) -> ModelSource:
    """Return the checkpoint source with the text settings of the Hugging Face folder that it was imported from.

    Imported and upcycled weights without further training use all settings of that folder. A trained checkpoint uses
    the tokenizer of its recipe. If that is still the folder's tokenizer, the folder's end-of-text ids apply.
    """
    folder = find_sidecar_dir(source.path)
    if folder is not None and (folder / CONFIG_FILE).is_file():
        # The model supports at least these, even if the sequences of the run are shorter.
        context = _context_tokens(read_settings(folder / CONFIG_FILE), folder)
        source = replace(source, context=max(source.context, context) if is_trained else context)
    file = tokenizer_file(source.path if folder is None else folder)
    if not is_trained:
        recipe = recipe_tokenizer(source.path) if not file.exists() else ""
        source = replace(
            source,
            data=DataConfig(kind="text", tokenizer=recipe or str(file)),
            uses_hf_text_start=not recipe,
        )
    if folder is None or not have_same_ids(Path(source.data.tokenizer), file):
        return source
    return replace(source, eos_ids=_eos_ids(folder, source.model))


def _eos_ids(folder: Path, model: ModelConfig) -> frozenset[int]:
    """Return the declared ends that the model can generate."""
    return frozenset(number for number in declared_ends(folder) if number < model.vocab_size)


def _hf_source(path: Path, ignored_keys: Collection[str]) -> ModelSource:
    keys = read_hf_config(path)
    context = _context_tokens(keys, path)
    model, reports = inspect_folder(path, ignored_keys)
    stored = keys.get("dtype", keys.get("torch_dtype"))
    data = DataConfig(kind="text", tokenizer=str(tokenizer_file(path)))
    return ModelSource(
        path,
        "huggingface",
        # `load_hf_weights` does not load MTP layers.
        replace(model, mtp_layers=0),
        MoEConfig(),
        data,
        stored if stored in ("bfloat16", "float64") else "float32",
        context,
        eos_ids=_eos_ids(path, model),
        uses_hf_text_start=True,
        notices=tuple(f"{str(path)!r}: {report.note()}" for report in reports if report.note()),
    )


def _context_tokens(keys: Mapping[str, Any], path: Path) -> int:
    context = keys.get("max_position_embeddings")
    if context is None:
        return DEFAULT_CONTEXT_TOKENS
    if type(context) is not int or context < 1:
        raise ConfigError(
            f"{path / CONFIG_FILE}: max_position_embeddings={context!r} must be a number, at least 1; correct it"
        )
    return context
