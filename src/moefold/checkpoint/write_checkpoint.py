"""Save checkpoints with torch.distributed.checkpoint (DCP): an entry per logical tensor, for any mapping."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from moefold.checkpoint.checkpoint_meta import META_FILE, CheckpointMeta, TrainState, model_sizes, write_meta
from moefold.checkpoint.entries import chunks_of
from moefold.checkpoint.find_checkpoint import checkpoint_folder, checkpoint_folder_key, step_path
from moefold.checkpoint.io_errors import translate_io_errors
from moefold.checkpoint.manifest import FileDigest, digest_file, write_manifest
from moefold.checkpoint.retention import remove_folder, remove_older
from moefold.checkpoint.safe_metadata import METADATA_FILE, missing_or_short_files
from moefold.checkpoint.sample_order import sample_order
from moefold.checkpoint.writing_job import WritingJob, commit
from moefold.config.base.limits import FORMAT
from moefold.config.base.part import values_by_key
from moefold.config.schema import Config, config_to_dict
from moefold.config.sections.run import SETTINGS_FILE
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import RemotePath

Result = TypeVar("Result")


class ShardSavePlanner(DefaultSavePlanner):
    """Save planner for a state of tensors. An empty shard is not written."""

    def create_local_plan(self) -> SavePlan:
        """Return the items of torch's plan with the places of the shards."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[placed for item in plan.items for placed in self._place(item)])
        return self.plan

    def _place(self, item: WriteItem) -> Iterator[WriteItem]:
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, DTensor):
            yield item
            return
        assert item.tensor_data is not None
        for chunk in chunks_of(tensor):
            data = replace(item.tensor_data, chunk=chunk)
            yield replace(item, index=MetadataIndex(item.index.fqn, chunk.offsets), tensor_data=data)


def write_checkpoint(
    cfg: Config,
    state: Mapping[str, Tensor],
    train_state: TrainState,
    group: dist.ProcessGroup | None = None,
    planner: ShardSavePlanner | None = None,
    writer: WritingJob | None = None,
) -> Path:
    """Write a complete checkpoint of the run and return its folder. It is collective over all ranks.

    The first rank renames the temporary folder once it is complete, and deletes the checkpoints that retention does not
    keep. Then all ranks return.

    Args:
        state: this rank's shards, see `checkpoint_state`.
        train_state: progress of the run. The first rank stores it.
        group: all ranks, or None for the default group.
        planner: provides each tensor when it is written. None means all at once.
        writer: the job that saves, on the first rank. None means a job that starts with this save.

    Raises:
        ConfigError: on all ranks, the folder cannot be written, is full, differs between ranks, or another job uses it.
    """
    folder = checkpoint_folder(cfg.run, cfg.checkpoint)
    final = step_path(folder, train_state.step)
    with translate_io_errors(
        f"the checkpoint of step {train_state.step} cannot be written to {str(folder)!r}",
        disk=None if isinstance(folder, RemotePath) else folder,
    ):
        if dist.get_rank() == 0 and writer is None:
            writer = WritingJob(folder, checkpoint_folder_key(cfg.checkpoint))
        # DCP creates the folder on every rank if it is missing, which must not race with the deletion of old folders.
        draft = folder / _on_first_rank(lambda: writer.create_draft(train_state.step).name if writer else "", group)
        storage = _storage_writer(draft)
        planner = planner or ShardSavePlanner()
        metadata = dcp.save(dict(state), storage_writer=storage, process_group=group, planner=planner)
        records = _digest_files(draft, group, storage)

        def complete() -> None:
            assert writer is not None, "the first rank has a writer"
            writer.check_still_own(draft)
            if missing := missing_or_short_files(draft, metadata):
                raise ConfigError(
                    f"the checkpoint folder {str(folder)!r} lacks files of other ranks: {format_list(missing)}; "
                    "set checkpoint.dir to a folder that all machines share"
                )
            _complete(cfg, draft, final, records, train_state, writer)

        # No rank returns before the checkpoint has its final name.
        _on_first_rank(complete, group)
    return final


def _complete(
    cfg: Config,
    draft: Path,
    final: Path,
    records: dict[str, FileDigest],
    train_state: TrainState,
    writer: WritingJob,
) -> None:
    """Write the descriptions of a checkpoint with complete tensors, rename its folder, and apply retention."""
    try:
        write_meta(draft, checkpoint_meta(cfg, train_state))
    except OSError:
        raise
    except ValueError as error:
        largest = max(train_state.states, key=lambda name: _num_bytes(train_state.states[name]))
        raise ConfigError(f"{META_FILE} could not be read again: {error}; the largest state is {largest!r}") from error
    records |= {name: digest_file(draft / name) for name in (METADATA_FILE, META_FILE)}
    write_manifest(draft, records)
    if not isinstance(draft, RemotePath):
        _fsync_folder(draft)
        try:
            writer.check(final)
            commit(draft, final)
        except (ConfigError, OSError):
            remove_folder(draft)
            # Another job may have just saved this step.
            writer.check(final)
            raise
    writer.record_saved(final)
    if isinstance(final, RemotePath):
        # The run folder, with the settings that commands read next to the checkpoints, may be on another machine.
        text = json.dumps(config_to_dict(cfg), indent=2) + "\n"
        (final.parent / SETTINGS_FILE).write_text(text, encoding="utf-8")
    else:
        _fsync_folder(final.parent)
    keeping = cfg.checkpoint
    remove_older(final, keeping.keep, keeping.keep_every, writer.may_replace, keeps_best=keeping.keep_best)


def _num_bytes(state: dict[str, Any]) -> float:
    """Return the length of a state in JSON, or infinity if a number has too many digits for JSON."""
    try:
        return len(json.dumps(state))
    except ValueError:
        return math.inf


def checkpoint_meta(cfg: Config, train_state: TrainState) -> CheckpointMeta:
    """Return the metadata of a checkpoint, or a snapshot, of a run."""
    return CheckpointMeta(
        format=FORMAT,
        order=sample_order(cfg),
        model=model_sizes(cfg.model),
        parallel=values_by_key(cfg.parallel),
        dtype=cfg.run.dtype,
        states=train_state.states,
    )


def _on_first_rank(action: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """Act on the first rank, and return the result, or raise the error, on every rank. It is collective."""
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            result = [action()]
        except (ConfigError, OSError, ValueError) as error:
            result = [error]
    dist.broadcast_object_list(result, src=0, group=group)
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def _storage_writer(draft: Path) -> dcp.FileSystemWriter:
    if not isinstance(draft, RemotePath):
        return dcp.FileSystemWriter(draft)
    from moefold.checkpoint.hashed_files import RemoteWriter

    return RemoteWriter(draft)


def _digest_files(tmp: Path, group: dist.ProcessGroup | None, writer: dcp.FileSystemWriter) -> dict[str, FileDigest]:
    """Read back and hash the files of every rank, and return the digests of all ranks. It is collective.

    Remote files were hashed while they were sent, and the store compares the received bytes with checksums.
    """
    local: dict[str, FileDigest] | str
    try:
        if isinstance(tmp, RemotePath):
            local = writer.digests  # type: ignore[attr-defined]
        else:
            local = {path.name: digest_file(path) for path in sorted(tmp.glob(f"__{dist.get_rank()}_*.distcp"))}
    except OSError as error:
        local = f"rank {dist.get_rank()} cannot read back its files in {str(tmp)!r}: {error.strerror}"
    gathered: list[dict[str, FileDigest] | str] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, local, group=group)
    records: dict[str, FileDigest] = {}
    for digests in gathered:
        if isinstance(digests, str):
            raise ConfigError(f"the checkpoint is incomplete: {digests}")
        records |= digests
    return records


def _fsync_folder(folder: Path) -> None:
    """Flush a folder and its files to disk (fsync), so that a rename is never durable before the content."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
