"""Ranks of one machine are started on the right devices, and the job ends with the status of the worst."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import choose_device, spawn_ranks


def show_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("wish", "num_gpus", "device"), [("auto", 0, "cpu"), ("auto", 4, "cuda"), ("cpu", 4, "cpu"), ("cuda", 4, "cuda")]
)
def test_device_of_the_ranks_by_setting_and_gpus(monkeypatch, wish, num_gpus, device):
    show_gpus(monkeypatch, num_gpus)
    assert choose_device(wish, 4, None) == device


def test_too_few_gpus_for_the_ranks_of_this_machine(monkeypatch):
    show_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="parallel.world_size=4 needs a GPU for each rank, .* shows 2"):
        choose_device("cuda", 4, None)


def test_a_launcher_that_starts_more_ranks_than_gpus(monkeypatch):
    show_gpus(monkeypatch, 2)
    assert choose_device("cuda", 16, RankEnv(9, 1, 16, "10.0.0.1", 1)) == "cuda"
    with pytest.raises(ConfigError, match="local rank 2 finds 2 on its machine"):
        choose_device("cuda", 16, RankEnv(10, 2, 16, "10.0.0.1", 1))


def _sleep(folder: Path, place: RankEnv, device_type: str) -> int:
    """A rank that does not listen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / str(place.rank)).touch()
    time.sleep(60)
    return 0


def _nap(folder: Path, place: RankEnv, device_type: str) -> int:
    """A rank with nothing to save."""
    (folder / str(place.rank)).touch()
    time.sleep(60)
    return 0


def _raise(place: RankEnv, device_type: str) -> int:
    if place.rank == 1:
        raise ZeroDivisionError("a bug")
    time.sleep(60)
    return 0


def _fail(place: RankEnv, device_type: str) -> int:
    if place.rank == 1:
        os._exit(3)
    time.sleep(60)
    return 0


def _status(place: RankEnv, device_type: str) -> int:
    return place.rank * 10 if place.world_size > 1 else 7


def _press(folder: Path, ranks: int, times: int) -> None:
    """Press Ctrl-C for only this process, once the ranks are up."""
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.05)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)


def test_the_largest_status_of_a_rank_is_the_status_of_the_job():
    assert spawn_ranks(_status, 3, "cpu") == 20
    assert spawn_ranks(_status, 1, "cpu") == 7


def test_a_rank_that_fails_is_named(capfd):
    assert spawn_ranks(_fail, 2, "cpu") == 1
    assert capfd.readouterr().err == "moefold: rank 1 failed (exit status 3), and the others were ended\n"


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(tmp_path):
    threading.Thread(target=_press, args=(tmp_path, 2, 2), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(partial(_sleep, tmp_path), 2, "cpu")


def test_ctrl_c_ends_ranks_that_have_nothing_to_save(tmp_path, capfd):
    threading.Thread(target=_press, args=(tmp_path, 2, 1), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(partial(_nap, tmp_path), 2, "cpu")
    assert capfd.readouterr().err == ""


def test_a_bug_in_a_rank_is_one_traceback_with_its_rank(capfd):
    assert spawn_ranks(_raise, 2, "cpu") == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("moefold: rank 1 on ")
    assert lines[-1] == "ZeroDivisionError: a bug"
    assert sum("moefold: " in line for line in lines) == 1
