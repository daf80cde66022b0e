"""The data of a run: which samples come next, read by all ranks alike, without the files that have broken."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from moefold.checkpoint.data_files import SKIPPED
from moefold.checkpoint.folder import CheckpointMeta, other_order
from moefold.config.schema import Config
from moefold.data import SampleRow, open_dataset
from moefold.data.shard_reader import BrokenShardError, StrangeIdError
from moefold.data.shards import Shards
from moefold.errors import some
from moefold.launch.crew import joined_crew
from moefold.parallel.accumulate import Batch
from moefold.parallel.collectives import all_reduce_sum
from moefold.parallel.groups import ParallelGroups
from moefold.train.batch import BatchLoader, Part
from moefold.train.data_files import agree_on_files, agree_on_shards, goes_on

T = TypeVar("T")


@dataclass(frozen=True)
class LostFile:
    """A file that is left out."""

    name: str
    reason: str
    num_samples: int
    """Samples of an epoch that are left out since, those of other files that were lost before included; 0 for a file
    that the run never had."""
    epoch_samples: int
    """Samples of an epoch when the run began."""
    found_by: str = ""
    """The rank that could not read it, and its host; empty for what was known before ranks read."""

    def words(self) -> str:
        """What happened, for the log."""
        share = f"; {self.num_samples} of the {self.epoch_samples} samples of an epoch are left out"
        why = f"{self.reason}; found by {self.found_by}" if self.found_by else self.reason
        return f"left out data file {self.name} ({why}){share if self.num_samples else ''}"

    def record(self) -> dict[str, Any]:
        """What faults.jsonl keeps."""
        return {
            "kind": "data",
            "action": "left out",
            "file": self.name,
            "what": self.reason,
            "lost_samples": self.num_samples,
            "epoch_samples": self.epoch_samples,
            **({"found_by": self.found_by} if self.found_by else {}),
        }


@dataclass(frozen=True)
class LostEvaluation:
    """No sample is left to evaluate on."""

    num_samples: int
    """How many there were."""

    def words(self) -> str:
        """What happened, for the log."""
        return f"evaluation is skipped: all {self.num_samples} validation samples are of files that are left out"

    def record(self) -> dict[str, Any]:
        """What faults.jsonl keeps."""
        return {"kind": "data", "action": "evaluation skipped", "lost_samples": self.num_samples}


class RunData:
    """Gives this rank its part of each batch. A file that breaks under data.corrupt="skip" is left out on all ranks."""

    row: SampleRow
    """The training samples; there once it is open, as are those to evaluate on."""
    held_out: SampleRow
    batches: BatchLoader

    def __init__(self, cfg: Config, groups: ParallelGroups, positions: Tensor) -> None:
        """Look at the files; collective.

        Raises:
            ConfigError: ranks see other files.
        """
        self._cfg = cfg
        self._groups = groups
        self._positions = positions
        self._seen = agree_on_files(cfg.data, joined_crew())
        self.files = self._seen.looks
        """What the files look like now."""
        self._then = self._seen.looks
        self._shards: Shards | None = None
        self._is_evaluation_told = False
        self.news: list[LostFile | LostEvaluation] = []
        """What was left out, and nobody has logged yet."""
        self.note = ""
        """What was left out before, or why the data begins anew; empty if neither is so."""
        # Other data has no files that could be left out while it is read.
        self._may_lose = cfg.data.kind == "tokens" and cfg.data.corrupt == "skip"

    def open(self, meta: CheckpointMeta | None) -> None:
        """Open the samples of a run, that of a checkpoint if its data is the same; collective.

        Raises:
            ConfigError: as `open_dataset`; all files are lost.
        """
        cfg = self._cfg
        before = meta if goes_on(cfg, meta, self.files) else None
        self._shards = agree_on_shards(cfg, self._seen, before, joined_crew())
        data = open_dataset(
            cfg.data,
            seq_len=cfg.train.seq_len,
            vocab_size=cfg.model.vocab_size,
            seed=cfg.run.seed,
            shards=self._shards,
        )
        self.row, self.held_out = data.train, data.validation
        self.batches = BatchLoader(data.train, cfg, self._groups, self._positions)
        self._held_out = BatchLoader(data.validation, cfg, self._groups, self._positions)
        known = {} if before is None else before.data_lost
        if meta is not None and before is None:
            self.note = f"the data begins anew, at sample 0: {other_order(meta, cfg, self.files)}"
        if before is not None:
            self._then = before.data_files
        if known:
            self.note = f"still left out: {some([f'data file {name} ({why})' for name, why in known.items()])}"
        lost = {} if self._shards is None else self._shards.lost
        skipped = {
            name: self._seen.faults.get(name, "it cannot be read")
            for name, look in self.files.items()
            if look == SKIPPED
        }
        if before is None and self._may_lose:
            lost = skipped | {**lost}
        self._report({name: why for name, why in lost.items() if name not in known})

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps of the files: fields of `Position`."""
        shards = self._shards or Shards()
        return {"data_files": dict(self._then), "data_tokens": dict(shards.tokens), "data_lost": dict(shards.lost)}

    def next_batch(self, first: int, left_out: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        """This rank's part of the next global batch, and the samples of the run that it is; collective.

        Args:
            first: where the run stands.
            left_out: samples that are not to be taken.

        Raises:
            BrokenShardError, StrangeIdError: a file cannot be read, and may not be left out.
            RunError: all files are lost.
        """
        size = self._cfg.train.global_batch_size
        samples: Sequence[int] = ()

        def read() -> Any:
            nonlocal samples
            samples = self.row.next_samples(first, size, left_out)
            return self.batches.read(samples)

        part = self._read_alike(read)
        return self.batches.batch_of(part), samples

    def evaluation(self) -> list[Batch]:
        """This rank's part of the samples to evaluate on, none if all are lost; collective. Raises as `next_batch`."""

        def read() -> tuple[list[Part], int]:
            if self.held_out.is_all_lost:
                return [], 0
            return self._held_out.read_evaluation(self._cfg.train.eval_samples)

        parts, count = self._read_alike(read)
        if not parts:
            return []
        return self._held_out.evaluation_of(parts, count)

    def _read_alike(self, read: Callable[[], T]) -> T:
        """Read, and read anew without the files that break meanwhile on any rank; collective where files may."""
        while True:
            fault: BrokenShardError | StrangeIdError | None = None
            found: T | None = None
            try:
                found = read()
            except (BrokenShardError, StrangeIdError) as error:
                if not self._may_lose or not error.shard:
                    step = self._groups.record.step
                    raise error.found_by(f"{_seat(self._groups.rank)}, step {step}") from error
                fault = error
            lost = self._agree_on_loss(fault) if self._may_lose else {}
            if not lost:
                assert found is not None
                return found
            self._lose(lost)

    def _agree_on_loss(self, fault: BrokenShardError | StrangeIdError | None) -> dict[str, tuple[str, str]]:
        """The files that any rank could not read: what the first that could not says, and who it is; collective."""
        world = self._groups.world
        raised = torch.full((1,), float(fault is not None), device=self._groups.device)
        if not float(all_reduce_sum(raised, world)):
            return {}
        lost: dict[str, tuple[str, str]] = {}
        mine_alone = {} if fault is None else {fault.shard: (fault.cause, _seat(self._groups.rank))}
        for mine in joined_crew().gather(mine_alone):
            lost = mine | lost
        return lost

    def _lose(self, found: dict[str, tuple[str, str]]) -> None:
        assert self._shards is not None
        lost = {name: why for name, (why, _) in found.items()}
        self._shards = self._shards.without(lost)
        for row in (self.row, self.held_out):
            row.lose(lost)
        self._report(lost, {name: who for name, (_, who) in found.items()})

    def _report(self, lost: dict[str, str], found_by: Mapping[str, str] = MappingProxyType({})) -> None:
        read = self._shards.tokens if self._shards is not None else {}
        self.news += [
            LostFile(name, reason, self.row.num_lost if name in read else 0, len(self.row), found_by.get(name, ""))
            for name, reason in lost.items()
        ]
        if self._cfg.train.eval_every and self.held_out.is_all_lost and not self._is_evaluation_told:
            self._is_evaluation_told = True
            self.news.append(LostEvaluation(len(self.held_out)))


def _seat(rank: int) -> str:
    """A rank and its machine, for a message."""
    return f"rank {rank} (host {socket.gethostname()})"
