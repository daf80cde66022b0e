"""Protocol of the source of a run's batches: a data loader, or the rollouts of reinforcement learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.data.sampler import SampleCatalog
from moefold.parallel.batch import Batch
from moefold.train.batch_sharding import BatchBuilder
from moefold.train.data_files import RunDataFiles


@dataclass(frozen=True)
class DataEvent:
    """Event of lost data that does not end a run, for the log."""

    setting: str
    """The recipe key that allows it."""
    text: str
    """Message for the log."""
    record: dict[str, Any]
    """Record for faults.jsonl."""


class StepData(Protocol):
    """Source of the batches of a run. Each rank has its own. All its methods are collective."""

    files: RunDataFiles
    events: list[DataEvent]
    """Lost data that is not logged yet."""

    @property
    def message(self) -> str:
        """A message about the data for the start of the run. It may be empty."""
        ...

    @property
    def train_sampler(self) -> SampleCatalog:
        """The training samples, after `open`."""
        ...

    @property
    def validation_sampler(self) -> SampleCatalog:
        """The held-out samples, after `open`. It may be empty."""
        ...

    @property
    def train_sharder(self) -> BatchBuilder:
        """The builder of the batches of this rank, after `open`."""
        ...

    def open(self, meta: CheckpointMeta | None) -> None:
        """Open the samples of a run, continuing the samples of a checkpoint if its data is the same.

        Raises:
            ConfigError: the data cannot be read.
        """
        ...

    def next_batch(self, first: int, skipped_ranges: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        """Return this rank's shard of the next global batch, and the sample numbers of the batch.

        Args:
            first: first sample of the run that is not used yet.
        """
        ...

    def eval_batches(self, num_samples: int | None = None) -> list[Batch]:
        """Return this rank's validation batches, or empty if the data has none, or all are lost.

        Args:
            num_samples: the first samples to read. None means train.eval_samples of them.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the files, and the place in the data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the place of a checkpoint, after its position was loaded."""
        ...
