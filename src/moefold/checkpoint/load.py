"""Load checkpoints with torch.distributed.checkpoint (DCP) into the shards of any mapping."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, read_meta
from moefold.checkpoint.entries import OPTIONAL_BUFFER_SUFFIX, checkpoint_state, chunks_of, model_state
from moefold.checkpoint.integrity import check_integrity, gather_errors
from moefold.checkpoint.io_errors import translate_read_errors
from moefold.checkpoint.resume import RESUME_HINT
from moefold.checkpoint.safe_metadata import SafeReader, missing_or_short_files, read_metadata
from moefold.comm.groups import current_world
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.optim.states import named_moments

_OTHER_MOMENTS_PREFIX = "other moments instead of"
_OPTIMIZER_HINT = (
    "set train.optimizer and train.optimizer.groups as they were, or begin a new run with its weights: "
    "checkpoint.init_from"
)


def load_checkpoint(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    optimized: Mapping[str, nn.Parameter] | None = None,
) -> CheckpointMeta:
    """Load weights, buffers and optimizer moments into this rank's shards. It is collective over all ranks.

    Step counts of the moments are not loaded. Buffers named `OPTIONAL_BUFFER_SUFFIX` that the checkpoint lacks keep
    their values.

    Args:
        optimized: its parameters by name. None means `parameters`.

    Raises:
        ConfigError: the folder is not a checkpoint, or lacks an entry that a rank needs. Raised on every rank.
    """
    meta = read_meta(path)
    optimized = parameters if optimized is None else optimized
    with translate_read_errors(path):
        _check_has_moments(path, read_metadata(path), named_moments(optimizer, optimized) if optimized else None)
    load_entries(path, checkpoint_state(parameters, buffers, optimizer, optimized))
    return meta


def load_weights(path: Path, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """Load weights and buffers only, converted to the dtype of the parameters. It is collective over all ranks.

    Raises:
        ConfigError: the folder is not a checkpoint, or lacks an entry that a rank needs. Raised on every rank.
    """
    read_meta(path)
    check_integrity(path, current_world())
    load_entries(path, model_state(parameters, buffers))


def load_entries(path: Path, entries: dict[str, Tensor]) -> None:
    """Load entries of a checkpoint into this rank's shards. It is collective over all ranks.

    Raises:
        ConfigError: the checkpoint lacks an entry. Raised on every rank.
    """
    with translate_read_errors(path):
        metadata = read_metadata(path)
        stored = metadata.state_dict_metadata
        entries = {n: t for n, t in entries.items() if n in stored or not n.endswith(OPTIONAL_BUFFER_SUFFIX)}
        _check_complete(path, metadata, entries)
        dcp.load(entries, storage_reader=SafeReader(path), planner=ShardLoadPlanner())


def _check_complete(path: Path, metadata: Metadata, state: Mapping[str, Tensor]) -> None:
    """Check that the checkpoint has all entries of all ranks. It is collective, so that all ranks raise together."""
    faults = missing_or_short_files(path, metadata) if dist.get_rank() == 0 else []
    moments = [entry for entry in metadata.state_dict_metadata if entry.startswith("optimizer.")]
    parameters = {entry.rpartition(".")[0] for entry in moments}
    for name, tensor in state.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            parameter, _, moment = name.rpartition(".")
            has_others = parameter in parameters
            faults.append(f"{_OTHER_MOMENTS_PREFIX} {moment} of {parameter}" if has_others else f"tensor {name}")
        elif stored.size != tensor.shape:
            faults.append(f"{name} of shape {list(tensor.shape)}, it has {list(stored.size)}")
    if errors := gather_errors(faults, current_world()):
        if all(fault.startswith(_OTHER_MOMENTS_PREFIX) for fault in errors):
            raise ConfigError(
                f"checkpoint {str(path)!r} is of another optimizer, it has {format_list(errors)}; {_OPTIMIZER_HINT}"
            )
        moments = [name for name in metadata.state_dict_metadata if name.startswith("optimizer.")]
        is_of_indexers = bool(moments) and all(".indexer." in name for name in moments)
        if is_of_indexers and all(fault.startswith("tensor optimizer.") for fault in errors):
            raise ConfigError(
                f"checkpoint {str(path)!r} is of a run with train.indexer_stage='warmup', which trained only the "
                "indexers; begin the sparse stage as a new run with its weights, in another run.dir: "
                f"checkpoint.init_from={str(path)!r}"
            )
        raise ConfigError(f"checkpoint {str(path)!r} is damaged, it lacks {format_list(errors)}; {RESUME_HINT}")
    optimized = {name.rpartition(".")[0] for name in state if name.startswith("optimizer.")}
    # Two optimizers may use one name for different states: states that only one optimizer has distinguish them.
    missing_moments = [name for name in moments if name not in state and name.rpartition(".")[0] in optimized]
    if errors := gather_errors(missing_moments, current_world()):
        raise ConfigError(
            f"checkpoint {str(path)!r} is of another optimizer, it also has {format_list(errors)}; {_OPTIMIZER_HINT}"
        )


def _check_has_moments(path: Path, metadata: Metadata, moments: Mapping[str, Tensor] | None) -> None:
    """Check that a checkpoint has moments if and only if the optimizer has moments. It is collective.

    Args:
        moments: moments of this rank, or None if no parameter of the rank is trained.
    """
    has_moments = any(name.startswith("optimizer.") for name in metadata.state_dict_metadata)
    if gather_errors(["other"] if moments is not None and has_moments != bool(moments) else [], current_world()):
        raise ConfigError(
            f"checkpoint {str(path)!r} is of another optimizer, it has {'' if has_moments else 'no '}moments; set "
            "train.optimizer as it was, or begin a new run with its weights: checkpoint.init_from"
        )


class ShardLoadPlanner(DefaultLoadPlanner):
    """Load planner for a state of tensors that are all in the checkpoint."""

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill the shards of this rank."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), name
            assert stored.size == tensor.shape, (name, stored.size, tensor.shape)
            items += create_read_items_for_chunk_list(name, stored, chunks_of(tensor))
        return LoadPlan(items)
