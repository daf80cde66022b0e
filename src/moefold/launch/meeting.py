"""Where the ranks of a job find each other: the store that a launcher or rank 0 keeps."""

import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moefold.errors import RunError
from moefold.launch.place import Place
from moefold.parallel.flight_record import rank_list


def meet(place: Place, limit_s: float) -> dist.Store:
    """Open the job's store and wait until every rank has.

    Raises:
        RunError: the store cannot be reached, or ranks are missing, after `limit_s`.
    """
    # The environment form of rendezvous knows whether an elastic agent or rank 0 keeps the store.
    os.environ.update(MASTER_ADDR=place.master_address, MASTER_PORT=str(place.master_port))
    at = f"{place.master_address}:{place.master_port}"
    started_s = time.monotonic()
    try:
        store: dist.Store
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=limit_s)))
    except (dist.DistError, RuntimeError) as error:
        raise RunError(
            f"rank {place.rank} did not meet the other {place.world_size - 1} at {at} within {limit_s:g} s: "
            f"{str(error).splitlines()[0]}; start all ranks where they reach it, or set faults.timeout_s higher"
        ) from None
    keys = {f"moefold/here/{rank}": rank for rank in range(place.world_size)}
    store.set(f"moefold/here/{place.rank}", "1")
    while not store.check(list(keys)):
        if time.monotonic() - started_s > limit_s:
            missing = [rank for key, rank in keys.items() if not store.check([key])]
            raise RunError(
                f"{rank_list(missing)} of {place.world_size} did not come to {at} within {limit_s:g} s; start them, or "
                "set faults.timeout_s higher"
            )
        time.sleep(0.05)
    return store
