"""The seam of recorded and replayed choices, on one rank."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moefold.config.sections.moe import MoEConfig
from moefold.model.kernels import TORCH_KERNELS
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router_replay import ReplayedRouting
from moefold.model.moe.token_group import TokenColumns
from moefold.ops.triton.router import RouterOutput
from tests.model.moe.layers import moe_layer
from tests.model.moe.reference import make_weights
from tests.models import edit_model, model_of

MODEL = model_of({"hidden_size": 6, "ffn.moe.num_experts": 8, "ffn.moe.top_k": 2, "ffn.moe.intermediate_size": 8})
S, B, N = 4, 2, 6


def _layer(**model: object) -> MoELayer:
    cfg = edit_model(MODEL, model)
    layer = moe_layer(cfg, MoEConfig(aux_loss=0.1), loss_scale=1.0).double()
    layer.load_state_dict(make_weights(MODEL), strict=False)
    return layer


def _x(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, B, MODEL.hidden_size, dtype=torch.float64, generator=generator, requires_grad=True)


def _other_choices() -> torch.Tensor:
    """Two experts for each token of N samples that no router would choose, [N, S, K]."""
    places = torch.arange(N * S).view(N, S, 1)
    return ((places + torch.tensor([0, 3])) % MODEL.ffn.moe.num_experts).to(torch.uint8)


def test_choices_are_kept_by_sample_and_position():
    layer = _layer()
    kept = torch.full((N, S, 2), 99, dtype=torch.uint8)
    layer.router.override = ReplayedRouting(first_sample=10, recorded_NSK=kept)
    x = _x(1)
    layer(x, TokenColumns(torch.tensor([14, 11])))
    ids_SBE = (x @ layer.router.weight.T).topk(2).indices
    assert torch.equal(kept[4].long(), ids_SBE[:, 0])
    assert torch.equal(kept[1].long(), ids_SBE[:, 1])
    assert (kept[[0, 2, 3, 5]] == 99).all()


def test_settling_replaces_first_and_keeps_used_kernels():
    given, kept = _other_choices(), torch.zeros(N, S, 2, dtype=torch.int16)
    choices = ReplayedRouting(0, given, kept)
    used = choices.apply(torch.zeros(S * B, 2, dtype=torch.int64), torch.tensor([5, 2]))
    assert used.dtype == torch.int64
    assert torch.equal(used.view(S, B, 2)[:, 0], given[5].long())
    assert torch.equal(used.view(S, B, 2)[:, 1], given[2].long())
    assert torch.equal(kept[[5, 2]].long(), given[[5, 2]].long())


@pytest.mark.parametrize(
    "model",
    [{}, {"ffn.moe.router.softmax": "pre"}, {"ffn.moe.router": "sigmoid"}, {"ffn.moe.router": "sqrtsoftplus"}],
)
def test_replayed_experts_get_the_weights_of_the_live_scores(model):
    layer, x = _layer(**model), _x(2)
    layer.router.override = ReplayedRouting(0, replayed_NSK=_other_choices())
    ids_SBK = _other_choices()[[3, 0]].transpose(0, 1).long()
    logits = (x @ layer.router.weight.T).gather(-1, ids_SBK)
    match model:
        case {"ffn.moe.router.softmax": "pre"}:
            weights = (x @ layer.router.weight.T).softmax(-1).gather(-1, ids_SBK)
        case {"ffn.moe.router": "sigmoid"}:
            weights = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        case {"ffn.moe.router": "sqrtsoftplus"}:
            roots = (1 + logits.exp()).log().sqrt()
            weights = roots / roots.sum(-1, keepdim=True)
        case _:
            weights = logits.softmax(-1)
    experts = layer.experts
    hidden = torch.nn.functional.silu(torch.einsum("sbh,ehf->sbef", x, experts.w_gate))
    hidden = hidden * torch.einsum("sbh,ehf->sbef", x, experts.w_up)
    outputs = torch.einsum("sbef,efh->sbeh", hidden, experts.w_down)
    chosen = outputs.gather(2, ids_SBK[..., None].expand(-1, -1, -1, MODEL.hidden_size))
    expected = (chosen * weights[..., None]).sum(2)
    layer.losses.aux_coefficient = 0.0
    y = layer(x, TokenColumns(torch.tensor([3, 0]))).y
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, *layer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(y.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_counts_are_of_the_replayed_choices():
    layer = _layer()
    layer.router.override = ReplayedRouting(
        0, replayed_NSK=torch.full((N, S, 2), 1, dtype=torch.uint8) + torch.tensor([0, 4])
    )
    layer(_x(3), TokenColumns(torch.tensor([0, 1]))).y.sum().backward()
    assert layer.stats.tokens_per_expert_E.tolist() == [0, S * B, 0, 0, 0, S * B, 0, 0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_after_other_micro_batches_finds_the_same_choices(use_reentrant):
    def gradients(recomputes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        layer, kept = _layer(), torch.zeros(N, S, 2, dtype=torch.uint8)
        layer.router.override = ReplayedRouting(0, _other_choices(), kept)
        outputs = []
        for i in range(3):
            samples = torch.tensor([2 * i, 2 * i + 1])
            x = _x(i)
            outputs.append(
                checkpoint(layer, x, TokenColumns(samples), use_reentrant=use_reentrant)
                if recomputes
                else layer(x, TokenColumns(samples))
            )
        for y, _ in outputs:
            y.square().sum().backward()
        assert layer.router.weight.grad is not None
        return layer.router.weight.grad, kept

    plain, recomputed = gradients(False), gradients(True)
    torch.testing.assert_close(recomputed[0], plain[0], rtol=1e-12, atol=1e-14)
    assert torch.equal(recomputed[1], plain[1])
    assert torch.equal(plain[1], _other_choices())


def test_evaluation_does_not_record_and_does_not_replay():
    layer, x = _layer(), _x(4)
    expected = layer.eval()(x).y
    kept = torch.full((N, S, 2), 99, dtype=torch.uint8)
    layer.router.override = ReplayedRouting(0, _other_choices(), kept)
    assert torch.equal(layer(x, TokenColumns(torch.tensor([0, 1]))).y, expected)
    assert (kept == 99).all()


def test_the_router_chooses_where_nothing_is_replayed():
    """Padding of packed rollouts, and their last tokens."""
    layer, x = _layer(), _x(5)
    is_replayed = torch.arange(N * S).view(N, S) % 3 == 0
    kept = torch.zeros(N, S, 2, dtype=torch.uint8)
    layer.router.override = ReplayedRouting(0, _other_choices(), kept, is_replayed)
    layer(x, TokenColumns(torch.tensor([4, 1])))
    own_SBE = (x @ layer.router.weight.T).topk(2).indices
    for column, sample in enumerate((4, 1)):
        expected = torch.where(is_replayed[sample, :, None], _other_choices()[sample], own_SBE[:, column])
        assert torch.equal(kept[sample].long(), expected)
        assert is_replayed[sample].any()
        assert not is_replayed[sample].all()


def test_log_probabilities_in_evaluation_may_replay_too():
    layer, x = _layer().eval(), _x(6)
    samples = torch.tensor([3, 2])
    own = layer(x, TokenColumns(samples)).y
    layer.router.override = ReplayedRouting(0, _other_choices(), in_evaluation=True)
    replayed = layer(x, TokenColumns(samples)).y
    layer.router.override.in_evaluation = False
    assert torch.equal(layer(x, TokenColumns(samples)).y, own)
    assert not torch.equal(replayed, own)


def test_the_fused_kernel_does_not_run_on_replayed_choices():
    """It chooses by itself, so a replay would be ignored."""
    layer, x = _layer().float(), _x(7).float()

    def fused(logits_TE: torch.Tensor, bias_E: torch.Tensor | None) -> RouterOutput:
        raise NotImplementedError("the fused kernel")

    layer.router.kernels = replace(TORCH_KERNELS, router=fused)
    with pytest.raises(NotImplementedError, match="the fused kernel"):
        layer(x, TokenColumns(torch.tensor([0, 1])))
    layer.router.override = ReplayedRouting(0, _other_choices(), kept := torch.zeros(N, S, 2, dtype=torch.uint8))
    layer(x, TokenColumns(torch.tensor([0, 1])))
    assert torch.equal(kept[:2], _other_choices()[:2])
    # Without a replay in evaluation, the kernel runs there.
    with pytest.raises(NotImplementedError, match="the fused kernel"):
        layer.eval()(x, TokenColumns(torch.tensor([0, 1])))
