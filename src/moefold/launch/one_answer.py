"""What rank 0 alone works out, and all ranks of a launcher take: a plan for what each says of its machine."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.launch.meeting import STORE_ERRORS, meet
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
    others = range(1, place.world_size)
    limit = timedelta(seconds=limit_s)
    try:
        store.set(f"says/{place.rank}", json.dumps(own))
        if place.rank == 0:
            store.wait([f"says/{rank}" for rank in others], limit)
            said = [own, *(json.loads(store.get(f"says/{rank}")) for rank in others)]
            found = _tried(answer, said)
            store.set("answer", json.dumps(found))
            # Whoever has not heard it yet would find no server if this rank ended now.
            store.wait([f"heard/{rank}" for rank in others], limit)
        else:
            store.wait(["answer"], limit)
            found = json.loads(store.get("answer"))
            store.set(f"heard/{place.rank}", "1")
    except STORE_ERRORS as error:
        raise RunError(
            f"rank {place.rank} had no answer from all ranks within {limit_s:g} s: {str(error).splitlines()[0]}; "
            "one may have ended, or rank 0 plans for longer: set faults.timeout_s higher"
        ) from None
    if "refused" in found:
        raise ConfigError(found["refused"])
    return found["answer"], store


def _tried(answer: Callable[[list[Facts]], Facts], said: list[Facts]) -> Facts:
    try:
        return {"answer": answer(said)}
    except ConfigError as refusal:
        return {"refused": str(refusal)}
