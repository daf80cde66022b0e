"""Distributed data loader: opens the data files consistently on all ranks and drops files that turn out corrupt."""

import socket
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.sample_order import sample_order
from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import current_world
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest, Dataset, ProgramData
from moefold.data.input_paths import SKIPPED
from moefold.data.sample import ReferenceLogProbs
from moefold.data.sampler import Sampler, StridedSampler
from moefold.data.shard_reader import BrokenShardError, OutOfVocabError
from moefold.message_text import format_list
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.train.batch_sharding import BatchSharder, WeightedSamples
from moefold.train.data_files import RunDataFiles
from moefold.train.position import Position
from moefold.train.step_data import DataEvent

if TYPE_CHECKING:
    from moefold.data.token_file_set import TokenFileSet


T = TypeVar("T")


class DataLoader:
    """Loads this rank's shard of each batch. With data.corrupt="skip" a corrupt file is dropped on all ranks."""

    train_sampler: Sampler
    """The training samples, set by `open`, like `validation_sampler`."""
    validation_sampler: Sampler
    train_sharder: BatchSharder
    reference: ReferenceLogProbs | None
    """Log-probabilities of preference data under the reference model, or None for other data."""

    def __init__(
        self, cfg: Config, model: ParallelModel, position: Position, program_data: ProgramData | None = None
    ) -> None:
        """Fingerprint the data files. It is collective.

        Raises:
            ConfigError: ranks see different files.
        """
        self._cfg = cfg
        self._groups = model.groups
        self._positions = model.positions
        self._program_data = program_data
        self._position = position
        self.files = RunDataFiles(sample_order(cfg), cfg.data, position)
        self._shards: TokenFileSet | None = None
        self._is_dropped_evaluation_reported = False
        self.events: list[DataEvent] = []
        """Dropped data that is not logged yet."""
        self.message = ""
        """A message about dropped or moved files, or the reason why the data restarts at sample 0. It may be empty."""
        # Other kinds of data have no files that can be dropped during the run.
        self._can_drop_files = cfg.data.drops_files

    def open(self, meta: CheckpointMeta | None) -> None:
        """Open the samples of a run, continuing a checkpoint's samples if its data is the same. It is collective.

        Raises:
            ConfigError: as `DataRequest.open`, or all files are lost.
        """
        cfg = self._cfg
        resumed_meta: CheckpointMeta | None = None
        if meta is not None and (change := self.files.decide_restart(meta)):
            self.message = f"the data restarts at sample 0: {change}"
        elif meta is not None:
            resumed_meta, self.message = self.files.resume(meta)
        self._shards = self.files.token_files(cfg.model.vocab_size, resumed_meta)
        data = self._program_data or DataRequest.of(cfg).open(self._shards)
        sites = cfg.sites
        self.train_sampler = data.train
        if sites.count > 1:
            self.train_sampler = StridedSampler(data.train, sites.count, sites.number)
        self.validation_sampler = data.validation
        self.reference = data.reference if isinstance(data, Dataset) else None
        self.train_sharder = self.sharder(self.train_sampler)
        self._validation_sharder = self.sharder(data.validation)
        already_dropped = {} if resumed_meta is None else resumed_meta.data_lost
        if already_dropped:
            names = format_list([f"data file {name} ({reason})" for name, reason in already_dropped.items()])
            self.message = "; ".join(filter(None, [self.message, f"still left out: {names}"]))
        dropped = {} if self._shards is None else self._shards.dropped
        skipped_files = {
            name: self.files.found.skip_reasons.get(name, "it cannot be read")
            for name, value in self.files.fingerprints.items()
            if value == SKIPPED
        }
        if resumed_meta is None and self._can_drop_files:
            dropped = skipped_files | {**dropped}
        self._add_events({name: reason for name, reason in dropped.items() if name not in already_dropped})

    def sharder(self, sampler: Sampler) -> BatchSharder:
        """Return the reader of this rank's shards of global batches of a sampler."""
        cfg = self._cfg
        return BatchSharder(sampler, cfg.batch_shape, self._groups, self._positions)

    def state_dict(self) -> dict[str, Any]:
        """Return the files, and the position in a stream, so that it need not be read from its start."""
        shards = self._shards
        return {
            "data_files": dict(self.files.initial),
            "data_tokens": {} if shards is None else dict(shards.num_tokens),
            "data_lost": {} if shards is None else dict(shards.dropped),
            "stream": self.train_sampler.state(self._position.samples),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the stream of a checkpoint. Other data starts at sample 0."""
        if not self._position.restarts_data:
            self.train_sampler.restore(state_dict.get("stream"))

    def next_batch(self, first: int, skipped_ranges: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        """Return this rank's shard of the next global batch, and the sample numbers of the batch. See `StepData`.

        Raises:
            BrokenShardError, OutOfVocabError: a file cannot be read and may not be dropped.
            RunError: all files are lost.
        """
        size = self._cfg.train.global_batch_size
        samples: Sequence[int] = ()

        def read() -> Any:
            nonlocal samples
            samples = self.train_sampler.next_sample_indices(first, size, skipped_ranges)
            return self.train_sharder.read(samples)

        part = self._read_consistently(read)
        return self.train_sharder.to_batch(part), samples

    def eval_batches(self, num_samples: int | None = None) -> list[Batch]:
        """Return this rank's validation batches, empty if all samples are lost. It raises as `next_batch`."""
        count = self._cfg.train.eval_samples if num_samples is None else num_samples

        def read() -> tuple[list[WeightedSamples], int]:
            if self.validation_sampler.is_all_dropped:
                return [], 0
            return self._validation_sharder.read_eval_samples(count)

        parts, count = self._read_consistently(read)
        if not parts:
            return []
        return self._validation_sharder.to_eval_batches(parts, count)

    def _read_consistently(self, read: Callable[[], T]) -> T:
        """Read, and retry without the files that fail on any rank. Collective if files may be dropped."""
        while True:
            read_error: BrokenShardError | OutOfVocabError | None = None
            result: T | None = None
            try:
                result = read()
            except (BrokenShardError, OutOfVocabError) as error:
                if not self._can_drop_files or not error.shard:
                    step = self._groups.recorder.step
                    raise error.with_reporter(f"{_rank_and_host(self._groups.rank)}, step {step}") from error
                read_error = error
            unreadable = self._gather_unreadable_files(read_error) if self._can_drop_files else {}
            if not unreadable:
                assert result is not None
                return result
            self._drop_files(unreadable)

    def _gather_unreadable_files(self, error: BrokenShardError | OutOfVocabError | None) -> dict[str, tuple[str, str]]:
        """Return the files that any rank failed to read, with cause and rank of the first failure. It is collective."""
        world = self._groups.world
        raised = torch.full((1,), float(error is not None), device=self._groups.device)
        if not float(all_reduce_sum(raised, world)):
            return {}
        unreadable: dict[str, tuple[str, str]] = {}
        own_failures = {} if error is None else {error.shard: (error.cause, _rank_and_host(self._groups.rank))}
        for failures in current_world().all_gather_object(own_failures):
            unreadable = failures | unreadable
        return unreadable

    def _drop_files(self, found: dict[str, tuple[str, str]]) -> None:
        assert self._shards is not None
        reasons = {name: reason for name, (reason, _) in found.items()}
        self._shards = self._shards.without(reasons)
        for sampler in (self.train_sampler, self.validation_sampler):
            sampler.drop_files(reasons)
        self._add_events(reasons, {name: who for name, (_, who) in found.items()})

    def _add_events(self, dropped: dict[str, str], found_by: Mapping[str, str] = MappingProxyType({})) -> None:
        """Note the dropped files, each with its reason.

        Args:
            found_by: rank and host that could not read a file. Ranks read no file that was found before.
        """
        read = self._shards.num_tokens if self._shards is not None else {}
        epoch = len(self.train_sampler)
        for name, reason in dropped.items():
            # Samples of an epoch dropped so far; 0 for a file that the run never had.
            lost = self.train_sampler.num_dropped if name in read else 0
            share = f"; {lost} of the {epoch} samples of an epoch are left out" if lost else ""
            record = {"action": "left out", "file": name, "what": reason, "lost_samples": lost, "epoch_samples": epoch}
            if who := found_by.get(name, ""):
                record["found_by"] = who
                reason = f"{reason}; found by {who}"
            self._add_event(f"left out data file {name} ({reason}){share}", record)
        if (
            self._cfg.train.eval_every
            and self.validation_sampler.is_all_dropped
            and not self._is_dropped_evaluation_reported
        ):
            self._is_dropped_evaluation_reported = True
            count = len(self.validation_sampler)
            text = f"evaluation is skipped: all {count} validation samples are of files that are left out"
            self._add_event(text, {"action": "evaluation skipped", "lost_samples": count})

    def _add_event(self, text: str, record: dict[str, Any]) -> None:
        self.events.append(DataEvent("data.corrupt", text, {"kind": "data"} | record))


def _rank_and_host(rank: int) -> str:
    """Format a rank and its host for a message."""
    return f"rank {rank} (host {socket.gethostname()})"
