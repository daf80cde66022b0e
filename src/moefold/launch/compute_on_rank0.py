"""What rank 0 alone works out, and all ranks of a launcher take: a plan for what each says of its machine."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.rendezvous import MISSING_RANKS_GRACE_S, STORE_ERRORS, join_rendezvous

JsonDict = dict[str, Any]
"""Plain data, ready for JSON."""


def compute_on_rank0(
    rank_env: RankEnv, timeout_s: float, own_facts: JsonDict, compute: Callable[[list[JsonDict]], JsonDict]
) -> tuple[JsonDict, dist.Store]:
    """Ask rank 0; blocks until all ranks have the answer. Communicates through the job's store.

    Args:
        rank_env: of this rank.
        timeout_s: so long ranks wait for each other, and for the answer.
        own_facts: what this rank says.
        compute: run on rank 0 alone, with what the ranks say, in their order.

    Returns:
        The answer, the same on all ranks, and the store. Rank 0 may keep its server: it has to live until the ranks
        have met again, or one of them finds a server that is about to end.

    Raises:
        ConfigError: `compute` raised it; on all ranks alike.
        RunError: ranks are missing, or the answer is, after `timeout_s`.
    """
    store, _ = join_rendezvous(rank_env, timeout_s)

    def bounded(call: Callable[[], Any]) -> Any:
        return run_with_timeout(timeout_s + MISSING_RANKS_GRACE_S, call)

    try:
        bounded(partial(store.set, f"says/{rank_env.rank}", json.dumps(own_facts)))
        if rank_env.rank == 0:
            said = bounded(partial(_gather_facts, store, rank_env.world_size, own_facts, timeout_s))
            found = _compute_result(compute, said)
            bounded(partial(_publish_result, store, rank_env.world_size, found, timeout_s))
        else:
            found = bounded(partial(_await_result, store, rank_env.rank, timeout_s))
    except (*STORE_ERRORS, CallTimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else "the store does not answer"
        raise RunError(
            f"rank {rank_env.rank} had no answer from all ranks within {timeout_s:g} s: {reason}; one may have ended, or "
            "rank 0 plans for longer: set faults.timeout_s higher"
        ) from None
    if "refused" in found:
        raise ConfigError(found["refused"])
    return found["answer"], store


def _gather_facts(store: dist.Store, world_size: int, own_facts: JsonDict, timeout_s: float) -> list[JsonDict]:
    """What each rank says, in their order; rank 0 calls it."""
    others = range(1, world_size)
    store.wait([f"says/{rank}" for rank in others], timedelta(seconds=timeout_s))
    return [own_facts, *(json.loads(store.get(f"says/{rank}")) for rank in others)]


def _publish_result(store: dist.Store, world_size: int, result: JsonDict, timeout_s: float) -> None:
    """Give the answer to all; rank 0 calls it. Who has not heard it would find no server if this rank ended now."""
    store.set("answer", json.dumps(result))
    store.wait([f"heard/{rank}" for rank in range(1, world_size)], timedelta(seconds=timeout_s))


def _await_result(store: dist.Store, rank: int, timeout_s: float) -> JsonDict:
    """Take the answer of rank 0; the others call it."""
    store.wait(["answer"], timedelta(seconds=timeout_s))
    found: JsonDict = json.loads(store.get("answer"))
    store.set(f"heard/{rank}", "1")
    return found


def _compute_result(compute: Callable[[list[JsonDict]], JsonDict], all_facts: list[JsonDict]) -> JsonDict:
    try:
        return {"answer": compute(all_facts)}
    except ConfigError as refusal:
        return {"refused": str(refusal)}
