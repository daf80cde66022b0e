"""The plain forward pass of a stage and the resumable one compute the same."""

import pytest
import torch
from torch import Tensor

from moefold.api import build_model
from moefold.comm.resumable import run_to_end
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
