"""Loaded initial weights: imported, from another run, or upcycled from a dense model.

Upcycling makes experts as scaled copies or slices of a dense model's feed-forward layers, with unchanged outputs. The
granularity is G = dense width / expert width. Expert e holds slice e mod G of the dense feed-forward layer. The G
experts from e - e mod G on form a virtual group, one copy of the layer (arXiv:2410.07524 sec. 3). A router whose rows
are equal within each group sends a token to whole groups. Each chosen copy counts with its routing weight, so w_up and
w_down are scaled such that the weights of the copies of a slice sum to 1. Then the model computes the same outputs as
the dense model. With G = 1 this is plain upcycling (arXiv:2212.05055, arXiv:2412.09952).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.entries import OPTIONAL_BUFFER_SUFFIX
from moefold.checkpoint.find_checkpoint import skipped_checkpoints
from moefold.checkpoint.integrity import check_integrity
from moefold.checkpoint.run_tokenizer import find_run_tokenizer, trained_tokenizer
from moefold.comm.groups import World, current_world, errors_on_all_ranks
from moefold.config.model import ModelConfig
from moefold.config.sections.checkpoint import CheckpointConfig, UpcycleConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.run import RunConfig
from moefold.convert.families.hf_config import inspect_folder, is_hf_folder
from moefold.convert.families.known_keys import ALL_KEYS
from moefold.convert.families.tensor_mapping import Region, Shape
from moefold.convert.hf_shards import save_sidecar_files
from moefold.convert.hf_sidecar_files import find_sidecar_dir, tokenizer_unsupported_reason
from moefold.convert.import_folder import Conversion, OnBytes, finish_checkpoint, write_checkpoint
from moefold.convert.preflight import export_message, read_model, resolve_weights_folder, upcycle_scale, weights_path
from moefold.convert.tokenizer_export import choose_tokenizer, tokenizer_mismatch_message
from moefold.convert.weight_sources import WeightSource, load_shards, open_weights, parameter_shapes
from moefold.cost.adapter_spec import is_adapter
from moefold.model.weight_init import initial_values, seed_for
from moefold.parallel.parallel_model import ParallelModel
from moefold.remote_path import is_remote


def load_initial_weights(
    run: RunConfig,
    sizes: ModelConfig,
    data: DataConfig,
    checkpoint: CheckpointConfig,
    model: ParallelModel,
    *,
    is_first_rank: bool,
    folder: Path | None = None,
) -> str:
    """Fill this rank's shards from `checkpoint.init_from` or `checkpoint.upcycle`. It is collective over all ranks.

    For a run or a folder of checkpoints, the ranks agree on the newest checkpoint, because a run may save in the
    meantime. The first rank copies the tokenizer of the weights next to the run's checkpoints. Adapters are kept.

    Args:
        folder: the weights, if they were found already. None means the weights that the recipe names.

    Returns:
        A description of the loaded weights, on the first rank with a note if the run does not read text with the
        tokenizer of the weights, or "" if the initial weights stay random.

    Raises:
        ConfigError: the weights cannot be read, or belong to another model. Raised on every rank.
    """
    start = checkpoint.start
    upcycle = checkpoint.upcycle
    if not start:
        return ""
    world = current_world()
    weights = weights_path(start)
    path: Path = folder or world.all_gather_object(resolve_weights_folder(weights))[0]
    skipped = skipped_checkpoints(weights, path) if is_first_rank else []
    if not is_hf_folder(path):
        check_integrity(path, world, checks_hashes=checkpoint.verify)
    source = open_weights(path)
    if upcycle:
        source = UpcycledSource(source, sizes, upcycle, run.seed)
    with errors_on_all_ranks(world):
        load_shards(source, _tensors_to_load(model, source), str(path))
    if is_first_rank and checkpoint.saves:
        save_sidecar_files(path, run, checkpoint)
    notes = [f"skipped a damaged checkpoint, {description}" for description in skipped]
    notes += [tokenizer_mismatch_message(data, path) if is_first_rank else ""]
    notes += _indexer_messages(sizes, source)
    if is_first_rank and is_hf_folder(path):
        notes += [report.note() for report in inspect_folder(path, checkpoint.ignore_keys)[1]]
    if upcycle:
        notes.append(export_message(sizes))
    elif is_first_rank and (left_out := read_model(path, ALL_KEYS).mtp_layers - sizes.mtp_layers):
        notes.append(f"without the layers of multi-token prediction, of which the weights have {left_out}")
    # A copy on this machine is described by its source.
    origin = start if is_remote(start) and is_hf_folder(path) else path
    summary = f"{'upcycled from' if upcycle else 'weights from'} {origin}"
    return "; note: ".join([summary, *filter(None, notes)])


def _tensors_to_load(model: ParallelModel, source: WeightSource) -> dict[str, Tensor]:
    """Return the tensors of the model to load: all but adapters, and indexers that the weights lack."""
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers.items()
        # Counts of the last step of a run are not weights: the new run starts from zeros.
        if name in source.shapes or not name.endswith(OPTIONAL_BUFFER_SUFFIX)
    }
    stored = {
        name: weight
        for name, weight in model.named_parameters.items()
        if (name in source.shapes or INDEXER not in name) and not is_adapter(name)
    }
    return {**stored, **buffers}


def _indexer_messages(model: ModelConfig, source: WeightSource) -> list[str]:
    """Return notes on indexers that the weights lack, and on indexers that the recipe does not use."""
    if not model.attention.selector:
        return []
    model_names = {name for name in parameter_shapes(model) if INDEXER in name}
    file_names = {name for name in source.shapes if INDEXER in name}
    if not file_names:
        return ["with random indexers, as the weights are of dense attention"]
    notes = []
    if random := _layers_of(model_names - file_names):
        notes.append(f"with random indexers in layers {random}, which the weights lack")
    if unused := _layers_of(file_names - model_names):
        notes.append(f"without the indexers of layers {unused}, which attend to the keys of earlier layers here")
    return notes


def _layers_of(names: set[str]) -> str:
    """Return the numbers of the layers that parameters belong to."""
    return ", ".join(map(str, sorted({int(name.split(".")[1]) for name in names})))


INDEXER = ".attention.indexer."
"""Part of the name of the indexers' tensors, which weights of a dense model lack."""
EXPERTS = ".ffn.experts.w_"
ROUTER = ".ffn.router.weight"
SHARED = (".ffn.shared.w_gate", ".ffn.shared.w_up", ".ffn.shared_gate")
"""Tensors of a shared expert that are initialised at random. Its w_down is 0, so that it initially adds nothing."""


class UpcycledSource:
    """Initial weights of a model with experts, computed from the weights of a dense model.

    Args:
        model: the model with experts. `upcycle_unsupported_reason` must accept the pair.
        seed: seed of the router, the noise and the shared expert. Each tensor has its own generator.
    """

    def __init__(self, dense: WeightSource, model: ModelConfig, upcycle: UpcycleConfig, seed: int) -> None:
        self._dense = dense
        self._model = model
        self._upcycle = upcycle
        self._seed = seed
        self.shapes: Mapping[str, Shape] = parameter_shapes(model)
        some_width = next(shape[0] for name, shape in dense.shapes.items() if name.endswith(".ffn.w_up"))
        self._granularity = some_width // model.ffn.moe.intermediate_size
        # Both w_up and w_down get the square root, because their product must be scaled.
        self._factor = math.sqrt(upcycle_scale(model, self._granularity)) if upcycle.scaling else 1.0

    def dtype(self, name: str) -> torch.dtype:
        """Return the dense dtype, or float32 if scaling or noise would be rounded."""
        if name.endswith(".expert_bias"):
            return torch.float32
        if EXPERTS in name and (self._upcycle.noise or math.frexp(self._factor)[0] != 0.5):
            return torch.float32
        return self._dense.dtype(name if name in self._dense.shapes else "embedding.weight")

    def read(self, name: str, region: Region) -> Tensor:
        """Return the values of a region. It reads whole experts of the dense model."""
        if EXPERTS in name:
            experts = [self._expert(name, e)[region[1:]] for e in range(region[0].start, region[0].stop)]
            return torch.stack(experts).to(self.dtype(name))
        if name in self._dense.shapes:
            return self._dense.read(name, region)
        return self._new_tensor(name)[region].to(self.dtype(name))

    def clear_cache(self) -> None:
        """Free the cache of the dense source."""
        self._dense.clear_cache()

    def _new_tensor(self, name: str) -> Tensor:
        """Return a whole tensor that the dense model lacks."""
        shape = self.shapes[name]
        model = self._model
        if not name.endswith((ROUTER, *SHARED)) or (name.endswith(ROUTER) and self._upcycle.router_init == "zero"):
            return torch.zeros(shape)
        if name.endswith(ROUTER) and self._upcycle.router_init == "group":
            groups = initial_values(f"{name}.groups", (shape[0] // self._granularity, shape[1]), model, self._seed)
            return groups.repeat_interleave(self._granularity, 0)
        return initial_values(name, shape, model, self._seed)

    def _expert(self, name: str, e: int) -> Tensor:
        """Return one expert, [H, F], or [F, H] for w_down, in float32."""
        model = self._model
        dense_name = name.replace(".experts.", ".")
        piece = e % self._granularity
        inner = slice(piece * model.ffn.moe.intermediate_size, (piece + 1) * model.ffn.moe.intermediate_size)
        outer = slice(0, model.hidden_size)
        is_down = name.endswith("w_down")
        values = self._dense.read(dense_name, (outer, inner) if is_down else (inner, outer)).float().t()
        if not name.endswith("w_gate"):
            values = values * self._factor
        if self._upcycle.noise:
            generator = torch.Generator().manual_seed(seed_for(self._seed, f"{name}.{e}.noise"))
            noise = torch.empty(values.shape).normal_(0.0, 1.0, generator=generator)
            values = values + self._upcycle.noise * values.std() * noise
        return values


def upcycle_folder(
    dense: Path, out: Path, model: ModelConfig, upcycle: UpcycleConfig, seed: int, world: World, *, on_bytes: OnBytes
) -> Conversion:
    """Write the checkpoint of an upcycled model. It is collective over `world`.

    Args:
        dense: a Hugging Face folder, a checkpoint, or a run (its newest checkpoint).
        out: the checkpoint. It must not exist.
        seed: seed of the router, the noise and the shared expert.

    Raises:
        ConfigError: `dense` or `out` cannot be used. Nothing remains written.
    """
    dense = world.all_gather_object(resolve_weights_folder(dense))[0]
    if not is_hf_folder(dense):
        check_integrity(dense, world)
    source = UpcycledSource(open_weights(dense), model, upcycle, seed)
    sidecar_dir: Path | None = dense
    tokenizer = ""
    if not is_hf_folder(dense):
        sidecar_dir = find_sidecar_dir(dense)
        tokenizer = trained_tokenizer(dense, read_meta(dense))
    run_tokenizer = find_run_tokenizer(dense)
    excluded = () if is_hf_folder(dense) else choose_tokenizer(read_meta(dense), sidecar_dir, run_tokenizer).excluded
    finish = partial(finish_checkpoint, out=out, model=model, origin=f"upcycle of {dense}", tokenizer=tokenizer)
    conversion = write_checkpoint(source, out, world, finish, sidecar_dir, excluded, on_bytes=on_bytes)
    reason = ""
    if sidecar_dir is not None and not tokenizer:
        reason = tokenizer_unsupported_reason(sidecar_dir, "set data.tokenizer, or train on token ids")
    notes = [note for note in (reason and f"recipe.toml names no tokenizer: {reason}", export_message(model)) if note]
    return replace(conversion, messages=tuple(notes))
