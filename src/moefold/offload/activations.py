"""Activation offload: saved tensors wait for the backward pass in host memory or on SSD (SSDTrain, arXiv:2408.10013).

Saved-tensor hooks of autograd see the tensors that a stage saves for backward. I/O threads copy out the storages saved
inside a part that the recipe names, and then free them. A storage is copied once, also if several operations save it.
In the backward pass, the first tensor needed of a part starts loading the part before it. A storage that is needed
while it is still being stored is kept, and its copy is dropped.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moefold.comm.private_torch import storage_key, tensor_version
from moefold.model.activation_checkpoint import OutputCheckpoint, TensorFunction, no_checkpoint
from moefold.model.local_param import is_weight
from moefold.model.module_wrapper import CallContext, Function, wrap_calls
from moefold.offload.backend import BandwidthMeter, CopyEngine, OffloadBackend
from moefold.offload.offloaded_storage import MicroBatch, OffloadedStorage, PartRun, SavedTensorRef
from moefold.units import GIB

logger = getLogger(__name__)

IO_THREADS = 2
"""Threads per direction: one copies while the other waits for the disk or the device."""


@dataclass(frozen=True)
class OffloadTotals:
    """Activation-offload statistics of one rank in one step."""

    stored_bytes: int = 0
    """Bytes whose memory was freed."""
    resident_bytes: int = 0
    """Bytes of the same parts that stayed in memory, for lack of space or bandwidth."""
    io_s: float = 0.0
    """Time of copies, in either direction."""
    waited_s: float = 0.0
    """Time that training waited for copies."""


class _ThreadState(threading.local):
    """Position of the forward pass in its thread. A concurrent recomputation in backward has another position."""

    micro_batch: MicroBatch | None = None
    part_run: PartRun | None = None


class ActivationOffload:
    """Saved-tensor hooks of all stages of a rank.

    Args:
        backend: stores the bytes.
        min_bytes: smaller storages stay on the device.
        is_synchronous: the forward pass waits for the copies, so that at most two part runs are in memory. Otherwise it
            never waits. Storages that could not be stored and loaded in time, judged by the previous step, stay.
        rank: rank for messages.
        clock: time in seconds, from an arbitrary start.
    """

    def __init__(
        self,
        backend: OffloadBackend,
        *,
        min_bytes: int,
        is_synchronous: bool,
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend = backend
        self._min_bytes = min_bytes
        self._is_synchronous = is_synchronous
        self._rank = rank
        self.store_threads, self.load_threads = (
            ThreadPoolExecutor(IO_THREADS, f"offload-{direction}", initializer=backend.copy_engine.init_thread)
            for direction in ("out", "in")
        )
        self._clock = clock
        self._store_bandwidth = BandwidthMeter(clock)
        self._load_bandwidth = BandwidthMeter(clock)
        # By the address of the storage, which is not reused while its `OffloadedStorage` exists.
        self._storages: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()
        self._thread_state = _ThreadState()
        self._lifetimes_s: dict[tuple[int, int], float] = {}
        self._next_backward: dict[int, int] = {}
        self._last_backward = -1
        self._awaiting_backward: dict[int, MicroBatch] = {}
        self._num_forwards = self._num_steps = 0
        self._lock = threading.Lock()
        self._queued_bytes = self._stored_bytes = self._resident_bytes = self._late_bytes = 0
        self._waited_s = 0.0
        self._warned_kinds: set[str] = set()

    @property
    def copy_engine(self) -> CopyEngine:
        """Copy engine of the backend."""
        return self.backend.copy_engine

    def begin_step(self) -> None:
        """Start a step, which should run the passes in the same order as the previous step."""
        self._num_steps += 1
        self._num_forwards = 0
        self._last_backward = -1
        self._awaiting_backward.clear()

    def end_step(self) -> OffloadTotals:
        """Return the totals since the last call. Warn once if the backend is too slow for most of the bytes."""
        if self._num_steps > 1:
            self._warn_if_slow()
        (_, out_s) = self._store_bandwidth.end_step()
        (_, in_s) = self._load_bandwidth.end_step()
        with self._lock:
            totals = OffloadTotals(self._stored_bytes, self._resident_bytes, out_s + in_s, self._waited_s)
            self._stored_bytes = self._resident_bytes = self._late_bytes = 0
            self._waited_s = 0.0
        return totals

    def wrap_stage(self, forward: Function, long_lived: Callable[[], tuple[Tensor, ...]]) -> Function:
        """Wrap the forward pass of a stage, so that its saved tensors pass the hooks except while it is suspended.

        Args:
            forward: forward pass of the stage, plain or resumable.
            long_lived: returns tensors of the stage, other than weights, that outlive a micro-batch.
        """

        def begin(*args: Any, **kwargs: Any) -> CallContext | None:
            if not torch.is_grad_enabled():
                return None
            arguments = [*args, *kwargs.values(), *long_lived()]
            addresses = frozenset(storage_key(x.untyped_storage()) for x in arguments if isinstance(x, Tensor))
            micro_batch = MicroBatch(self._num_forwards, addresses)
            self._num_forwards += 1
            return CallContext(partial(self._in_micro_batch, micro_batch), partial(self._end_forward, micro_batch))

        return wrap_calls(forward, begin)

    def _end_forward(self, micro_batch: MicroBatch, y: Tensor) -> None:
        """Wait for the copies of a micro-batch, if the recipe asks for it, and prepare its backward pass."""
        if self._is_synchronous:
            self._wait_stores(micro_batch.part_runs)
        if micro_batch.part_runs and y.requires_grad:
            self._awaiting_backward[micro_batch.index] = micro_batch
            y.register_hook(lambda grad: self._begin_backward(micro_batch))

    @contextmanager
    def _in_micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Mark this thread as inside the forward pass of a micro-batch."""
        self._thread_state.micro_batch = micro_batch
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._thread_state.micro_batch = None

    def wrap(self, function: Function) -> Function:
        """Wrap a part, plain or resumable, so that its activations are offloaded."""

        def begin(*args: Any, **kwargs: Any) -> CallContext | None:
            part_run = self._begin_part_run()
            if part_run is None:
                return None
            micro_batch = part_run.micro_batch
            return CallContext(
                partial(self._in_part_run, part_run), lambda result: self._wait_earlier_parts(micro_batch)
            )

        return wrap_calls(function, begin)

    def wrap_output_checkpoint(self, output_checkpoint: OutputCheckpoint) -> OutputCheckpoint:
        """Wrap an output checkpoint, so that the function's saved tensors are offloaded, and its results if saved."""

        @contextmanager
        def run(function: TensorFunction, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
            part_run = self._begin_part_run()
            with self._in_part_run(part_run), output_checkpoint(function, *tensors) as results:
                # Results that are recomputed are not saved.
                to_offload = (
                    []
                    if part_run is None or output_checkpoint is not no_checkpoint
                    else list(filter(self.should_offload, results))
                )
                storages = [self._storage_of(x) for x in to_offload]
                for storage in storages:
                    storage.part_run = storage.part_run or part_run
                self._thread_state.part_run = None
                yield results
            if part_run is not None:
                self._wait_earlier_parts(part_run.micro_batch)

        return run

    def _begin_part_run(self) -> PartRun | None:
        """Start a run of a part, or None outside a forward pass with a backward."""
        micro_batch = self._thread_state.micro_batch
        if micro_batch is None:
            return None
        part_run = PartRun(len(micro_batch.part_runs), micro_batch, self._clock())
        micro_batch.part_runs.append(part_run)
        return part_run

    @contextmanager
    def _in_part_run(self, part_run: PartRun | None) -> Iterator[None]:
        outer = self._thread_state.part_run
        self._thread_state.part_run = outer if part_run is None else part_run
        try:
            yield
        finally:
            self._thread_state.part_run = outer

    def _wait_earlier_parts(self, micro_batch: MicroBatch) -> None:
        """Wait for all parts except the last if the recipe asks for it: a part is copied while the next computes."""
        if self._is_synchronous:
            first = micro_batch.num_waited
            last = len(micro_batch.part_runs) - 1
            self._wait_stores(micro_batch.part_runs[first:last])
            micro_batch.num_waited = max(first, last)

    def _pack(self, tensor: Tensor) -> SavedTensorRef | Tensor:
        if not self.should_offload(tensor):
            return tensor.detach()
        storage = self._storage_of(tensor)
        part_run = storage.part_run or self._thread_state.part_run
        if part_run is not None and not storage.is_assigned:
            self._offload_storage(storage, part_run)
        return SavedTensorRef(storage, tensor)

    def _unpack(self, packed: SavedTensorRef | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        storage = packed.storage
        if storage.part_run is not None:
            self._on_part_backward(storage.part_run)
            self._load_now(storage)
        return storage.rebuild_tensor(packed)

    def should_offload(self, tensor: Tensor) -> bool:
        """Return whether a tensor is large enough, not a weight, and freed with the autograd graph."""
        if type(tensor) is not Tensor or tensor.device.type != self.backend.copy_engine.device.type:
            return False
        storage = tensor.untyped_storage()
        assert self._thread_state.micro_batch is not None
        return (
            storage.nbytes() >= max(self._min_bytes, 1)
            and not is_weight(tensor)
            and storage_key(storage) not in self._thread_state.micro_batch.long_lived_storages
        )

    def _storage_of(self, tensor: Tensor) -> OffloadedStorage:
        address = storage_key(tensor.untyped_storage())
        storage = self._storages.get(address)
        # After an in-place change the content differs.
        if storage is None or storage.version != tensor_version(tensor):
            storage = self._storages[address] = OffloadedStorage(tensor)
        return storage

    def _offload_storage(self, storage: OffloadedStorage, part_run: PartRun) -> None:
        part_run.add(storage)
        if not self._is_in_time(storage, part_run):
            with self._lock:
                self._resident_bytes += storage.num_bytes
                self._late_bytes += storage.num_bytes
            return
        with self._lock:
            self._queued_bytes += storage.num_bytes
        store_future = self.store_threads.submit(
            self._store, weakref.ref(storage), self.backend.copy_engine.record_event()
        )
        storage.store_future = store_future
        store_future.add_done_callback(partial(self._on_store_done, storage.num_bytes))

    def _on_store_done(self, num_bytes: int, future: Future[None]) -> None:
        with self._lock:
            self._queued_bytes -= num_bytes

    def _is_in_time(self, storage: OffloadedStorage, part_run: PartRun) -> bool:
        """Return whether a storage can be stored and loaded before it is needed, judged by the previous step."""
        lifetime_s = self._lifetimes_s.get((part_run.micro_batch.index, part_run.number))
        if self._is_synchronous or lifetime_s is None:
            return True
        out_s = (self._queued_bytes + storage.num_bytes) / self._store_bandwidth.bytes_per_s
        return out_s + storage.num_bytes / self._load_bandwidth.bytes_per_s <= lifetime_s

    def _store(self, reference: "weakref.ref[OffloadedStorage]", ready: Any) -> None:
        """Store a storage on an I/O thread."""
        storage = reference()
        data = None if storage is None else storage.begin_store()
        if storage is None or data is None:
            return
        reason = "has no more space (train.offload_limit_gib)"
        try:
            with self._store_bandwidth.measure_transfer(storage.num_bytes):
                stored = self.backend.store(data, ready)
        except OSError as error:
            reason = f"takes no more ({error.strerror or error})"
            stored = None
        is_offloaded = stored is not None and storage.end_store(stored)
        with self._lock:
            if is_offloaded:
                self._stored_bytes += storage.num_bytes
            elif stored is None:
                self._resident_bytes += storage.num_bytes
        if stored is None:
            self._warn_once("full", f"{self.backend.name} {reason}: some activations")

    def _on_part_backward(self, part_run: PartRun) -> None:
        """Load a part that the backward pass has reached, and the part that it will reach next."""
        if part_run.is_reached:
            return
        part_run.is_reached = True
        micro_batch = part_run.micro_batch
        self._lifetimes_s[micro_batch.index, part_run.number] = self._clock() - part_run.started_s
        self._fetch(part_run)
        next_micro_batch = self._awaiting_backward.get(self._next_backward.get(micro_batch.index, -1))
        next_part_runs = [] if next_micro_batch is None else next_micro_batch.part_runs
        self._fetch_last([*next_part_runs, *micro_batch.part_runs[: part_run.number]])

    def _begin_backward(self, micro_batch: MicroBatch) -> None:
        self._awaiting_backward.pop(micro_batch.index, None)
        if self._last_backward >= 0:
            self._next_backward[self._last_backward] = micro_batch.index
        self._last_backward = micro_batch.index
        self._fetch_last(micro_batch.part_runs)

    def _fetch_last(self, part_runs: list[PartRun]) -> None:
        """Load the last part run that still has live storages."""
        for part_run in reversed(part_runs):
            if self._fetch(part_run):
                return

    def _fetch(self, part_run: PartRun) -> bool:
        """Start loading offloaded storages and keep resident storages, and return whether there are any storages."""
        storages = part_run.live_storages()
        for storage in storages:
            if not self._keep_resident(storage):
                storage.begin_load(self._load, self.backend)
        return bool(storages)

    def _keep_resident(self, storage: OffloadedStorage) -> bool:
        was_storing = storage.store_future is not None and not storage.store_future.done()
        is_resident = storage.keep_resident()
        if is_resident and was_storing:
            with self._lock:
                self._resident_bytes += storage.num_bytes
                self._late_bytes += storage.num_bytes
            storage.store_future = None
        return is_resident

    def _load(self, load: Callable[..., Any], *args: Any) -> "Future[Any]":
        out: Tensor = args[2]

        def transfer() -> Any:
            with self._load_bandwidth.measure_transfer(out.numel()):
                return load(*args)

        return self.load_threads.submit(transfer)

    def _load_now(self, storage: OffloadedStorage) -> None:
        if self._keep_resident(storage):
            return
        storage.begin_load(self._load, self.backend)
        started_s = self._clock()
        storage.end_load(self.backend)
        self._waited_s += self._clock() - started_s

    def _wait_stores(self, part_runs: list[PartRun]) -> None:
        started_s = self._clock()
        for part_run in part_runs:
            for storage in part_run.live_storages():
                if storage.store_future is not None:
                    storage.store_future.result()
        self._waited_s += self._clock() - started_s

    def _warn_if_slow(self) -> None:
        """Warn once if lack of bandwidth kept more bytes in memory than were stored."""
        with self._lock:
            stored_bytes = self._stored_bytes
            late_bytes = self._late_bytes
        if late_bytes > stored_bytes:
            gib_per_s = self._store_bandwidth.bytes_per_s / GIB
            late_gib = late_bytes / GIB
            total_gib = (late_bytes + stored_bytes) / GIB
            self._warn_once(
                "slow",
                f"{self.backend.name} is too slow ({gib_per_s:.2f} GiB/s): {late_gib:.2f} of {total_gib:.2f} GiB",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        with self._lock:
            if kind in self._warned_kinds:
                return
            self._warned_kinds.add(kind)
        logger.warning("rank %d: %s stay in memory", self._rank, message)
