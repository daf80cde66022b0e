"""Modules that ranks of the tests have in memory."""

import sys
from pathlib import Path

from hypothesis import settings

from moefold.cli.main import main
from moefold.launch.rank_pool import WorkerPool
from moefold.verify import PRELOAD
from tests.e2e.command import small, train
from tests.train.tiny_runs import recipe, train_rank


def _speed_and_missing_modules() -> tuple[object, set[str]]:
    found = set(sys.modules)
    from tests.preload import MODULES

    return settings().deadline, {*MODULES, *PRELOAD, "tests.preload", "moefold.parts.wire"} - found


def test_a_rank_has_common_modules_and_no_time_limit_of_an_example(fresh_pool: WorkerPool) -> None:
    """The fork server leaves out modules that it cannot import, and says nothing."""
    assert fresh_pool.run(1, _speed_and_missing_modules) == [(None, set())]


def test_no_run_of_the_tests_draws_its_loss(pool: WorkerPool, tmp_path: Path) -> None:
    """In a rank, by a forked command and in this process: matplotlib takes longer than the steps of most tests."""
    pool.run(1, train_rank, recipe(tmp_path / "rank", 1))
    train(tmp_path / "command", "run.steps=1")
    main(small(tmp_path / "here", "run.steps=1"))
    assert {path.parent.name for path in tmp_path.glob("*/metrics.jsonl")} == {"rank", "command", "here"}
    assert list(tmp_path.glob("*/loss.png")) == []
