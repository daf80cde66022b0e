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

from moefold.model.parameter import is_weight
from moefold.model.recall import Function, Recall, all_kept
from moefold.model.steps import Begun, Steps
from moefold.offload.pace import Pace
from moefold.offload.record import Record, View
from moefold.offload.tier import Link, Tier

logger = getLogger(__name__)

THREADS = 2
"""For each direction: one fills what the other empties."""
GIB = 2**30


@dataclass(frozen=True)
class OffloadTotals:
    """What one rank did in a step."""

    stored_bytes: int = 0
    """Bytes whose memory was freed."""
    kept_bytes: int = 0
    """Bytes of the same parts that stayed in memory: for want of room or of time."""
    io_s: float = 0.0
    """Time in which bytes were carried, out and back."""
    waited_s: float = 0.0
    """Time in which training waited for that."""


class Call:
    """One run of a part, whose storages go and come together."""

    def __init__(self, number: int, micro_batch: "MicroBatch") -> None:
        self.number = number
        self.micro_batch = micro_batch
        self.began_s = time.perf_counter()
        self.is_reached = False
        self._records: list[weakref.ref[Record]] = []

    def add(self, record: Record) -> None:
        """A storage that it gives away."""
        record.call, record.is_given_away = self, True
        self._records.append(weakref.ref(record))

    def records(self) -> list[Record]:
        """Those that are still wanted, last first, as the backward pass asks for them."""
        found = [reference() for reference in reversed(self._records)]
        return [record for record in found if record is not None]


class MicroBatch:
    """One forward pass of a stage, by its place among those of the step."""

    def __init__(self, index: int, given: frozenset[int]) -> None:
        self.index = index
        self.given = given
        """Storages that outlive the pass anyway."""
        self.calls: list[Call] = []
        self.num_settled = 0
        """Calls whose copies were waited for."""


class _Here(threading.local):
    """Where a forward pass is, in the thread that runs it: what a backward pass runs again beside it is elsewhere."""

    micro_batch: MicroBatch | None = None
    call: Call | None = None


class ActivationOffload:
    """The hooks of all stages of a rank.

    Args:
        tier: where the bytes go.
        min_bytes: a smaller storage stays.
        waits: the forward pass waits for the copies, so that at most two runs of a part are in memory; else it never
            does, and what could not be stored and brought back by the time it is needed, judged by the step before, is
            not sent away at all.
        rank: for messages.
    """

    def __init__(self, tier: Tier, *, min_bytes: int, waits: bool, rank: int = 0) -> None:
        self._tier = tier
        self._min_bytes = min_bytes
        self._waits = waits
        self._rank = rank
        self._storing, self._loading = (
            ThreadPoolExecutor(THREADS, f"offload-{way}", initializer=tier.link.enter_thread) for way in ("out", "in")
        )
        self._out, self._in = Pace(), Pace()
        # Records by the address of their storage, which none can have before they are gone.
        self._records: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._here = _Here()
        self._lifetimes_s: dict[tuple[int, int], float] = {}
        self._followers: dict[int, int] = {}
        self._last_reached = -1
        self._waiting: dict[int, MicroBatch] = {}
        self._num_passes = self._num_steps = 0
        self._lock = threading.Lock()
        self._queued_bytes = self._stored_bytes = self._kept_bytes = self._late_bytes = 0
        self._waited_s = 0.0
        self._has_told: set[str] = set()

    @property
    def link(self) -> Link:
        """The way to the place."""
        return self._tier.link

    def begin_step(self) -> None:
        """What follows is a step, which takes the way of the step before."""
        self._num_steps += 1
        self._num_passes, self._last_reached = 0, -1
        self._waiting.clear()

    def end_step(self) -> OffloadTotals:
        """What was done since the last call; warns once if the tier is too slow for most of it."""
        if self._num_steps > 1:
            self._tell_if_slow()
        (_, out_s), (_, in_s) = self._out.take_step(), self._in.take_step()
        with self._lock:
            totals = OffloadTotals(self._stored_bytes, self._kept_bytes, out_s + in_s, self._waited_s)
            self._stored_bytes = self._kept_bytes = self._late_bytes = 0
            self._waited_s = 0.0
        return totals

    def around_stage(
        self, steps: Callable[..., Steps[Tensor]], lasting: Callable[[], tuple[Tensor, ...]]
    ) -> Callable[..., Steps[Tensor]]:
        """The forward pass of a stage, whose saved tensors come here; at its pauses others are elsewhere.

        Args:
            steps: of the stage.
            lasting: gives tensors of the stage, beside weights, that outlive a micro-batch.
        """

        def run(*args: Any, **kwargs: Any) -> Steps[Tensor]:
            if not torch.is_grad_enabled():
                return (yield from steps(*args, **kwargs))
            given = [*args, *kwargs.values(), *lasting()]
            addresses = frozenset(x.untyped_storage()._cdata for x in given if isinstance(x, Tensor))
            micro_batch = MicroBatch(self._num_passes, addresses)
            self._num_passes += 1
            begun = Begun(steps(*args, **kwargs))
            while True:
                with self._inside(micro_batch):
                    begun.go_on()
                if begun.is_done:
                    break
                yield
            y = begun.finish()
            if self._waits:
                self._wait_for(micro_batch.calls)
            if micro_batch.calls and y.requires_grad:
                self._waiting[micro_batch.index] = micro_batch
                y.register_hook(lambda grad: self._begin_backward(micro_batch))
            return y

        return run

    @contextmanager
    def _inside(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Inside, this thread is in the forward pass of a micro-batch."""
        self._here.micro_batch = micro_batch
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._here.micro_batch = None

    def around_steps(self, steps: Callable[..., Steps[Tensor]]) -> Callable[..., Steps[Tensor]]:
        """`around` for a part that pauses."""

        def run(*args: Any, **kwargs: Any) -> Steps[Tensor]:
            call = self._new_call()
            begun = Begun(steps(*args, **kwargs))
            while True:
                with self._in_call(call):
                    begun.go_on()
                if begun.is_done:
                    break
                yield
            if call is not None:
                self._wait_behind(call.micro_batch)
            return begun.finish()

        return run

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, as a part whose activations are offloaded."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._part():
                return function(*args, **kwargs)

        return run

    def around_recall(self, recall: Recall) -> Recall:
        """The same, and what the function keeps is offloaded, and its results if the operations inside keep them."""

        @contextmanager
        def run(function: Function, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
            with self._part() as call, recall(function, *tensors) as results:
                # What is made again nobody keeps.
                wanted = [] if call is None or recall is not all_kept else list(filter(self._takes, results))
                records = [self._record(x) for x in wanted]
                for record in records:
                    record.call = record.call or call
                self._here.call = None
                yield results

        return run

    @contextmanager
    def _part(self) -> Iterator[Call | None]:
        """Inside, what is saved is offloaded; nothing happens outside of a forward pass that will have a backward."""
        call = self._new_call()
        with self._in_call(call):
            yield call
        if call is not None:
            self._wait_behind(call.micro_batch)

    def _new_call(self) -> Call | None:
        """A run of a part that begins here; None outside of a forward pass that will have a backward."""
        micro_batch = self._here.micro_batch
        if micro_batch is None:
            return None
        call = Call(len(micro_batch.calls), micro_batch)
        micro_batch.calls.append(call)
        return call

    @contextmanager
    def _in_call(self, call: Call | None) -> Iterator[None]:
        outer = self._here.call
        self._here.call = outer if call is None else call
        try:
            yield
        finally:
            self._here.call = outer

    def _wait_behind(self, micro_batch: MicroBatch) -> None:
        """Where the recipe says so, wait for all parts but the last: one is copied while the next computes."""
        if self._waits:
            first, last = micro_batch.num_settled, len(micro_batch.calls) - 1
            self._wait_for(micro_batch.calls[first:last])
            micro_batch.num_settled = max(first, last)

    def _pack(self, tensor: Tensor) -> View | Tensor:
        if not self._takes(tensor):
            return tensor.detach()
        record = self._record(tensor)
        call = record.call or self._here.call
        if call is not None and not record.is_given_away:
            self._give_away(record, call)
        return View(record, tensor)

    def _unpack(self, packed: View | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        record = packed.record
        if record.call is not None:
            self._reach(record.call)
            self._bring(record)
        return record.view(packed)

    def _takes(self, tensor: Tensor) -> bool:
        """Whether it is a plain tensor of some size that lives as long as the graph, and no longer."""
        if type(tensor) is not Tensor or tensor.device.type != self._tier.link.device.type:
            return False
        storage = tensor.untyped_storage()
        assert self._here.micro_batch is not None
        return (
            storage.nbytes() >= max(self._min_bytes, 1)
            and not is_weight(tensor)
            and storage._cdata not in self._here.micro_batch.given
        )

    def _record(self, tensor: Tensor) -> Record:
        address = tensor.untyped_storage()._cdata
        record = self._records.get(address)
        # After a change in place it is other content.
        if record is None or record.version != tensor._version:
            record = self._records[address] = Record(tensor)
        return record

    def _give_away(self, record: Record, call: Call) -> None:
        call.add(record)
        if not self._is_in_time(record, call):
            with self._lock:
                self._kept_bytes += record.num_bytes
                self._late_bytes += record.num_bytes
            return
        with self._lock:
            self._queued_bytes += record.num_bytes
        storing = self._storing.submit(self._store, weakref.ref(record), self._tier.link.mark())
        record.storing = storing
        storing.add_done_callback(self._left_queue(record.num_bytes))

    def _left_queue(self, num_bytes: int) -> Callable[[Future[None]], None]:
        def left(storing: Future[None]) -> None:
            with self._lock:
                self._queued_bytes -= num_bytes

        return left

    def _is_in_time(self, record: Record, call: Call) -> bool:
        """Whether it can be stored and brought back before it is needed, as far as the step before tells."""
        lifetime_s = self._lifetimes_s.get((call.micro_batch.index, call.number))
        if self._waits or lifetime_s is None:
            return True
        out_s = (self._queued_bytes + record.num_bytes) / self._out.bytes_per_s
        return out_s + record.num_bytes / self._in.bytes_per_s <= lifetime_s

    def _store(self, reference: "weakref.ref[Record]", ready: Any) -> None:
        """On an I/O thread."""
        record = reference()
        data = None if record is None else record.begin_store()
        if record is None or data is None:
            return
        try:
            with self._out.carrying(record.num_bytes):
                stored = self._tier.store(data, ready)
        except OSError as error:
            self._tell("full", f"{self._tier.name} takes no more ({error.strerror or error}): some activations")
            stored = None
        has_left = stored is not None and record.end_store(stored)
        with self._lock:
            if has_left:
                self._stored_bytes += record.num_bytes
            elif stored is None:
                self._kept_bytes += record.num_bytes
        if stored is None:
            self._tell("full", f"{self._tier.name} has no more room (train.offload_limit_gib): some activations")

    def _reach(self, call: Call) -> None:
        """The backward pass has come to a part: get it, and the one that is next."""
        if call.is_reached:
            return
        call.is_reached = True
        micro_batch = call.micro_batch
        self._lifetimes_s[micro_batch.index, call.number] = time.perf_counter() - call.began_s
        self._fetch(call)
        follower = self._waiting.get(self._followers.get(micro_batch.index, -1))
        before = [] if follower is None else follower.calls
        self._fetch_last_of([*before, *micro_batch.calls[: call.number]])

    def _begin_backward(self, micro_batch: MicroBatch) -> None:
        self._waiting.pop(micro_batch.index, None)
        if self._last_reached >= 0:
            self._followers[self._last_reached] = micro_batch.index
        self._last_reached = micro_batch.index
        self._fetch_last_of(micro_batch.calls)

    def _fetch_last_of(self, calls: list[Call]) -> None:
        """Fetch the last one that still has anything."""
        for call in reversed(calls):
            if self._fetch(call):
                return

    def _fetch(self, call: Call) -> bool:
        """Begin to bring back what is away, and keep what is not yet away; whether there is anything."""
        records = call.records()
        for record in records:
            if not self._keeps(record):
                record.begin_load(self._load, self._tier)
        return bool(records)

    def _keeps(self, record: Record) -> bool:
        was_on_its_way = record.storing is not None and not record.storing.done()
        is_here = record.claim()
        if is_here and was_on_its_way:
            with self._lock:
                self._kept_bytes += record.num_bytes
                self._late_bytes += record.num_bytes
            record.storing = None
        return is_here

    def _load(self, load: Callable[..., Any], *args: Any) -> "Future[Any]":
        out: Tensor = args[2]

        def carry() -> Any:
            with self._in.carrying(out.numel()):
                return load(*args)

        return self._loading.submit(carry)

    def _bring(self, record: Record) -> None:
        if self._keeps(record):
            return
        record.begin_load(self._load, self._tier)
        started_s = time.perf_counter()
        record.end_load(self._tier)
        self._waited_s += time.perf_counter() - started_s

    def _wait_for(self, calls: list[Call]) -> None:
        started_s = time.perf_counter()
        for call in calls:
            for record in call.records():
                if record.storing is not None:
                    record.storing.result()
        self._waited_s += time.perf_counter() - started_s

    def _tell_if_slow(self) -> None:
        """Say so once if less was stored than stayed for want of time."""
        with self._lock:
            stored, late = self._stored_bytes, self._late_bytes
        if late > stored:
            speed, part, all_ = self._out.bytes_per_s / GIB, late / GIB, (late + stored) / GIB
            self._tell("slow", f"{self._tier.name} is too slow ({speed:.2f} GiB/s): {part:.2f} of {all_:.2f} GiB")

    def _tell(self, kind: str, what: str) -> None:
        with self._lock:
            if kind in self._has_told:
                return
            self._has_told.add(kind)
        logger.warning("rank %d: %s stay in memory", self._rank, what)
