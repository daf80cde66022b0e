"""An error that is the same on all ranks of a machine is said by the first of them."""

import shlex

import pytest

from moefold.cli import command_parser as module
from moefold.cli.command_parser import RANK0_REPORT_WAIT_S, report_on_local_rank0
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv


@pytest.mark.parametrize("rank", [0, 1])
def test_first_rank_reports_at_once_and_the_others_wait_for_it(monkeypatch, rank):
    waited = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    monkeypatch.setattr(module, "read_rank_env", lambda: RankEnv(rank, rank, 2, "127.0.0.1", 1))
    with (
        pytest.raises(ConfigError if rank == 0 else SystemExit),
        report_on_local_rank0(),
    ):
        raise ConfigError("wrong")
    assert waited == [RANK0_REPORT_WAIT_S] * rank


def test_a_long_command_of_the_help_is_the_same_command_after_it_is_wrapped():
    command = "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"a b\": \"c d\"}'"
    shown = module.CommandParser(prog="it", epilog=f"examples:\n  {command}\n").format_help().partition("examples:")[2]
    assert max(map(len, shown.splitlines())) <= 80
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(command)
