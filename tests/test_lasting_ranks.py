"""Ranks that last are at each call like new ranks, and end with a call that fails."""

import os

import pytest
import torch
import torch.distributed as dist

from moefold.launch.rank_pool import WorkerError


def _draw(word: str) -> tuple[int, float, str | None]:
    """Return the process, a random number and the environment's word; the next call must not know them."""
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.rand(1).dtype == torch.float32
    found = os.getpid(), float(torch.rand(1)), os.environ.get("WORD")
    os.environ["WORD"] = word
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    return found


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    dist.barrier()


def test_calls_share_ranks_and_nothing_else(pool):
    first, second = (pool.run(2, _draw, word) for word in ("a", "b"))
    assert first == second
    assert all(word is None for _, _, word in first)
    (one,) = pool.run(1, _draw, "c")
    assert one[0] not in {process for process, _, _ in first}


def test_a_call_that_fails_is_told_and_ends_its_ranks(pool):
    before = pool.run(2, _draw, "a")
    with pytest.raises(WorkerError, match=r"rank 1: (?s:.*)ValueError: as asked"):
        pool.run(2, _fail_on, 1)
    after = pool.run(2, _draw, "a")
    assert {process for process, _, _ in before}.isdisjoint(process for process, _, _ in after)
    assert [drawn for _, drawn, _ in before] == [drawn for _, drawn, _ in after]


def _replace_a_function() -> None:
    from moefold.parallel import parallelize

    parallelize.shard_data_parallel = lambda *_: None


def _leave_a_hook() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("leave", "named"),
    [(_replace_a_function, "left shard_data_parallel behind"), (_leave_a_hook, "left _global_forward_hooks behind")],
)
def test_leftovers_of_a_call_are_an_error(pool, leave, named):
    with pytest.raises(WorkerError, match=named):
        pool.run(1, leave)
