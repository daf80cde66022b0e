"""Moments on the host, or in files, update weights on the GPU as moments beside them do. Needs CUDA."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moefold.config.base.part import make_part
from moefold.config.sections.train import TrainConfig
from moefold.offload.backend import CopyEngine
from moefold.optim.state_offload import MmapStore, PinnedStore
from moefold.optim.states import StateStore, named_moments
from tests.models import model_of
from tests.optim.alone import build_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _train(cfg: TrainConfig, home: StateStore | None) -> dict[str, torch.Tensor]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    shapes = {f"layers.{i}.attention.wq": (512, 1024) for i in range(6)} | {"head.norm.weight": (1024,)}
    given = {name: nn.Parameter(torch.randn(shape, device=device)) for name, shape in shapes.items()}
    optimizer = build_alone(given, cfg, home, model=model_of({"layers": 6}))
    for _ in range(5):
        for parameter in given.values():
            parameter.grad = torch.randn_like(parameter) + parameter.detach().sin()
        optimizer.step()
    moments = named_moments(optimizer, given)
    if home is not None:
        assert {m.device.type for name, m in moments.items() if ".wq" in name} == {"cpu"}
    return {name: tensor.detach().cpu() for name, tensor in {**given, **moments}.items()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", ["host", "ssd"])
def test_moments_outside_the_gpu_give_the_same_bits(tmp_path: Path, kind, moment_dtype, place):
    cfg = TrainConfig(lr=1e-2, optimizer=make_part("optimizer", kind, moment_dtype=moment_dtype))
    link = CopyEngine(torch.device("cuda"))
    home = PinnedStore(link, 4096) if place == "host" else MmapStore(link, tmp_path, 4096)
    expected, found = _train(cfg, None), _train(cfg, home)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
