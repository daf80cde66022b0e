"""Optimizer states in files or host memory give the same bits as states in device memory."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.process_group import make_group
from moefold.config.base.part import make_part
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.offload.backend import CopyEngine
from moefold.optim.state_offload import MmapStore, PinnedStore
from moefold.optim.states import named_moments, reset_moments
from tests.optim.alone import build_alone

CPU = torch.device("cpu")
MIB = 2**20
ALONE = make_group((0,), 0, None)


def _parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"layers.0.attention.wq": (40, 30), "layers.0.ffn.experts.w_up": (3, 8, 10), "head.norm.weight": (30,)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def _train(given: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for parameter in given.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) + parameter.detach().sin()
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("min_bytes", [0, 200, MIB])
def test_moments_in_files_give_the_same_bits(tmp_path, kind, moment_dtype, min_bytes):
    cfg = TrainConfig(lr=1e-2, optimizer=make_part("optimizer", kind, moment_dtype=moment_dtype))

    here, away = _parameters(), _parameters()
    beside = build_alone(here, cfg)
    outside = build_alone(away, cfg, MmapStore(CopyEngine(CPU), tmp_path, min_bytes))
    _train(here, beside)
    _train(away, outside)
    for name in here:
        assert torch.equal(here[name], away[name]), name
    expected = named_moments(beside, here)
    for name, moment in named_moments(outside, away).items():
        assert torch.equal(moment, expected[name]), name
    assert not list(tmp_path.iterdir())


def test_memory_of_updated_moments_is_freed(tmp_path):
    home = MmapStore(CopyEngine(CPU), tmp_path, min_bytes=MIB)
    moment = home.zeros(torch.zeros(32 * MIB), torch.float32)
    start = _resident_bytes()
    for (here,) in home.prefetch([[moment]]):
        here.add_(1)
        assert _resident_bytes() - start > 100 * MIB
    assert _resident_bytes() - start < 30 * MIB
    assert moment.sum().item() == 32 * MIB


def test_a_disk_without_room_is_named_before_training(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ConfigError, match=r"train\.offload_optimizer='ssd' cannot allocate 4 MiB more in "):
            MmapStore(CopyEngine(CPU), tmp_path, 0).zeros(torch.zeros(MIB), torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class DelayedLink(CopyEngine):
    """A device with its own memory, inside the memory of this process; copies to the host are made when awaited."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.device = torch.device("cuda")
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.most_pending = self.num_begun = 0

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_host_async(self, data: torch.Tensor, ready: object, host: torch.Tensor) -> int:
        self.num_begun += 1
        self.pending[self.num_begun] = data, host
        self.most_pending = max(self.most_pending, len(self.pending))
        return self.num_begun

    def synchronize(self, event: int) -> None:
        data, host = self.pending.pop(event)
        host.copy_(data)


def test_moments_go_home_while_the_next_are_updated():
    link = DelayedLink()
    home = PinnedStore(link, 0)
    moments = [[home.zeros(torch.zeros(5), torch.float32) for _ in range(2)] for _ in range(4)]
    for step in (1, 2):
        for i, here in enumerate(home.prefetch(moments)):
            # Only the moments of the parameter before are still being copied to the host.
            assert len(link.pending) == (2 if i else 0)
            for moment in here:
                assert torch.equal(moment, torch.full((5,), (step - 1) * (i + 1.0)))
                moment.add_(i + 1)
        assert not link.pending
        assert all(torch.equal(m, torch.full((5,), step * (i + 1.0))) for i, of in enumerate(moments) for m in of)
    assert link.num_begun == 16


def test_states_in_the_memory_of_the_device_are_not_copied_onto_themselves(tmp_path):
    class NoLink(CopyEngine):
        def to_host_async(self, data: torch.Tensor, ready: object, host: torch.Tensor) -> None:
            raise AssertionError("there is nothing to copy")

    home = MmapStore(NoLink(CPU), tmp_path, 0)
    moment = home.zeros(torch.zeros(5), torch.float32)
    for (here,) in home.prefetch([[moment]]):
        here.add_(1)
    assert moment.tolist() == [1] * 5


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_after_a_reset_an_optimizer_goes_on_as_a_new_one(tmp_path, kind, moment_dtype, is_offloaded):
    cfg = TrainConfig(lr=1e-2, optimizer=make_part("optimizer", kind, moment_dtype=moment_dtype))

    given = _parameters()
    optimizer = build_alone(given, cfg, MmapStore(CopyEngine(CPU), tmp_path, 0) if is_offloaded else None)
    _train(given, optimizer)
    reset_moments(optimizer)
    assert not any(bool(moment.any()) for moment in named_moments(optimizer, given).values())
    other = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in given.items()}
    _train(given, optimizer)
    _train(other, build_alone(other, cfg))
    for name in given:
        assert torch.equal(given[name], other[name]), name
