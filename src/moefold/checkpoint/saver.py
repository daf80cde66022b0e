"""Checkpoint savers: synchronous, or asynchronous in a background thread. Two saves never overlap."""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from moefold.checkpoint.checkpoint_meta import TrainState
from moefold.checkpoint.find_checkpoint import checkpoint_folder, checkpoint_folder_key
from moefold.checkpoint.write_checkpoint import ShardSavePlanner, write_checkpoint
from moefold.checkpoint.writing_job import WritingJob
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config

THROTTLE_S = 0.05
"""Pause of the background thread between two tensors, unless a caller waits for the save."""
MAX_THROTTLE_S = 10.0
"""Upper limit of all pauses of one save, however many tensors there are."""

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Synchronous saver: `save` returns when the checkpoint is complete."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._last: Path | None = None
        self._writer: WritingJob | None = None

    def open_folder(self) -> None:
        """Record the existing checkpoints on the first rank. Call it before the run chooses where to resume.

        A folder that cannot be listed is reported by the first save.
        """
        if dist.get_rank() == 0 and self._cfg.checkpoint.saves:
            with suppress(OSError):
                self._writer = WritingJob(
                    checkpoint_folder(self._cfg.run, self._cfg.checkpoint), checkpoint_folder_key(self._cfg.checkpoint)
                )

    def save(self, state: Mapping[str, Tensor], train_state: TrainState) -> float:
        """Write a checkpoint. It is collective. Returns the time that training waited for it, in seconds.

        Raises:
            ConfigError: the checkpoint cannot be written.
        """
        started_s = time.perf_counter()
        self._prepare()
        self._last = write_checkpoint(self._cfg, state, train_state, writer=self._writer)
        return time.perf_counter() - started_s

    def _prepare(self) -> None:
        # Retention keeps the last checkpoint, so a user or the disk removed it. The message does not name the folder:
        # another rank may already have recreated it.
        if self._last is not None and dist.get_rank() == 0 and not self._last.exists():
            logger.warning(
                "the last checkpoint, '%s', is gone since it was written; the next is saved to the same folder",
                self._last,
            )
        if self._writer is None:
            self.open_folder()

    def check(self) -> None:
        """Raise the error of the last save, if it failed. Call it once per step."""

    def drain(self) -> None:
        """Wait for the pending save. It is collective. More saves may follow."""

    def finish(self) -> None:
        """Wait for the pending save and release resources. It is collective."""

    def drain_with_timeout(self, timeout_s: float) -> None:
        """Wait for the pending save for a limited time, without raising, while another error is handled."""


class BackgroundSaver(CheckpointSaver):
    """Asynchronous saver: training waits only for the copy to host memory, which a thread then writes.

    A save waits for the previous one. An error is raised by the next `check`, `save` or `finish`. The thread pauses
    after each tensor: all ranks wait for the slowest one in a training step, so the cores and the interpreter should be
    free for it. The pauses end once a caller waits for the save.

    Args:
        group: process group of all ranks, used only by the thread.
        is_on_gpu: whether the state is on the GPU. Its copies are then in pinned memory.
    """

    def __init__(self, cfg: Config, group: dist.ProcessGroup, *, is_on_gpu: bool) -> None:
        super().__init__(cfg)
        self._group = group
        # Staging blocks until the copies are done: the next step overwrites their sources.
        self._options = StagingOptions(is_on_gpu, False, False, is_on_gpu)
        self._stager = DefaultStager(self._options)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending_save: Future[Path] | None = None
        self._is_awaited = threading.Event()

    def save(self, state: Mapping[str, Tensor], train_state: TrainState) -> float:
        """Start to write a checkpoint. It is collective. Returns the time that training waited, in seconds.

        Raises:
            ConfigError: the previous checkpoint cannot be written.
        """
        started_s = time.perf_counter()
        self._wait()
        self._prepare()
        staged = self._stage(state)
        self._is_awaited.clear()
        planner = _ThrottledPlanner(self._is_awaited)
        self._pending_save = self.thread.submit(
            write_checkpoint, self._cfg, staged, train_state, self._group, planner, self._writer
        )
        return time.perf_counter() - started_s

    def _stage(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            return cast(dict[str, Tensor], self._stager.stage(dict(state)))
        except KeyError:
            # The stager of torch 2.11 can be used only once.
            self._stager = DefaultStager(self._options)
            return cast(dict[str, Tensor], self._stager.stage(dict(state)))

    def check(self) -> None:
        """Raise the error of the last save, if it failed."""
        if self._pending_save is not None and self._pending_save.done():
            self._wait()

    def drain(self) -> None:
        """Wait for the pending save. It is collective. More saves may follow."""
        self._wait()

    def finish(self) -> None:
        """Wait for the pending save, stop the thread and release the staging buffers. It is collective."""
        self._wait()
        self.thread.shutdown()
        self._stager.close()

    def drain_with_timeout(self, timeout_s: float) -> None:
        """Wait for the pending save for a limited time, without raising."""
        self._is_awaited.set()
        if self._pending_save is not None:
            wait([self._pending_save], timeout=timeout_s)

    def _wait(self) -> None:
        self._is_awaited.set()
        under_way, self._pending_save = self._pending_save, None
        if under_way is not None:
            self._last = under_way.result()


def open_saver(cfg: Config, groups: ParallelGroups) -> CheckpointSaver:
    """Open the saver of a recipe. Collective if it saves in the background."""
    if not cfg.checkpoint.async_save:
        return CheckpointSaver(cfg)
    return BackgroundSaver(cfg, groups.create_background_group().handle, is_on_gpu=groups.device.type == "cuda")


class _ThrottledPlanner(ShardSavePlanner):
    """DCP save planner that pauses before each tensor is written.

    Args:
        is_awaited: set once a caller waits for the checkpoint, which ends the pauses.
    """

    def __init__(self, is_awaited: threading.Event) -> None:
        super().__init__()
        self._is_awaited = is_awaited

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the tensor to write, after a pause."""
        self._is_awaited.wait(min(THROTTLE_S, MAX_THROTTLE_S / max(1, len(self.plan.items))))
        return super().resolve_data(write_item)
