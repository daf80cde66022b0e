"""Result of a function that runs on all ranks of a job, from the first rank."""

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
"""Function that each rank runs, given its place and its device type. The result of the first rank must be picklable."""


def collect_from_ranks(
    function: RankFunction[Result],
    world_size: int,
    device_type: str,
    rank_env: RankEnv | None,
    *,
    regroups: bool = False,
) -> Result:
    """Run a function on all ranks. This process is the rank in a job of one rank or under a launcher.

    Args:
        function: called on each rank. It must be picklable with several GPU ranks, which are spawned.

    Returns:
        The function's result on this rank, or on the first started rank that is not lost.

    Raises:
        RunError: a rank that was started has failed. Its message is on stderr.
    """
    if rank_env is not None:
        return function(rank_env, device_type)
    if world_size == 1:
        return function(single_rank_env(), device_type)
    with TemporaryDirectory(prefix="moefold-result-") as folder:
        main = partial(_write_result, function, Path(folder), regroups)
        status = spawn_ranks(main, world_size, device_type, regroups=regroups)
        if status:
            raise RunError(f"the ranks ended with status {status}; the message of the rank that failed is on stderr")
        first = min(Path(folder).glob(f"*{_RESULT_SUFFIX}"), key=lambda path: int(path.stem))
        result: Result = pickle.loads(first.read_bytes())
    return result


_RESULT_SUFFIX = ".pickle"


def _write_result(
    function: RankFunction[Result], folder: Path, regroups: bool, rank_env: RankEnv, device_type: str
) -> int:
    result = function(rank_env, device_type)
    if rank_env.rank == 0 or regroups:
        draft = folder / f"{rank_env.rank}.draft"
        draft.write_bytes(pickle.dumps(result))
        draft.rename(draft.with_suffix(_RESULT_SUFFIX))
    return 0
