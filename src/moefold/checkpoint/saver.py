"""When checkpoints are written: at once, or by a thread beside training, never two at a time."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from moefold.checkpoint.folder import Position
from moefold.checkpoint.store import write_checkpoint
from moefold.config.schema import Config

LOWEST_PRIORITY = 19
"""As `nice` counts."""


class CheckpointSaver:
    """Writes at once: `save` returns when the checkpoint is complete."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg

    def save(self, state: Mapping[str, Tensor], position: Position) -> float:
        """Write a checkpoint; collective. Returns the time that training waited for it, in seconds.

        Raises:
            ConfigError: it cannot be written.
        """
        started_s = time.perf_counter()
        write_checkpoint(self._cfg, state, position)
        return time.perf_counter() - started_s

    def check(self) -> None:
        """Raise what has gone wrong since the last save; to be called once a step."""

    @property
    def is_under_way(self) -> bool:
        """Whether this rank still writes beside training."""
        return False

    def drain(self) -> None:
        """Wait until what was begun is written; collective. More may follow."""

    def finish(self) -> None:
        """Wait until all is written; collective."""

    def settle(self, patience_s: float) -> None:
        """Let a save that is under way end, if it does so in time: on the way out of an error, which stays."""


class BackgroundSaver(CheckpointSaver):
    """Copies the state to host memory, which training waits for, and writes it while training goes on.

    A save waits for the one before. An error comes out of the next `check`, `save` or `finish`.

    Args:
        cfg: the recipe.
        group: all ranks, for the thread alone.
        is_on_gpu: whether the state is; its copies are in pinned memory then.
    """

    def __init__(self, cfg: Config, group: dist.ProcessGroup, *, is_on_gpu: bool) -> None:
        super().__init__(cfg)
        self._group = group
        # Staging waits for the copies: the next step changes what they are copied from.
        self._stager = DefaultStager(StagingOptions(is_on_gpu, False, False, is_on_gpu))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None

    def save(self, state: Mapping[str, Tensor], position: Position) -> float:
        """Begin to write a checkpoint; collective. Returns the time that training waited, in seconds.

        Raises:
            ConfigError: the one before cannot be written.
        """
        started_s = time.perf_counter()
        self._wait()
        staged = cast(dict[str, Tensor], self._stager.stage(dict(state)))
        self._under_way = self._thread.submit(write_checkpoint, self._cfg, staged, position, self._group)
        return time.perf_counter() - started_s

    def check(self) -> None:
        """Raise what has gone wrong since the last save."""
        if self._under_way is not None and self._under_way.done():
            self._wait()

    @property
    def is_under_way(self) -> bool:
        """Whether this rank still writes beside training."""
        return self._under_way is not None and not self._under_way.done()

    def drain(self) -> None:
        """Wait until what was begun is written; collective. More may follow."""
        self._wait()

    def finish(self) -> None:
        """Wait until all is written; collective."""
        self._wait()
        self._thread.shutdown()
        self._stager.close()

    def settle(self, patience_s: float) -> None:
        """Let a save that is under way end, if it does so in time."""
        if self._under_way is not None:
            wait([self._under_way], timeout=patience_s)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


def _step_back() -> None:
    """Give this thread what the others leave of the cores: training waits for its slowest rank."""
    if sys.platform == "linux":
        # There a thread has a priority of its own; elsewhere this would be the process's.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
