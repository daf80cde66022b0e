"""Computation on rank 0 for all ranks, from the facts of each, before any process group exists.

It serves `parallel.mapping="auto"`: rank 0 plans for the machines that the ranks report.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.host.processes import CallTimeoutError, run_with_timeout
from moefold.host.rank_env import RankEnv
from moefold.launch.rendezvous import MISSING_RANKS_GRACE_S, STORE_ERRORS, join_rendezvous
from moefold.message_text import first_line

Result = TypeVar("Result")
JsonDict = dict[str, Any]
"""JSON-serialisable data."""


def compute_on_rank0(
    rank_env: RankEnv, timeout_s: float, own_facts: JsonDict, compute: Callable[[list[JsonDict]], JsonDict]
) -> tuple[JsonDict, dist.Store]:
    """Gather facts from all ranks, run `compute` on rank 0 and return its result on every rank.

    It is collective over the whole job. It communicates through the job's store.

    Args:
        timeout_s: limit for each of the two waits: for the ranks to join, and for the result.
        own_facts: facts that this rank contributes.
        compute: called on rank 0 only, with the facts in rank order.

    Returns:
        The result, equal on all ranks, and the store. The caller must keep the store alive until the next rendezvous:
        rank 0 may host its server, and a rank that connects to a closing server fails.

    Raises:
        ConfigError: `compute` raised it. Raised on all ranks.
        RunError: a rank or the result is missing after `timeout_s`.
    """
    store, _ = join_rendezvous(rank_env, timeout_s)
    limit = timedelta(seconds=timeout_s)
    peers = range(1, rank_env.world_size)

    def bounded(call: Callable[[], Result]) -> Result:
        return run_with_timeout(timeout_s + MISSING_RANKS_GRACE_S, call)

    def gather_facts() -> list[JsonDict]:
        store.wait([f"facts/{rank}" for rank in peers], limit)
        return [own_facts, *(json.loads(store.get(f"facts/{rank}")) for rank in peers)]

    def publish() -> None:
        store.set("answer", json.dumps(result))
        # Rank 0 may host the store: every rank acknowledges the result first.
        store.wait([f"received/{rank}" for rank in peers], limit)

    def receive() -> JsonDict:
        store.wait(["answer"], limit)
        answer: JsonDict = json.loads(store.get("answer"))
        store.set(f"received/{rank_env.rank}", "1")
        return answer

    try:
        bounded(partial(store.set, f"facts/{rank_env.rank}", json.dumps(own_facts)))
        if rank_env.rank == 0:
            all_facts = bounded(gather_facts)
            try:
                result: JsonDict = {"answer": compute(all_facts)}
            except ConfigError as refusal:
                result = {"refused": str(refusal)}
            bounded(publish)
        else:
            result = bounded(receive)
    except (*STORE_ERRORS, CallTimeoutError) as error:
        reason = first_line(error) if str(error) else "the store does not answer"
        raise RunError(
            f"rank {rank_env.rank} had no answer from all ranks within {timeout_s:g} s: {reason}; a rank may have "
            "ended, or planning on rank 0 takes longer: set faults.timeout_s higher"
        ) from None
    if "refused" in result:
        raise ConfigError(result["refused"])
    return result["answer"], store
