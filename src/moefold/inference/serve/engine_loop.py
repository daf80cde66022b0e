"""Loop of a server around the generation engine. Requests join and leave between passes, equally on all ranks."""

import itertools
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moefold.comm.collectives import all_gather_objects, broadcast_object
from moefold.comm.groups import ParallelGroups
from moefold.inference.engine.engine import GenerationSession
from moefold.inference.engine.requests import NewToken, Request

HEARTBEAT_S = 10.0
"""Interval of broadcasts without requests, far below the timeout of a collective."""

Deliver = Callable[[NewToken], None]
"""Callback for the new tokens of a sample, on the thread of the loop."""


@dataclass(frozen=True)
class _Add:
    request_id: int
    dp_rank: int
    """Data-parallel rank that generates the sample."""
    request: Request


@dataclass(frozen=True)
class _Cancel:
    request_id: int


@dataclass(frozen=True)
class _Receiver:
    """Callback of an unfinished sample, and the rank that generates it."""

    dp_rank: int
    deliver: Deliver


_Command = _Add | _Cancel | None
"""Command to the loop. None ends it."""


class EngineLoop:
    """Loop of passes while there are samples. `run` is called on every rank, the other methods on rank 0."""

    def __init__(self, generation: GenerationSession, groups: ParallelGroups) -> None:
        self._generation = generation
        self._groups = groups
        self._commands: queue.SimpleQueue[Sequence[_Command]] = queue.SimpleQueue()
        self._request_ids = itertools.count()
        self._receivers: dict[int, _Receiver] = {}
        """Receivers of the unfinished samples, on rank 0, with those that have not been added yet."""
        self._dp_rank_of: dict[int, int] = {}
        """Data-parallel rank of each unfinished sample, the same on all ranks."""

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> list[int]:
        """Add a sample for each request, which fits into the cache, and return their ids. Threads may call it.

        `deliver` receives each new token. The last token of a sample has its finish reason.
        """
        load = Counter(dict.fromkeys(range(self._groups.attn.dp.size), 0))
        # The loop's own record lacks samples that were submitted during the current pass. Creating the list is atomic,
        # because the loop may remove receivers.
        load.update(receiver.dp_rank for receiver in list(self._receivers.values()))
        commands = []
        for request in requests:
            dp_rank = min(load, key=lambda rank: (load[rank], rank))
            load[dp_rank] += 1
            commands.append(_Add(next(self._request_ids), dp_rank, request))
        for command in commands:
            self._receivers[command.request_id] = _Receiver(command.dp_rank, deliver)
        self._commands.put(commands)
        return [command.request_id for command in commands]

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Stop samples, ignoring those that have ended. It is thread-safe."""
        self._commands.put([_Cancel(request_id) for request_id in request_ids])

    def stop(self) -> None:
        """End `run` on all ranks. Threads may call it."""
        self._commands.put([None])

    def run(self) -> None:
        """Run passes until `stop`. It is collective over all ranks."""
        while self._apply(self._next_commands()):
            if not self._dp_rank_of:
                continue
            tokens = self._generation.step()
            for new in tokens:
                if new.finish_reason is not None:
                    self._generation.pop(new.request_id, new.finish_reason)
            for new in itertools.chain.from_iterable(all_gather_objects(tokens, self._groups.attn.dp)):
                if new.finish_reason is not None:
                    del self._dp_rank_of[new.request_id]
                self._send(new)

    def _send(self, new: NewToken) -> None:
        receiver = self._receivers.get(new.request_id)
        if receiver is None:
            return
        if new.finish_reason is not None:
            del self._receivers[new.request_id]
        receiver.deliver(new)

    def _next_commands(self) -> list[_Command]:
        """Return the commands since the last pass. Wait for a command if there is no sample. It is collective."""
        commands: list[_Command] = []
        if self._groups.rank == 0:
            try:
                commands += self._commands.get(block=not self._dp_rank_of, timeout=HEARTBEAT_S)
                while True:
                    commands += self._commands.get_nowait()
            except queue.Empty:
                pass
        return broadcast_object(commands, self._groups.world, 0)

    def _apply(self, commands: Sequence[_Command]) -> bool:
        """Execute commands, and return False if a command ends the loop."""
        for command in commands:
            if command is None:
                return False
            if isinstance(command, _Add):
                self._dp_rank_of[command.request_id] = command.dp_rank
                if command.dp_rank == self._groups.attn.dp.rank:
                    self._generation.add(command.request_id, command.request)
            elif (dp_rank := self._dp_rank_of.pop(command.request_id, None)) is not None:
                self._receivers.pop(command.request_id, None)
                if dp_rank == self._groups.attn.dp.rank:
                    self._generation.cancel(command.request_id)
        return True
