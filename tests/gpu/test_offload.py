"""Activations leave the memory of one GPU: the same bits, and less of it. Needs CUDA."""

import pytest
import torch
from torch import nn

from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.transformer import build_model
from moefold.parallel.offload import apply_offload, open_offload
from moefold.parallel.recompute import apply_recompute
from tests.models import model_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = model_of(
    {
        "layers": 16,
        "hidden_size": 512,
        "attention.num_heads": 8,
        "attention.num_kv_heads": 8,
        "ffn.moe.num_experts": 8,
        "ffn.moe.intermediate_size": 1024,
        "vocab_size": 512,
    }
)
STEPS = 3


@pytest.fixture(autouse=True)
def deterministic():
    """Kernels that add in any order would differ between two plain runs too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _run(**train: object):
    """Losses, gradients, peak bytes over those before, and totals of the last of some steps."""
    cfg = Config(
        run=RunConfig(dtype="bfloat16"),
        model=MODEL,
        train=TrainConfig(seq_len=1024, micro_batch_size=8, offload_min_kib=64, **train),
    )
    device = torch.device("cuda", 0)
    with device:
        module = build_model(cfg).bfloat16()
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        module.set_positions(torch.arange(1024))
        tokens = torch.randint(512, (8, 1024), generator=torch.Generator(device).manual_seed(1))
        shares = torch.full(tokens.shape, 1 / tokens.numel())
    apply_recompute(module, cfg.train.recompute)
    offload = open_offload(cfg.train, device, 0)
    if offload is not None:
        apply_offload(module, cfg.train.offload, offload)
    losses, totals, peak = [], None, 0
    for _ in range(STEPS):
        module.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if offload is not None:
            offload.begin_step()
        loss = module(tokens, labels=tokens, weights=shares).sum()
        loss.backward()
        torch.cuda.synchronize()
        losses.append(float(loss))
        peak = torch.cuda.max_memory_allocated() - before
        totals = None if offload is None else offload.end_step()
    return losses, [p.grad.clone() for p in module.parameters()], peak, totals


@pytest.mark.parametrize("place", ["host", "ssd"])
@pytest.mark.parametrize(("parts", "again"), [(("layer",), ()), (("layer",), ("norms", "core_attention")),
                                              (("moe", "core_attention"), ()), (("layer",), ("layer",))])  # fmt: skip
@pytest.mark.parametrize("waits", [True, False])
def test_offload_changes_no_bit(tmp_path, place, parts, again, waits):
    where = {"offload_to": place} | ({"offload_dir": str(tmp_path)} if place == "ssd" else {})
    losses, gradients, _, _ = _run(recompute=again)
    found = _run(offload=parts, recompute=again, offload_waits=waits, **where)
    assert found[0] == losses
    assert all(torch.equal(a, b) for a, b in zip(found[1], gradients, strict=True))
    assert found[3].stored_bytes > 0
    assert found[3].resident_bytes == 0 or not waits


def test_peak_memory_falls_by_45_percent():
    peak = _run()[2]
    offloading = _run(offload=("layer",), offload_waits=True)
    assert peak > 2**30
    assert offloading[2] < 0.55 * peak
