"""Adapters in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors`, export and import."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.adapter_settings import folder_digest
from moefold.checkpoint.checkpoint_meta import META_FILE, CheckpointMeta, read_meta
from moefold.checkpoint.find_checkpoint import locate_checkpoint
from moefold.checkpoint.integrity import check_integrity
from moefold.checkpoint.run_tokenizer import find_run_tokenizer
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.comm.groups import World, raise_on_all_ranks
from moefold.config.base.param_spec import ParamSpec
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.convert.adapters.peft_config import (
    CONSTANT_KEYS,
    WEIGHTS_FILE,
    inspect_peft_folder,
    resolve_base,
)
from moefold.convert.adapters.peft_names import (
    PREFIX,
    PeftModule,
    StackedParameter,
    find_modules,
    leaf,
    other_modules,
    peft_modules,
    read_stacked,
    stacked_names,
    stacked_parameters,
    write_stacked,
)
from moefold.convert.atomic_dir import atomic_directory
from moefold.convert.export_folder import EXPORT_DTYPES, TRAINED_WAY_OUT
from moefold.convert.families.family import Family
from moefold.convert.families.hf_config import families_for, find_family, is_hf_folder, read_hf_config
from moefold.convert.families.known_keys import declared_keys
from moefold.convert.families.tensor_mapping import Region, Shape
from moefold.convert.hf_shards import copy_sidecar_files
from moefold.convert.hf_sidecar_files import find_sidecar_dir
from moefold.convert.import_folder import Conversion, OnBytes, finish_checkpoint, import_origin, write_checkpoint
from moefold.convert.model_card import read_training_run, write_model_card
from moefold.convert.preflight import read_model
from moefold.convert.safetensors_file import (
    DTYPE_NAMES,
    FileWriter,
    TensorLocation,
    bytes_of,
    create_file,
    plan_file_layout,
    read_header,
)
from moefold.convert.tokenizer_export import choose_tokenizer, tokenizer_files, write_tokenizer
from moefold.convert.weight_sources import check_finite
from moefold.cost.adapter_spec import adapted_weights, adapter_names, adapter_weights
from moefold.data.input_paths import ADAPTER_CONFIG_FILE
from moefold.errors import ConfigError
from moefold.hub import repo_of_snapshot
from moefold.message_text import format_list
from moefold.remote_path import is_remote, to_path


def export_adapters(checkpoint: Path, out: Path, world: World, *, dtype: str, on_bytes: OnBytes) -> Conversion:
    """Write the adapters of a checkpoint as a folder for PEFT. It is collective over `world`. Rank 0 writes.

    Args:
        out: the folder. It must not exist.
        dtype: dtype of the tensors. auto: float32, as in training.

    Raises:
        ConfigError: `out` cannot be used, or a matrix is not a module of the family.
    """
    checkpoint = world.all_gather_object(locate_checkpoint(checkpoint))[0]
    check_integrity(checkpoint, world)
    source = CheckpointSource(checkpoint)
    settings = source.meta.lora
    model = read_model(checkpoint)
    lora = LoraConfig(rank=settings["rank"], alpha=settings["alpha"], targets=tuple(settings["targets"]))
    family = _family_of(model, checkpoint)
    weights = adapted_weights(model, lora)
    parameters = _parameters_to_stack(model, family, weights)
    stacked = {name for name, weight in weights.items() if parameters and weight.is_expert}
    modules = peft_modules(model, family, {name: weight for name, weight in weights.items() if name not in stacked})
    stored = EXPORT_DTYPES.get(dtype, torch.float32)
    base, note = _base_name(to_path(settings["base"]))
    notes: tuple[str, ...] = (note,)
    tensors: dict[str, Tensor] = {}
    if world.is_rank0:
        pairs = {name: _read_pair(source, name) for name in dict.fromkeys(module.name for module in modules)}
        for module in modules:
            tensors |= dict(zip(module.tensor_names, module.to_peft(*pairs[module.name]), strict=True))
        tensors |= write_stacked({name: _read_pair(source, name) for name in stacked}, parameters)
        tensors = {name: values.to(stored) for name, values in sorted(tensors.items())}
    with atomic_directory(out, world) as tmp_dir:
        if world.is_rank0:
            for name, values in tensors.items():
                check_finite(values, name, checkpoint, TRAINED_WAY_OUT)
            _write_tensors(tmp_dir / WEIGHTS_FILE, tensors)
            keys = _config_keys(lora, modules, family, base, other_modules(model, family, modules))
            _add_stacked(keys, parameters, stacked)
            (tmp_dir / ADAPTER_CONFIG_FILE).write_text(
                json.dumps(keys, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
            notes = (*notes, *_write_tokenizer_files(tmp_dir, checkpoint, source.meta))
            run = read_training_run(checkpoint, model, source.meta)
            write_model_card(tmp_dir, family.name, model, run, is_adapter=True)
        raise_on_all_ranks(world, "")
    size = sum(values.nbytes for values in tensors.values())
    on_bytes(size)
    written = tuple(sorted(path.name for path in out.iterdir() if path.is_file() and path.name != WEIGHTS_FILE))
    return Conversion(2 * len(weights), size, written, messages=tuple(filter(None, notes)))


def _write_tokenizer_files(tmp_dir: Path, checkpoint: Path, meta: CheckpointMeta) -> tuple[str, ...]:
    """Write the run's tokenizer and its template, and return notes on it."""
    sidecar_dir = find_sidecar_dir(checkpoint)
    choice = choose_tokenizer(meta, sidecar_dir, find_run_tokenizer(checkpoint))
    if sidecar_dir is not None:
        copied = {*tokenizer_files(sidecar_dir)} - {*choice.excluded}
        copy_sidecar_files(
            sidecar_dir, tmp_dir, excluded=[file.name for file in sidecar_dir.iterdir() if file.name not in copied]
        )
    write_tokenizer(tmp_dir, choice)
    return choice.messages


def _family_of(model: ModelConfig, checkpoint: Path) -> Family:
    """Return the family of the weights' original folder, else the first family that computes the model."""
    sidecar_dir = find_sidecar_dir(checkpoint)
    has_config = sidecar_dir is not None and (sidecar_dir / "config.json").is_file()
    original = find_family(read_hf_config(sidecar_dir), sidecar_dir).name if sidecar_dir and has_config else ""
    if supported := next(families_for(model, original), None):
        return supported
    raise ConfigError("no family of Hugging Face models computes what this model does, so its modules have no names")


def _parameters_to_stack(
    model: ModelConfig, family: Family, weights: Mapping[str, ParamSpec]
) -> dict[str, list[StackedParameter]]:
    """Return the parameters with stacked adapters, by their module. Empty means adapters of experts are not stacked.

    Transformers stacks experts. When PEFT loads adapters of single experts, the form of released adapters, it stacks
    them. It does so only for some families, and loses adapters of gate and up projections alone (PEFT 0.21).
    """
    matrices = {leaf(name) for name, weight in weights.items() if weight.is_expert}
    is_whole = matrices == {"w_gate", "w_up", "w_down"}
    if not matrices or (is_whole and family.name in declared_keys().stacked_by_peft):
        return {}
    stacked = stacked_parameters(model, family, adapted_weights(model, LoraConfig(rank=1)))
    if not stacked:
        raise ConfigError(
            f"PEFT has no place for adapters of {format_list(sorted(matrices))} of the experts of {family.name}: "
            "export with --merge"
        )
    return stacked


def _read_pair(source: CheckpointSource, name: str) -> tuple[Tensor, Tensor]:
    a, b = (source.read(half, tuple(slice(0, size) for size in source.shapes[half])) for half in adapter_names(name))
    source.clear_cache()
    return a, b


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    specs = {name: (DTYPE_NAMES[values.dtype], tuple(values.shape)) for name, values in tensors.items()}
    layout = plan_file_layout(file, specs)
    create_file(file, layout)
    with FileWriter() as writer:
        for name, values in tensors.items():
            writer.write(layout.tensors[name], bytes_of(values.contiguous()))


def _config_keys(
    lora: LoraConfig, modules: list[PeftModule], family: Family, base: str, others: Collection[str]
) -> dict[str, Any]:
    """Return the keys of adapter_config.json."""
    single = [module.module for module in modules if module.expert is None]
    experts = [module.module for module in modules if module.expert is not None]
    target_modules, target_parameters = split_targets(single, experts, others, family)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": target_modules,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "target_parameters": target_parameters or None,
        **CONSTANT_KEYS,
    }


def _add_stacked(keys: dict[str, Any], parameters: Mapping[str, list[StackedParameter]], stacked: set[str]) -> None:
    """Add the parameters of stacked experts to the keys of adapter_config.json.

    If gate and up projections both have adapters, the rank is doubled with the same scale.
    """
    targets = {
        parameter.target: sum(piece.name in stacked for piece in parameter.pieces)
        for several in parameters.values()
        for parameter in several
    }
    adapted = {target: count for target, count in targets.items() if count}
    if not adapted:
        return
    keys["target_parameters"] = sorted({*(keys["target_parameters"] or ()), *adapted})
    for key, key_of_one in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        keys[key] = {target: count * keys[key_of_one] for target, count in adapted.items() if count > 1}


def _base_name(base: Path) -> tuple[str, str]:
    """Return the Hugging Face folder of the base weights, or the folder that they were imported from, and a note.

    A snapshot of the hub is named ORG/NAME, for PEFT. Other folders have their absolute paths.
    """
    if repo := repo_of_snapshot(str(base)):
        return repo, ""
    path = base if is_remote(base) else base.absolute()
    if is_hf_folder(base):
        return str(path), ""
    origin = read_meta(base).origin if (base / META_FILE).is_file() else ""
    imported = origin.removeprefix("import of ") if origin.startswith("import of ") else ""
    if repo := repo_of_snapshot(imported):
        return repo, ""
    # Imports of earlier versions may have a path relative to another folder.
    if imported and (is_remote(imported) or Path(imported).is_absolute() or is_hf_folder(Path(imported))):
        return imported if is_remote(imported) else str(Path(imported).absolute()), ""
    return str(path), (
        f"the base weights are a checkpoint of moefold, {str(path)!r}, which PEFT does not load: write them with "
        "moefold export, and set base_model_name_or_path of adapter_config.json to the result"
    )


@dataclass(frozen=True)
class PeftSource:
    """Adapters of a folder of PEFT, by our names, as a weight source that holds all adapters in memory."""

    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of each tensor."""
        return {name: tuple(values.shape) for name, values in self.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.tensors[name].dtype

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region."""
        return self.tensors[name][region]

    def clear_cache(self) -> None:
        """Do nothing: this source has no cache."""


def import_adapters(
    folder: Path,
    out: Path,
    world: World,
    base: Path | None,
    *,
    ignored_keys: Collection[str] = (),
    on_bytes: OnBytes,
) -> Conversion:
    """Convert a folder of PEFT to a checkpoint with adapters. It is collective over `world`.

    Args:
        out: the checkpoint. It must not exist.
        base: the base weights. None means the weights that adapter_config.json names.

    Raises:
        ConfigError: the folder has adapters of another kind or of another model, or `out` cannot be used.
    """
    keys, _ = inspect_peft_folder(folder, ignored_keys)
    base = resolve_base(folder, keys, base)
    model = read_model(base, ignored_keys)
    family = find_family(read_hf_config(base), base) if is_hf_folder(base) else _family_of(model, base)
    tensors, lora = _read_adapters(folder, keys, model, family)
    for name, values in tensors.items():
        check_finite(values, name, folder)
    settings = {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": list(lora.targets),
        "base": str(base.resolve()),
        "base_digest": folder_digest(base),
    }
    sidecar_dir = base if is_hf_folder(base) else find_sidecar_dir(base)
    finish = partial(finish_checkpoint, out=out, model=model, origin=import_origin(folder), lora=settings)
    conversion = write_checkpoint(PeftSource(tensors), out, world, finish, sidecar_dir, on_bytes=on_bytes)
    return replace(conversion, num_bytes=sum(values.nbytes for values in tensors.values()))


def _read_adapters(
    folder: Path, keys: Mapping[str, Any], model: ModelConfig, family: Family
) -> tuple[dict[str, Tensor], LoraConfig]:
    """Return the adapters by our names, and their settings."""
    stored = dict(read_header(folder / WEIGHTS_FILE))
    rank = keys["r"]
    # rsLoRA scales by alpha / sqrt(r) (arXiv:2312.03732).
    alpha = float(keys["lora_alpha"]) * (math.sqrt(rank) if keys.get("use_rslora") else 1.0)
    everything = adapted_weights(model, LoraConfig(rank=rank, alpha=alpha))
    parameters = stacked_parameters(model, family, everything)
    stacked_files = stored.keys() & stacked_names(parameters)
    tensors = read_stacked(
        {name: stored[name].read_rows(0, stored[name].shape[0]) for name in stacked_files}, parameters, rank
    )
    stacked = {name for name in everything if adapter_names(name)[0] in tensors}
    modules = find_modules(model, family, {name: w for name, w in everything.items() if name not in stacked})
    _rename_to_folder(stored, modules, family)
    present = stacked | {module.name for module in modules if module.tensor_names[0] in stored}
    targets = tuple(dict.fromkeys(f"{everything[name].part}.{name.rpartition('.')[2]}" for name in sorted(present)))
    lora = LoraConfig(rank=rank, alpha=alpha, targets=targets)
    needed = [module for module in modules if module.name in adapted_weights(model, lora)]
    names = stacked_files | {name for module in needed for name in module.tensor_names}
    if unknown := sorted(stored.keys() - names):
        raise ConfigError(
            f"{str(folder / WEIGHTS_FILE)!r} has adapters of modules that this model lacks or that cannot be adapted: "
            f"{format_list(unknown)}; they begin with {PREFIX}, and each expert is a module"
        )
    if missing := sorted(names - stored.keys()):
        raise ConfigError(
            f"{str(folder / WEIGHTS_FILE)!r} lacks {format_list(missing)}, as it only adapts some layers; moefold "
            "adapts a matrix in every layer that has it"
        )
    shapes = {name: adapter.shape for name, adapter in adapter_weights(model, lora).items()}
    for module in needed:
        pair = [stored[name].read_rows(0, stored[name].shape[0]) for name in module.tensor_names]
        _check_shapes(folder, module, pair, everything[module.name], rank)
        for name, values in zip(adapter_names(module.name), module.from_peft(*pair), strict=True):
            if module.expert is None:
                tensors[name] = values.contiguous()
            else:
                tensors.setdefault(name, values.new_empty(shapes[name]))[module.expert] = values
    return tensors, lora


def _rename_to_folder(stored: dict[str, TensorLocation], modules: list[PeftModule], family: Family) -> None:
    """Rename tensors from the names of transformers' model, which PEFT saves, to the names of a folder."""
    for module in modules:
        in_model = replace(module, module=family.name_in_transformers(module.module))
        for name, name_in_model in zip(module.tensor_names, in_model.tensor_names, strict=True):
            if name not in stored and name_in_model in stored:
                stored[name] = stored.pop(name_in_model)


def _check_shapes(folder: Path, module: PeftModule, pair: list[Tensor], weight: ParamSpec, rank: int) -> None:
    inputs, outputs = weight.shape[1:] if weight.is_expert else weight.shape[::-1]
    for name, values, shape in zip(module.tensor_names, pair, ((rank, inputs), (outputs, rank)), strict=True):
        if tuple(values.shape) != shape:
            raise ConfigError(
                f"{str(folder / WEIGHTS_FILE)!r} has adapters of another model: {name} is {list(values.shape)}, and "
                f"the base weights need {list(shape)}"
            )


def split_targets(
    modules: Collection[str], experts: Collection[str], others: Collection[str], family: Family
) -> tuple[list[str], list[str]]:
    """Return `target_modules` and `target_parameters` of adapter_config.json.

    For models with stacked experts in transformers 5, PEFT takes every target with the name of an expert's matrix for
    the stacked parameters. It does so in any part of the model (PEFT 0.21, `_convert_peft_config_moe`). Other modules
    with such a name are therefore targeted by their weights, which PEFT does not convert. PEFT renames tensors like the
    tensors of a folder, but not targets: modules are listed with both names, in a folder and in transformers' model.

    Args:
        modules: names of the modules with adapters, except experts.
        experts: names of single experts with adapters.
        others: names of the modules without adapters. Targets with the same last name as one of these are in full.
    """
    stacked = declared_keys().stacked_by_peft.get(family.name, [])
    ambiguous = {leaf(name) for name in others}
    weights = {name for name in modules if leaf(name) in stacked}
    leaf_names = {leaf(name) for name in experts}
    for name in modules:
        if name not in weights:
            names = (name, family.name_in_transformers(name))
            leaf_names |= {*names} if leaf(name) in ambiguous else {leaf(target) for target in names}
    return sorted(leaf_names), sorted(f"{name}.weight" for name in weights)
