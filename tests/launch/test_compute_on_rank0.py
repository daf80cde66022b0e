"""All ranks take the result of rank 0, computed from the values of all ranks; a refusal too."""

import socket
from concurrent.futures import ThreadPoolExecutor

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.rank0_computation import JsonDict, compute_on_rank0
from moefold.launch.rendezvous import join_rendezvous

RANKS = 3
LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def said_by_ranks(answer) -> list[JsonDict | str]:
    """Return the end of each rank; ranks are threads, with stores of their own."""
    port, kept = free_port(), []

    def ask(rank: int) -> JsonDict | str:
        place = RankEnv(rank, rank, RANKS, "127.0.0.1", port)
        try:
            found, store = compute_on_rank0(place, LIMIT_S, {"memory": 10**rank}, lambda said: answer(rank, said))
        except ConfigError as error:
            return str(error)
        # As a run does next, at the same port; rank 0, which keeps the server, outlives it.
        kept.extend((store, join_rendezvous(place, LIMIT_S)[0]))
        return found

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(ask, range(RANKS)))


def test_all_ranks_take_the_result_that_the_first_computes_from_all_values():
    found = said_by_ranks(lambda rank, said: {"by": rank, "memory": [facts["memory"] for facts in said]})
    assert found == [{"by": 0, "memory": [1, 10, 100]}] * RANKS


def test_a_refusal_is_one_of_all_ranks():
    def refuse(rank: int, said: list[JsonDict]) -> JsonDict:
        raise ConfigError(f"nothing fits, says rank {rank}")

    assert said_by_ranks(refuse) == ["nothing fits, says rank 0"] * RANKS
