"""Run a function on all ranks of a job and return the result of the first rank to the caller."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from moefold.errors import RunError
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import single_rank_env, spawn_ranks

Result = TypeVar("Result")
RankFunction = Callable[[RankEnv, str], Result]
"""Function that each rank runs, given its place and its device type; the result of the first rank must be picklable."""


def collect_from_ranks(
    function: RankFunction[Result], world_size: int, device_type: str, rank_env: RankEnv | None
) -> Result:
    """Run a function on all ranks; a single rank, or a rank that a launcher started, is this process.

    Args:
        function: what each rank runs; with several GPU ranks it must be picklable, as these are spawned.
        world_size: ranks of the job.
        device_type: "cpu" or "cuda".
        rank_env: environment of this process, if a launcher started it.

    Returns:
        The function's result on this rank, or on the first of the ranks that were started.

    Raises:
        RunError: a rank that was started has failed; its message is on stderr.
    """
    if rank_env is not None:
        return function(rank_env, device_type)
    if world_size == 1:
        return function(single_rank_env(), device_type)
    with TemporaryDirectory(prefix="moefold-result-") as folder:
        path = Path(folder) / "result"
        status = spawn_ranks(partial(_write_result, function, path), world_size, device_type)
        if status:
            raise RunError(f"the ranks ended with status {status}; the message of the rank that failed is on stderr")
        found: Result = pickle.loads(path.read_bytes())
    return found


def _write_result(function: RankFunction[Result], path: Path, rank_env: RankEnv, device_type: str) -> int:
    result = function(rank_env, device_type)
    if rank_env.rank == 0:
        path.write_bytes(pickle.dumps(result))
    return 0
