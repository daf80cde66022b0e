"""What fails alike on all ranks of a machine is said by the first of them."""

import pytest

from moefold.cli import command_parser as module
from moefold.cli.command_parser import RANK0_REPORT_WAIT_S, report_on_local_rank0
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv


@pytest.mark.parametrize("rank", [0, 1])
def test_first_rank_reports_at_once_and_the_others_wait_for_it(monkeypatch, rank):
    waited = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    with (
        pytest.raises(ConfigError if rank == 0 else SystemExit),
        report_on_local_rank0(RankEnv(rank, rank, 2, "127.0.0.1", 1)),
    ):
        raise ConfigError("wrong")
    assert waited == [RANK0_REPORT_WAIT_S] * rank
