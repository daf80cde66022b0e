"""Checks of a conversion and of a run's initial weights, before torch is imported.

They include the rules of upcycling: legal pairs of dense and expert model, equal initial outputs, and exportability.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from moefold.checkpoint.adapter_settings import adapters_unsupported_reason, folder_digest
from moefold.checkpoint.checkpoint_meta import model_sizes, read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.checkpoint.integrity import check_file_sizes
from moefold.checkpoint.model_differences import model_differences
from moefold.config.base.layer_words import spell_layers
from moefold.config.base.plugins import MissingPartError
from moefold.config.edit import edit_model
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.sections.checkpoint import CheckpointConfig, UpcycleConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.tables.toml_text import shown_value
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import (
    families_for,
    family_unsupported_reason,
    inspect_folder,
    is_hf_folder,
    read_model_config,
)
from moefold.convert.families.known_keys import KeyReport
from moefold.convert.hf_sidecar_files import tokenizer_unsupported_reason
from moefold.convert.run_config import missing_parts
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.hub import download_advice, is_hub_url, snapshot
from moefold.message_text import Setting
from moefold.remote_copy import local_copy
from moefold.remote_path import RemoteError, RemotePath, check_remote_writable, is_remote, to_path
from moefold.validate.config import check_model


def new_folder_unsupported_reason(final: Path) -> str:
    """Return the reason why a new folder cannot have this path, or ""."""
    try:
        if final.exists() or final.is_symlink():
            return f"{str(final)!r} exists; name another folder, or remove it"
        if isinstance(final, RemotePath):
            check_remote_writable(RemotePath(*final.parts[:-1]))
    except RemoteError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"{str(final)!r} cannot be written: {getattr(error, 'strerror', None) or error}"
    return "" if final.name not in ("", "..") else f"{str(final)!r} is not a name of a new folder"


def upcycle_scale(model: ModelConfig, slices: int) -> float:
    """Return the factor that makes the weights of a slice's chosen copies sum to 1, for equal logits of all experts.

    If routing weights sum to 1, each slice gets 1/slices for any logits. Otherwise the factor assumes equal logits.
    """
    router = model.ffn.moe.router
    if router.weights_sum_to_one:
        return float(slices / router.scaling_factor)
    weight = router.uniform_weight(model.ffn.moe.num_experts)
    assert weight is not None, "check_config"
    return float(1 / (model.ffn.moe.top_k / slices * weight * router.scaling_factor))


def preserves_outputs(model: ModelConfig, upcycle: UpcycleConfig) -> bool:
    """Return whether the upcycled model initially computes the same outputs as the dense model."""
    # Unless the weights sum to 1, they are only known for equal logits.
    is_whole = upcycle.router_init == "group" and model.ffn.moe.router.weights_sum_to_one
    return (is_whole or upcycle.router_init == "zero") and upcycle.noise == 0 and upcycle.scaling


def dense_unsupported_reason(dense: ModelConfig) -> str:
    """Return the reason why a model cannot be upcycled, or empty if it can."""
    return "it has experts already; name a dense model, or set checkpoint.init_from" if dense.has_moe_layers else ""


def upcycle_unsupported_reason(dense: ModelConfig, model: ModelConfig) -> str:
    """Return the reason why a dense model cannot become a model with experts, or empty if it can."""
    if reason := dense_unsupported_reason(dense):
        return reason
    width = dense.ffn.dense.intermediate_size
    inner = model.ffn.moe.intermediate_size
    if width % inner:
        return f"model.ffn.moe.intermediate_size={inner} must divide its feed-forward width {width}"
    slices = width // inner
    if model.ffn.moe.num_experts % slices or model.ffn.moe.top_k % slices:
        return (
            f"its width {width} is {slices} experts of model.ffn.moe.intermediate_size={inner}, so "
            f"model.ffn.moe.num_experts={model.ffn.moe.num_experts} and "
            f"model.ffn.moe.top_k={model.ffn.moe.top_k} must be multiples of {slices}"
        )
    if model.ffn.moe.latent_size:
        return (
            f"its feed-forward width has no counterpart of model.ffn.moe.latent_size={model.ffn.moe.latent_size}, "
            "the width of latent experts; leave latent_size out"
        )
    # Settings that a dense model does not determine. Experts keep its activation.
    moe = dense.ffn.moe
    experts = replace(
        model.ffn.moe,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        intermediate_size=moe.intermediate_size,
        bias=moe.bias,
        router=moe.router,
        shared=moe.shared,
    )
    networks = model.ffn if model.has_dense_layers else replace(model.ffn, dense=dense.ffn.dense)
    layers = spell_layers([words._replace(ffn="dense") for words in model.layer_words])
    comparable = replace(model, layers=layers, ffn=replace(networks, moe=experts))
    different = model_differences(model_sizes(dense), comparable, model)
    return f"it is of another shape: {different}" if different else ""


def export_message(model: ModelConfig) -> str:
    """Return a note if no Hugging Face family can express the model, with the settings that would help, else "".

    MTP layers do not count, because an export can leave them out.
    """
    plain = replace(model, mtp_layers=0)
    if next(families_for(plain), None):
        return ""
    lacks = "no family of Hugging Face models computes what this model does, so moefold export cannot write it"
    width = plain.ffn.moe.shared_width or plain.ffn.moe.intermediate_size
    # Alternative settings of the experts of an upcycled model. A single choice with normalised weights has weight 1, so
    # its router would get no gradient.
    changes: list[dict[str, Any]] = [{"ffn.moe.router.softmax": "post"}] if plain.ffn.moe.top_k > 1 else []
    for change in (*changes, {"ffn.moe.shared.intermediate_size": width, "ffn.moe.shared.gate": True}):
        if supported := next(families_for(edit_model(plain, change)), None):
            settings = " ".join(f"model.{key}={shown_value(value)}" for key, value in change.items()).replace("'", "")
            return f"{lacks}; with {settings} it is {supported.name}"
    reasons = {family.name: family_unsupported_reason(family, plain) for family in FAMILIES.values()}
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    return f"{lacks}; the nearest is {nearest}: {reasons[nearest]}"


def weights_path(name: str) -> Path:
    """Return the path of weights that a user named. Raise ConfigError if they cannot be reached.

    For `hf://ORG/NAME` it is a snapshot on this machine, for a remote Hugging Face folder a copy. Checkpoints are not
    copied.
    """
    if is_hub_url(name):
        return snapshot(name, "model")
    path = to_path(name)
    if isinstance(path, RemotePath):
        return local_copy(str(path)) if is_hf_folder(path) else path
    return path


def resolve_weights_folder(path: Path) -> Path:
    """Resolve a user's path to a Hugging Face folder, a checkpoint, or the newest checkpoint of a run."""
    if is_hf_folder(path):
        return path
    if not path.exists() and (advice := download_advice(str(path))):
        raise ConfigError(f"{str(path)!r} does not exist; {advice}")
    return locate_checkpoint(path)


def read_model(path: Path, ignored_keys: Collection[str] = ()) -> ModelConfig:
    """Return the section [model] of the weights at a user's path. Raise ConfigError if moefold knows none there."""
    path = resolve_weights_folder(path)
    if is_hf_folder(path):
        return read_model_config(path, ignored_keys)
    keys = {key: value for key, value in read_meta(path).model.items() if key != "preset"}
    try:
        model = config_from_dict({"model": keys}).model
        check_model(model)
    except MissingPartError as error:
        raise ConfigError(f"checkpoint {str(path)!r}: {missing_parts(path, error)}") from None
    except ConfigError as error:
        raise ConfigError(f"checkpoint {str(path)!r} has a model that this version does not know: {error}") from None
    return model


def init_from_unsupported_reason(
    model: ModelConfig, path: Path, ignored_keys: Collection[str] = (), *, is_dense: bool = False
) -> str:
    """Return the reason why a recipe cannot start with the weights of a folder, or empty if it can.

    Args:
        is_dense: whether the folder's weights are upcycled to the recipe's model.
    """
    if not path.is_dir():
        advice = download_advice(str(path)) if not path.exists() else ""
        return f"it does not exist or is not a folder; {advice or 'name a Hugging Face folder, a checkpoint or a run'}"
    weights_model = read_model(path, ignored_keys)
    if is_dense:
        return upcycle_unsupported_reason(weights_model, model)
    if model.attention.selector and weights_model.attention.selector:
        # No weight depends on the number of selected keys. Layers that had their own indexers may share selections, and
        # indexers that the weights lack start at random.
        indexer = replace(weights_model.attention.indexer, top_k=model.attention.indexer.top_k)
        attention = replace(weights_model.attention, indexer=indexer)
        pairs = zip_longest(weights_model.layer_words, model.layer_words[: weights_model.num_layers])
        layers = spell_layers([theirs._replace(selection=(ours or theirs).selection) for theirs, ours in pairs])
        weights_model = replace(weights_model, attention=attention, layers=layers)
    elif model.attention.selector:
        # Weights of a dense model: all indexers start at random.
        layers = spell_layers([words._replace(selection="own") for words in model.layer_words])
        model = replace(model, attention=replace(model.attention, indexer=None), layers=layers)
    if not model.mtp_layers:
        # MTP (multi-token prediction) layers read the model's last hidden states and change nothing in it.
        weights_model = replace(weights_model, mtp_layers=0)
    different = model_differences(model_sizes(weights_model), model)
    return f"it is of another model: {different}; give the recipe its sizes" if different else ""


def check_initial_adapters(lora: LoraConfig, checkpoint: CheckpointConfig) -> None:
    """Check before the ranks start that lora.init_from has the adapters of the recipe, and that base weights exist."""
    if not lora.rank:
        return
    if not checkpoint.init_from:
        raise ConfigError(
            f"lora.rank={lora.rank} trains adapters of given weights, and checkpoint.init_from names none; set it to a "
            "Hugging Face folder, a checkpoint or a run"
        )
    if not lora.init_from:
        return
    path = resolve_weights_folder(weights_path(lora.init_from))
    name = Setting("lora.init_from", lora.init_from)
    stored = {} if is_hf_folder(path) else read_meta(path).lora
    if not stored:
        raise ConfigError(name.problem("has no adapters", "name a checkpoint of a run with lora.rank, or leave it out"))
    if reason := adapters_unsupported_reason(stored, lora, str(path)):
        raise ConfigError(name.problem(reason))
    base = resolve_weights_folder(weights_path(checkpoint.init_from))
    if folder_digest(base) != stored["base_digest"]:
        raise ConfigError(
            f"{name} has adapters of the weights in {stored['base']!r}, and checkpoint.init_from="
            f"{checkpoint.init_from!r} has others; set checkpoint.init_from={stored['base']!r}"
        )


def check_import(
    folder: Path,
    out: Path,
    rank_env: RankEnv | None,
    *,
    needs_tokenizer: bool,
    ignored_keys: Collection[str] = (),
) -> tuple[KeyReport, ...]:
    """Check config and tokenizer of a Hugging Face folder, and the output path. Return the kinds of its keys."""
    _, reports = inspect_folder(folder, ignored_keys)
    if needs_tokenizer and (reason := tokenizer_unsupported_reason(folder, NO_TOKENIZER_HINT)):
        raise ConfigError(reason)
    check_out(out, rank_env)
    return reports


def check_export(checkpoint: Path, out: Path, rank_env: RankEnv | None) -> None:
    """Check the metadata of a checkpoint and the sizes of its files, and that the folder can be created."""
    folder = locate_checkpoint(checkpoint)
    check_file_sizes(folder)
    read_model(folder)
    check_out(out, rank_env)


def check_merge(
    checkpoints: Sequence[Path], weights: Sequence[float], out: Path, rank_env: RankEnv | None
) -> list[float]:
    """Check the checkpoints of a merge, their weights (empty: equal) and the output path. Return each weight."""
    shares = list(weights) or [1.0] * len(checkpoints)
    if len(shares) != len(checkpoints):
        raise ConfigError(f"--weights has {len(shares)} numbers for {len(checkpoints)} checkpoints; give one for each")
    if invalid := [share for share in shares if not (math.isfinite(share) and share > 0)]:
        raise ConfigError(
            f"--weights {invalid[0]:g} must be a finite number above 0; leave out a checkpoint of weight 0"
        )
    if not math.isfinite(sum(shares)):
        raise ConfigError("--weights have a sum above the largest number; only their ratios matter, so divide them all")
    if hf_folders := [path for path in checkpoints if is_hf_folder(path)]:
        raise ConfigError(f"{str(hf_folders[0])!r} is a Hugging Face folder; convert it with moefold import first")
    paths = [locate_checkpoint(path) for path in checkpoints]
    if adapters := [path for path in paths if read_meta(path).lora]:
        raise ConfigError(
            f"{str(adapters[0])!r} only has adapters, whose products are not averaged with them; export each with "
            "moefold export --merge, and import the result"
        )
    first = read_model(paths[0])
    for path in paths:
        check_file_sizes(path)
        if different := model_differences(model_sizes(read_model(path)), first):
            raise ConfigError(
                f"{str(path)!r} is of another model than {str(paths[0])!r}: {different}; merge checkpoints of one model"
            )
    check_out(out, rank_env)
    return shares


def check_out(out: Path, rank_env: RankEnv | None) -> None:
    """Check on rank 0 that the output path is free, and that ranks of several machines do not write to a remote one."""
    if is_remote(out) and rank_env is not None and rank_env.world_size > rank_env.local_world_size:
        raise ConfigError(
            f"{str(out)!r} is remote: its files are written on one machine before they are sent; start the ranks on "
            "one machine, or name a folder that all machines share"
        )
    if (rank_env is None or rank_env.rank == 0) and (reason := new_folder_unsupported_reason(out)):
        raise ConfigError(reason)


NO_TOKENIZER_HINT = "add --no-tokenizer to train on token ids"
