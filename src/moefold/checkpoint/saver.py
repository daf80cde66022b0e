"""When checkpoints are written: at once, or by a thread beside training, never two at a time."""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import BytesIO
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from moefold.checkpoint.checkpoint_dir import TrainState
from moefold.checkpoint.save_load import write_checkpoint
from moefold.config.schema import Config

THROTTLE_S = 0.05
"""Between two tensors the thread beside training rests for so long, unless somebody waits for it."""
MAX_THROTTLE_S = 10.0
"""So long it rests at most in one save, however many tensors there are."""

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Writes at once: `save` returns when the checkpoint is complete."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._last: Path | None = None

    def save(self, state: Mapping[str, Tensor], train_state: TrainState) -> float:
        """Write a checkpoint; collective. Returns the time that training waited for it, in seconds.

        Raises:
            ConfigError: it cannot be written.
        """
        started_s = time.perf_counter()
        self._warn_if_last_is_gone()
        self._last = write_checkpoint(self._cfg, state, train_state)
        return time.perf_counter() - started_s

    def _warn_if_last_is_gone(self) -> None:
        """Say it if the checkpoint written last is gone: retention keeps it, so somebody or the disk took it away."""
        if self._last is not None and dist.get_rank() == 0 and not self._last.exists():
            # Of the folder nothing is said: another rank may have begun to make it anew.
            logger.warning(
                "the last checkpoint, '%s', is gone since it was written; the next is saved to the same folder",
                self._last,
            )

    def check(self) -> None:
        """Raise what has gone wrong since the last save; to be called once a step."""

    @property
    def is_saving(self) -> bool:
        """Whether this rank still writes beside training."""
        return False

    def drain(self) -> None:
        """Wait until what was begun is written; collective. More may follow."""

    def finish(self) -> None:
        """Wait until all is written; collective."""

    def drain_with_timeout(self, timeout_s: float) -> None:
        """Let a save that is under way end, if it does so in time: on the way out of an error, which stays."""


class BackgroundSaver(CheckpointSaver):
    """Copies the state to host memory, which training waits for, and writes it while training goes on.

    A save waits for the one before. An error comes out of the next `check`, `save` or `finish`. The thread rests after
    each tensor, so that training, whose slowest rank all wait for, has the cores and the interpreter nearly to itself
    and what a save takes spreads over several steps; it makes haste once it is waited for.

    Args:
        cfg: the recipe.
        group: all ranks, for the thread alone.
        is_on_gpu: whether the state is; its copies are in pinned memory then.
    """

    def __init__(self, cfg: Config, group: dist.ProcessGroup, *, is_on_gpu: bool) -> None:
        super().__init__(cfg)
        self._group = group
        # Staging waits for the copies: the next step changes what they are copied from.
        self._options = StagingOptions(is_on_gpu, False, False, is_on_gpu)
        self._stager = DefaultStager(self._options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending_save: Future[Path] | None = None
        self._is_awaited = threading.Event()

    def save(self, state: Mapping[str, Tensor], train_state: TrainState) -> float:
        """Begin to write a checkpoint; collective. Returns the time that training waited, in seconds.

        Raises:
            ConfigError: the one before cannot be written.
        """
        started_s = time.perf_counter()
        self._wait()
        self._warn_if_last_is_gone()
        staged = self._stage(state)
        self._is_awaited.clear()
        planner = _ThrottledPlanner(self._is_awaited)
        self._pending_save = self._thread.submit(write_checkpoint, self._cfg, staged, train_state, self._group, planner)
        return time.perf_counter() - started_s

    def _stage(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            return cast(dict[str, Tensor], self._stager.stage(dict(state)))
        except KeyError:
            # A stager of torch 2.11 takes itself apart after its first use.
            self._stager = DefaultStager(self._options)
            return cast(dict[str, Tensor], self._stager.stage(dict(state)))

    def check(self) -> None:
        """Raise what has gone wrong since the last save."""
        if self._pending_save is not None and self._pending_save.done():
            self._wait()

    @property
    def is_saving(self) -> bool:
        """Whether this rank still writes beside training."""
        return self._pending_save is not None and not self._pending_save.done()

    def drain(self) -> None:
        """Wait until what was begun is written; collective. More may follow."""
        self._wait()

    def finish(self) -> None:
        """Wait until all is written; collective."""
        self._wait()
        self._thread.shutdown()
        self._stager.close()

    def drain_with_timeout(self, timeout_s: float) -> None:
        """Let a save that is under way end, if it does so in time."""
        self._is_awaited.set()
        if self._pending_save is not None:
            wait([self._pending_save], timeout=timeout_s)

    def _wait(self) -> None:
        self._is_awaited.set()
        under_way, self._pending_save = self._pending_save, None
        if under_way is not None:
            self._last = under_way.result()


class _ThrottledPlanner(DefaultSavePlanner):
    """Rests before each tensor is written.

    Args:
        is_awaited: set once somebody waits for the checkpoint: no rest from then on.
    """

    def __init__(self, is_awaited: threading.Event) -> None:
        super().__init__()
        self._is_awaited = is_awaited

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """The tensor that is due."""
        self._is_awaited.wait(min(THROTTLE_S, MAX_THROTTLE_S / max(1, len(self.plan.items))))
        return super().resolve_data(write_item)
