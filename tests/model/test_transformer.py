"""The plain forward pass of a stage and the resumable one compute the same."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from moefold.api import build_model
from moefold.comm.resumable import run_to_end
from moefold.model.transformer import Transformer, module_settings
from tests.verify.recipes import tiny


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("mtp_layers", [0, 2])
def test_resumable_forward_equals_the_plain_one(mtp_layers: int, has_documents: bool) -> None:
    cfg = tiny(model={"mtp_layers": mtp_layers})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (2, 17), generator=generator)
    columns = {"labels": tokens[:, 1:], "weights": torch.rand(2, 16, generator=generator, dtype=torch.float64)}
    if mtp_layers:
        columns["mtp_labels"] = torch.randint(32, (2, mtp_layers, 16), generator=generator)
        columns["mtp_weights"] = torch.rand(2, mtp_layers, 16, generator=generator, dtype=torch.float64)
    if has_documents:
        columns["document_starts"] = torch.tensor([[0] * 5 + [5] * 11, [0] * 16])

    def run(*, is_resumable: bool) -> list[Tensor]:
        model = build_model(cfg).double()
        model.set_positions(torch.arange(16))
        x = tokens[:, :-1]
        terms = run_to_end(model.forward_resumable(x, **columns)) if is_resumable else model(x, **columns)
        assert terms.shape == (len(model.loss_terms),)
        terms.sum().backward()
        return [terms.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run(is_resumable=False)
    resumable = run(is_resumable=True)
    assert len(plain) > 10
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain, resumable, strict=True))


def test_rope_of_documents_computes_no_frequencies(monkeypatch) -> None:
    """The copy of the frequencies to a GPU would make the host wait in every micro-batch."""
    model = build_model(tiny()).double()
    model.set_positions(torch.arange(16))
    monkeypatch.setattr("moefold.model.rope.rope_frequencies", None)
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([[0] * 5 + [5] * 11, [0] * 16])
    assert model(tokens, document_starts=starts).shape == (16, 2, 32)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_projections_without_a_slice_record_none(qkv_bias) -> None:
    attention = build_model(tiny(model={"attention.qkv_bias": qkv_bias})).double().layers["0"].attention
    for weight, bias in ((attention.wq, attention.bq), (attention.wk, attention.bk)):
        shards = attention.shard_of(weight, bias, slice(None), torch.float64)
        assert all(shard is given for shard, given in zip(shards, (weight, bias), strict=True))
        part, _ = attention.shard_of(weight, bias, slice(1, 3), torch.float64)
        assert torch.equal(part, weight[1:3])


def test_a_stage_that_would_lose_a_routed_output_does_not_run() -> None:
    """Recipes with such a stage are refused; a program may build one."""
    sizes = {"layers": 4, "layers.ffn": "moe, dense", "ffn.moe.shortcut": True}
    cfg = tiny(model=sizes | {"ffn.moe.shared.intermediate_size": 16})
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    for num_layers in (2, 3):
        stage = Transformer(cfg.model, module_settings(cfg), range(num_layers), is_first=True, is_last=False).double()
        stage.set_positions(torch.arange(16))
        with pytest.raises(AssertionError, match="does not end") if num_layers == 3 else nullcontext():
            assert stage(tokens).shape == (16, 2, 16)
