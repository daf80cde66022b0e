"""Data files of a run: their fingerprints, and the decision whether a checkpoint was trained on the same data."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.sample_order import (
    SampleOrder,
    data_order_change,
    dropped_files,
    moved_data_message,
    with_recipe_file_names,
)
from moefold.comm.groups import World, current_world
from moefold.config.sections.data import DataConfig
from moefold.data.fingerprint import file_sizes, fingerprint, size_differences
from moefold.data.input_paths import SKIPPED
from moefold.data.skip_corrupt import corrupt_files
from moefold.data.source_listing import named_sources
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.train.position import Position

if TYPE_CHECKING:
    from moefold.data.token_file_set import TokenFileSet


@dataclass(frozen=True)
class DataFingerprints:
    """Fingerprints of all data files, the same on every rank."""

    by_name: dict[str, str] = field(default_factory=dict)
    """Results of `fingerprint`, computed by rank 0 only. "skipped" for files that any rank has to skip."""
    skip_reasons: dict[str, str] = field(default_factory=dict)
    """Reason for each skipped file, if known."""


def resolve_data_files(data: DataConfig, world: World) -> DataFingerprints:
    """Fingerprint the data files on rank 0 and compare them with every rank's. It is collective over the world.

    Raises:
        ConfigError: another rank sees different files, and they are not token files that may be skipped as corrupt.
            Raised on every rank.
    """
    on_rank0: DataFingerprints = world.all_gather_object(_read_fingerprints(data) if world.is_rank0 else None)[0]
    own = {} if world.is_rank0 else size_differences(on_rank0.by_name, file_sizes(data))
    fingerprints = dict(on_rank0.by_name)
    reasons = dict(on_rank0.skip_reasons)
    for rank, differences in enumerate(world.all_gather_object(own)):
        reason = f"rank {rank} sees other data than rank 0: {format_list(list(differences.values()))}"
        if differences and not data.drops_files:
            raise ConfigError(f"{reason}; give all machines the same files")
        for name in differences:
            fingerprints[name] = SKIPPED
            reasons.setdefault(name, reason)
    return DataFingerprints(fingerprints, reasons)


def _read_fingerprints(data: DataConfig) -> DataFingerprints:
    looks = fingerprint(data)
    if data.kind != "tokens" or SKIPPED not in looks.values():
        return DataFingerprints(looks)

    faults = corrupt_files(data)
    return DataFingerprints(looks, {name: faults[file] for name, file in named_sources(data) if file in faults})


class RunDataFiles:
    """The data files of a run, as they are now and as the run began with them."""

    def __init__(self, order: SampleOrder, data: DataConfig, position: Position) -> None:
        """Fingerprint the files. It is collective.

        Raises:
            ConfigError: ranks see different files.
        """
        self.order = order
        self.found = resolve_data_files(data, current_world())
        self.fingerprints = self.found.by_name
        """Present fingerprints of the files."""
        self.initial = self.found.by_name
        """Fingerprints at the start of the run, for its checkpoints."""
        self._data = data
        self._position = position

    def decide_restart(self, meta: CheckpointMeta) -> str:
        """Restart the data at sample 0 if it is not the data of a checkpoint. Return the difference, or an empty text.

        Call it before the state of the checkpoint is loaded.
        """
        change = data_order_change(meta, self.order, self.fingerprints, drops_files=self._data.drops_files)
        self._position.restart_data(is_other=bool(change))
        return change

    def resume(self, meta: CheckpointMeta) -> tuple[CheckpointMeta, str]:
        """Take over the files of a checkpoint of the same data.

        Returns:
            The metadata with the present names of the files, and a message about files that have moved.
        """
        found = with_recipe_file_names(meta, self.order, self.fingerprints)
        self.initial = found.data_files
        return found, moved_data_message(found, self.order)

    def token_files(self, vocab_size: int, meta: CheckpointMeta | None) -> "TokenFileSet | None":
        """Return the token files of the run, with its dropped files, or None for other kinds of data. It is collective.

        Args:
            meta: metadata of the checkpoint whose data the run continues, or None for a new run.

        Raises:
            ConfigError: as `build_token_file_set` and `check_same_files`, on rank 0. All files are lost.
        """
        if self._data.kind != "tokens":
            return None
        from moefold.data.token_file_set import TokenFileSet, build_token_file_set, check_same_files

        world = current_world()
        fingerprints = self.found.by_name
        skipped = {name for name, value in fingerprints.items() if value == SKIPPED}
        if meta is not None and meta.data_tokens:
            reasons = {
                name: meta.data_lost.get(name) or self.found.skip_reasons.get(name, why)
                for name, why in dropped_files(meta, fingerprints).items()
            }
            known = TokenFileSet(meta.data_tokens, reasons)
            if world.is_rank0:
                earlier = {name for name, value in meta.data_files.items() if value == SKIPPED}
                check_same_files(known, self._data, skipped=earlier | skipped)
            # No rank opens a file before rank 0 has checked all of them.
            world.all_gather_object(None)
            return known
        found = None
        if world.is_rank0:
            found = build_token_file_set(self._data, vocab_size=vocab_size, skipped=skipped)
        return world.all_gather_object(found)[0]
