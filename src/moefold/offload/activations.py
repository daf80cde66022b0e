"""Activations that wait for the backward pass outside of the device's memory (SSDTrain, arXiv:2408.10013).

While a stage runs forward, autograd hands over what it saves. What is saved inside a part that the recipe names is
copied out by I/O threads, each storage once, however many operations save it, and its memory is free when that is
done. Backward, the first tensor of a part that is asked for starts the way back of the part before it. What is
asked for while it is still on its way out is taken from memory, and its copy is dropped.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moefold.comm.resumable import Resumable, ResumableTask
from moefold.model.activation_checkpoint import OutputCheckpoint, TensorFunction, no_checkpoint
from moefold.model.local_param import is_weight
from moefold.offload.backend import BandwidthMeter, CopyEngine, OffloadBackend
from moefold.offload.offloaded_storage import MicroBatch, OffloadedStorage, PartRun, SavedTensorRef

logger = getLogger(__name__)

IO_THREADS = 2
"""For each direction: one fills what the other empties."""
GIB = 2**30


@dataclass(frozen=True)
class OffloadTotals:
    """What one rank did in a step."""

    stored_bytes: int = 0
    """Bytes whose memory was freed."""
    resident_bytes: int = 0
    """Bytes of the same parts that stayed in memory: for want of room or of time."""
    io_s: float = 0.0
    """Time in which bytes were carried, out and back."""
    waited_s: float = 0.0
    """Time in which training waited for that."""


class _ThreadState(threading.local):
    """Where a forward pass is, in the thread that runs it: what a backward pass runs again beside it is elsewhere."""

    micro_batch: MicroBatch | None = None
    part_run: PartRun | None = None


class ActivationOffload:
    """The hooks of all stages of a rank.

    Args:
        backend: where the bytes go.
        min_bytes: a smaller storage stays.
        is_synchronous: the forward pass waits for the copies, so that at most two runs of a part are in memory; else it never
            does, and what could not be stored and brought back by the time it is needed, judged by the step before, is
            not sent away at all.
        rank: for messages.
    """

    def __init__(self, backend: OffloadBackend, *, min_bytes: int, is_synchronous: bool, rank: int = 0) -> None:
        self._backend = backend
        self._min_bytes = min_bytes
        self._is_synchronous = is_synchronous
        self._rank = rank
        self._store_threads, self._load_threads = (
            ThreadPoolExecutor(IO_THREADS, f"offload-{way}", initializer=backend.copy_engine.init_thread)
            for way in ("out", "in")
        )
        self._store_bandwidth = BandwidthMeter()
        self._load_bandwidth = BandwidthMeter()
        # Records by the address of their storage, which none can have before they are gone.
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
        """The way to the place."""
        return self._backend.copy_engine

    def begin_step(self) -> None:
        """What follows is a step, which takes the way of the step before."""
        self._num_steps += 1
        self._num_forwards = 0
        self._last_backward = -1
        self._awaiting_backward.clear()

    def end_step(self) -> OffloadTotals:
        """What was done since the last call; warns once if the tier is too slow for most of it."""
        if self._num_steps > 1:
            self._warn_if_slow()
        (_, out_s) = self._store_bandwidth.end_step()
        (_, in_s) = self._load_bandwidth.end_step()
        with self._lock:
            totals = OffloadTotals(self._stored_bytes, self._resident_bytes, out_s + in_s, self._waited_s)
            self._stored_bytes = self._resident_bytes = self._late_bytes = 0
            self._waited_s = 0.0
        return totals

    def wrap_stage(
        self, forward_resumable: Callable[..., Resumable[Tensor]], long_lived: Callable[[], tuple[Tensor, ...]]
    ) -> Callable[..., Resumable[Tensor]]:
        """The forward pass of a stage, whose saved tensors come here; at its pauses others are elsewhere.

        Args:
            forward_resumable: of the stage.
            long_lived: gives tensors of the stage, beside weights, that outlive a micro-batch.
        """

        def run(*args: Any, **kwargs: Any) -> Resumable[Tensor]:
            if not torch.is_grad_enabled():
                return (yield from forward_resumable(*args, **kwargs))
            given = [*args, *kwargs.values(), *long_lived()]
            addresses = frozenset(x.untyped_storage()._cdata for x in given if isinstance(x, Tensor))
            micro_batch = MicroBatch(self._num_forwards, addresses)
            self._num_forwards += 1
            begun = ResumableTask(forward_resumable(*args, **kwargs))
            while True:
                with self._in_micro_batch(micro_batch):
                    begun.resume()
                if begun.is_done:
                    break
                yield
            y = begun.run_to_end()
            if self._is_synchronous:
                self._wait_stores(micro_batch.part_runs)
            if micro_batch.part_runs and y.requires_grad:
                self._awaiting_backward[micro_batch.index] = micro_batch
                y.register_hook(lambda grad: self._begin_backward(micro_batch))
            return y

        return run

    @contextmanager
    def _in_micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Inside, this thread is in the forward pass of a micro-batch."""
        self._thread_state.micro_batch = micro_batch
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._thread_state.micro_batch = None

    def wrap_resumable(self, forward_resumable: Callable[..., Resumable[Tensor]]) -> Callable[..., Resumable[Tensor]]:
        """`wrap` for a part that pauses."""

        def run(*args: Any, **kwargs: Any) -> Resumable[Tensor]:
            call = self._begin_part_run()
            begun = ResumableTask(forward_resumable(*args, **kwargs))
            while True:
                with self._in_part_run(call):
                    begun.resume()
                if begun.is_done:
                    break
                yield
            if call is not None:
                self._wait_earlier_parts(call.micro_batch)
            return begun.run_to_end()

        return run

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, as a part whose activations are offloaded."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._run_part():
                return function(*args, **kwargs)

        return run

    def wrap_output_checkpoint(self, output_checkpoint: OutputCheckpoint) -> OutputCheckpoint:
        """The same, and what the function keeps is offloaded, and its results if the operations inside keep them."""

        @contextmanager
        def run(function: TensorFunction, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
            with self._run_part() as call, output_checkpoint(function, *tensors) as results:
                # What is made again nobody keeps.
                wanted = (
                    []
                    if call is None or output_checkpoint is not no_checkpoint
                    else list(filter(self._should_offload, results))
                )
                records = [self._storage_of(x) for x in wanted]
                for record in records:
                    record.part_run = record.part_run or call
                self._thread_state.part_run = None
                yield results

        return run

    @contextmanager
    def _run_part(self) -> Iterator[PartRun | None]:
        """Inside, what is saved is offloaded; nothing happens outside of a forward pass that will have a backward."""
        call = self._begin_part_run()
        with self._in_part_run(call):
            yield call
        if call is not None:
            self._wait_earlier_parts(call.micro_batch)

    def _begin_part_run(self) -> PartRun | None:
        """A run of a part that begins here; None outside of a forward pass that will have a backward."""
        micro_batch = self._thread_state.micro_batch
        if micro_batch is None:
            return None
        call = PartRun(len(micro_batch.part_runs), micro_batch)
        micro_batch.part_runs.append(call)
        return call

    @contextmanager
    def _in_part_run(self, part_run: PartRun | None) -> Iterator[None]:
        outer = self._thread_state.part_run
        self._thread_state.part_run = outer if part_run is None else part_run
        try:
            yield
        finally:
            self._thread_state.part_run = outer

    def _wait_earlier_parts(self, micro_batch: MicroBatch) -> None:
        """Where the recipe says so, wait for all parts but the last: one is copied while the next computes."""
        if self._is_synchronous:
            first = micro_batch.num_waited
            last = len(micro_batch.part_runs) - 1
            self._wait_stores(micro_batch.part_runs[first:last])
            micro_batch.num_waited = max(first, last)

    def _pack(self, tensor: Tensor) -> SavedTensorRef | Tensor:
        if not self._should_offload(tensor):
            return tensor.detach()
        record = self._storage_of(tensor)
        call = record.part_run or self._thread_state.part_run
        if call is not None and not record.is_assigned:
            self._offload_storage(record, call)
        return SavedTensorRef(record, tensor)

    def _unpack(self, packed: SavedTensorRef | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        record = packed.storage
        if record.part_run is not None:
            self._on_part_backward(record.part_run)
            self._load_now(record)
        return record.rebuild_tensor(packed)

    def _should_offload(self, tensor: Tensor) -> bool:
        """Whether it is a plain tensor of some size that lives as long as the graph, and no longer."""
        if type(tensor) is not Tensor or tensor.device.type != self._backend.copy_engine.device.type:
            return False
        storage = tensor.untyped_storage()
        assert self._thread_state.micro_batch is not None
        return (
            storage.nbytes() >= max(self._min_bytes, 1)
            and not is_weight(tensor)
            and storage._cdata not in self._thread_state.micro_batch.long_lived_storages
        )

    def _storage_of(self, tensor: Tensor) -> OffloadedStorage:
        address = tensor.untyped_storage()._cdata
        record = self._storages.get(address)
        # After a change in place it is other content.
        if record is None or record.version != tensor._version:
            record = self._storages[address] = OffloadedStorage(tensor)
        return record

    def _offload_storage(self, storage: OffloadedStorage, part_run: PartRun) -> None:
        part_run.add(storage)
        if not self._is_in_time(storage, part_run):
            with self._lock:
                self._resident_bytes += storage.num_bytes
                self._late_bytes += storage.num_bytes
            return
        with self._lock:
            self._queued_bytes += storage.num_bytes
        storing = self._store_threads.submit(
            self._store, weakref.ref(storage), self._backend.copy_engine.record_event()
        )
        storage.store_future = storing
        storing.add_done_callback(self._on_store_done(storage.num_bytes))

    def _on_store_done(self, num_bytes: int) -> Callable[[Future[None]], None]:
        def left(storing: Future[None]) -> None:
            with self._lock:
                self._queued_bytes -= num_bytes

        return left

    def _is_in_time(self, storage: OffloadedStorage, part_run: PartRun) -> bool:
        """Whether it can be stored and brought back before it is needed, as far as the step before tells."""
        lifetime_s = self._lifetimes_s.get((part_run.micro_batch.index, part_run.number))
        if self._is_synchronous or lifetime_s is None:
            return True
        out_s = (self._queued_bytes + storage.num_bytes) / self._store_bandwidth.bytes_per_s
        return out_s + storage.num_bytes / self._load_bandwidth.bytes_per_s <= lifetime_s

    def _store(self, reference: "weakref.ref[OffloadedStorage]", ready: Any) -> None:
        """On an I/O thread."""
        record = reference()
        data = None if record is None else record.begin_store()
        if record is None or data is None:
            return
        try:
            with self._store_bandwidth.measure_transfer(record.num_bytes):
                stored = self._backend.store(data, ready)
        except OSError as error:
            self._warn_once("full", f"{self._backend.name} takes no more ({error.strerror or error}): some activations")
            stored = None
        has_left = stored is not None and record.end_store(stored)
        with self._lock:
            if has_left:
                self._stored_bytes += record.num_bytes
            elif stored is None:
                self._resident_bytes += record.num_bytes
        if stored is None:
            self._warn_once(
                "full", f"{self._backend.name} has no more room (train.offload_limit_gib): some activations"
            )

    def _on_part_backward(self, part_run: PartRun) -> None:
        """The backward pass has come to a part: get it, and the one that is next."""
        if part_run.is_reached:
            return
        part_run.is_reached = True
        micro_batch = part_run.micro_batch
        self._lifetimes_s[micro_batch.index, part_run.number] = time.perf_counter() - part_run.started_s
        self._fetch(part_run)
        follower = self._awaiting_backward.get(self._next_backward.get(micro_batch.index, -1))
        before = [] if follower is None else follower.part_runs
        self._fetch_last([*before, *micro_batch.part_runs[: part_run.number]])

    def _begin_backward(self, micro_batch: MicroBatch) -> None:
        self._awaiting_backward.pop(micro_batch.index, None)
        if self._last_backward >= 0:
            self._next_backward[self._last_backward] = micro_batch.index
        self._last_backward = micro_batch.index
        self._fetch_last(micro_batch.part_runs)

    def _fetch_last(self, part_runs: list[PartRun]) -> None:
        """Fetch the last one that still has anything."""
        for call in reversed(part_runs):
            if self._fetch(call):
                return

    def _fetch(self, part_run: PartRun) -> bool:
        """Begin to bring back what is away, and keep what is not yet away; whether there is anything."""
        records = part_run.live_storages()
        for record in records:
            if not self._keep_resident(record):
                record.begin_load(self._load, self._backend)
        return bool(records)

    def _keep_resident(self, storage: OffloadedStorage) -> bool:
        was_on_its_way = storage.store_future is not None and not storage.store_future.done()
        is_here = storage.keep_resident()
        if is_here and was_on_its_way:
            with self._lock:
                self._resident_bytes += storage.num_bytes
                self._late_bytes += storage.num_bytes
            storage.store_future = None
        return is_here

    def _load(self, load: Callable[..., Any], *args: Any) -> "Future[Any]":
        out: Tensor = args[2]

        def carry() -> Any:
            with self._load_bandwidth.measure_transfer(out.numel()):
                return load(*args)

        return self._load_threads.submit(carry)

    def _load_now(self, storage: OffloadedStorage) -> None:
        if self._keep_resident(storage):
            return
        storage.begin_load(self._load, self._backend)
        started_s = time.perf_counter()
        storage.end_load(self._backend)
        self._waited_s += time.perf_counter() - started_s

    def _wait_stores(self, part_runs: list[PartRun]) -> None:
        started_s = time.perf_counter()
        for call in part_runs:
            for record in call.live_storages():
                if record.store_future is not None:
                    record.store_future.result()
        self._waited_s += time.perf_counter() - started_s

    def _warn_if_slow(self) -> None:
        """Say so once if less was stored than stayed for want of time."""
        with self._lock:
            stored = self._stored_bytes
            late = self._late_bytes
        if late > stored:
            speed = self._store_bandwidth.bytes_per_s / GIB
            part = late / GIB
            all_ = (late + stored) / GIB
            self._warn_once(
                "slow", f"{self._backend.name} is too slow ({speed:.2f} GiB/s): {part:.2f} of {all_:.2f} GiB"
            )

    def _warn_once(self, kind: str, message: str) -> None:
        with self._lock:
            if kind in self._warned_kinds:
                return
            self._warned_kinds.add(kind)
        logger.warning("rank %d: %s stay in memory", self._rank, message)
