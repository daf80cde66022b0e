import pytest
import torch

from moefold.errors import ConfigError
from moefold.launch.place import Place
from moefold.launch.ranks import choose_device


def show_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("wish", "num_gpus", "device"), [("auto", 0, "cpu"), ("auto", 4, "cuda"), ("cpu", 4, "cpu"), ("cuda", 4, "cuda")]
)
def test_device(monkeypatch, wish, num_gpus, device):
    show_gpus(monkeypatch, num_gpus)
    assert choose_device(wish, 4, None) == device


def test_too_few_gpus_for_the_ranks_of_this_machine(monkeypatch):
    show_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="parallel.world_size=4 needs a GPU for each rank, .* shows 2"):
        choose_device("cuda", 4, None)


def test_a_launcher_that_starts_more_ranks_than_gpus(monkeypatch):
    show_gpus(monkeypatch, 2)
    assert choose_device("cuda", 16, Place(9, 1, 16, "10.0.0.1", 1)) == "cuda"
    with pytest.raises(ConfigError, match="local rank 2 finds 2 on its machine"):
        choose_device("cuda", 16, Place(10, 2, 16, "10.0.0.1", 1))
