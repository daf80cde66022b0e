"""What rank 0 alone works out, and all ranks of a launcher take: a plan for what each says of its machine."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.launch.deadline import NoAnswerError, answer_within
from moefold.launch.meeting import NAMING_S, STORE_ERRORS, meet
from moefold.launch.place import Place

Facts = dict[str, Any]
"""Plain data, ready for JSON."""


def one_answer(
    place: Place, limit_s: float, own: Facts, answer: Callable[[list[Facts]], Facts]
) -> tuple[Facts, dist.Store]:
    """Ask rank 0; blocks until all ranks have the answer. Communicates through the job's store.

    Args:
        place: of this rank.
        limit_s: so long ranks wait for each other, and for the answer.
        own: what this rank says.
        answer: run on rank 0 alone, with what the ranks say, in their order.

    Returns:
        The answer, the same on all ranks, and the store. Rank 0 may keep its server: it has to live until the ranks
        have met again, or one of them finds a server that is about to end.

    Raises:
        ConfigError: `answer` raised it; on all ranks alike.
        RunError: ranks are missing, or the answer is, after `limit_s`.
    """
    store, _ = meet(place, limit_s)

    def bounded(call: Callable[[], Any]) -> Any:
        return answer_within(limit_s + NAMING_S, call)

    try:
        bounded(partial(store.set, f"says/{place.rank}", json.dumps(own)))
        if place.rank == 0:
            said = bounded(partial(_hear, store, place.world_size, own, limit_s))
            found = _tried(answer, said)
            bounded(partial(_tell, store, place.world_size, found, limit_s))
        else:
            found = bounded(partial(_follow, store, place.rank, limit_s))
    except (*STORE_ERRORS, NoAnswerError) as error:
        reason = str(error).splitlines()[0] if str(error) else "the store does not answer"
        raise RunError(
            f"rank {place.rank} had no answer from all ranks within {limit_s:g} s: {reason}; one may have ended, or "
            "rank 0 plans for longer: set faults.timeout_s higher"
        ) from None
    if "refused" in found:
        raise ConfigError(found["refused"])
    return found["answer"], store


def _hear(store: dist.Store, world_size: int, own: Facts, limit_s: float) -> list[Facts]:
    """What each rank says, in their order; rank 0 calls it."""
    others = range(1, world_size)
    store.wait([f"says/{rank}" for rank in others], timedelta(seconds=limit_s))
    return [own, *(json.loads(store.get(f"says/{rank}")) for rank in others)]


def _tell(store: dist.Store, world_size: int, found: Facts, limit_s: float) -> None:
    """Give the answer to all; rank 0 calls it. Who has not heard it would find no server if this rank ended now."""
    store.set("answer", json.dumps(found))
    store.wait([f"heard/{rank}" for rank in range(1, world_size)], timedelta(seconds=limit_s))


def _follow(store: dist.Store, rank: int, limit_s: float) -> Facts:
    """Take the answer of rank 0; the others call it."""
    store.wait(["answer"], timedelta(seconds=limit_s))
    found: Facts = json.loads(store.get("answer"))
    store.set(f"heard/{rank}", "1")
    return found


def _tried(answer: Callable[[list[Facts]], Facts], said: list[Facts]) -> Facts:
    try:
        return {"answer": answer(said)}
    except ConfigError as refusal:
        return {"refused": str(refusal)}
