"""What a forward pass keeps falls as the formula of each part says, within a tenth."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moefold.config.schema import Config, ModelConfig, RunConfig, TrainConfig
from moefold.model.recall import all_kept, recalled
from moefold.model.transformer import build_model
from moefold.parallel.recompute import apply_recompute

H, A, G, D, F, FE, FS, E, K, V, T = 64, 4, 2, 16, 160, 96, 80, 4, 2, 8, 128
GQA = ModelConfig(
    num_layers=2, layer_pattern="DM", hidden_size=H, num_attention_heads=A, num_query_groups=G, head_dim=D,
    ffn_hidden_size=F, moe_ffn_hidden_size=FE, shared_expert_ffn_hidden_size=FS, num_experts=E, top_k=K, vocab_size=V,
)  # fmt: skip
LATENT = ModelConfig(
    num_layers=2, layer_pattern="DM", hidden_size=H, num_attention_heads=A, attention="mla", q_lora_rank=24,
    kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=16, ffn_hidden_size=F, moe_ffn_hidden_size=FE,
    num_experts=E, top_k=K, vocab_size=V,
)  # fmt: skip
DENSE, SHARED, MOE = 4 * F, 4 * FS, K * (2 * H + 2 * FE)
"""Numbers that a token keeps: gate, its SiLU, up and their product; the same; rows, their results, two projections."""


def _kept_numbers(model: ModelConfig, parts: tuple[str, ...]) -> float:
    """Numbers in memory between the passes, those of parameters left out, for each token."""
    cfg = Config(run=RunConfig(dtype="float64"), model=model, train=TrainConfig(seq_len=T, recompute=parts))
    module = build_model(cfg).double()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module.place(torch.arange(T))
    apply_recompute(module, parts)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    own |= {t.untyped_storage().data_ptr() for t in vars(module.rotation).values() if isinstance(t, Tensor)}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens = torch.randint(V, (1, T))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(tokens, labels=tokens, weights=torch.ones(1, T))
    loss.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    return sum(sizes.values()) / 8 / T


@pytest.mark.parametrize(
    ("part", "formula"),
    [
        # The normalised hidden state and the weighted one, of two norms in each of two layers.
        ("norms", 2 * 2 * 2 * H),
        ("core_attention", 2 * (A * D + A)),
        ("dense_mlp", DENSE),
        ("expert_activation", K * 2 * FE),
        ("shared_experts", SHARED),
        ("moe", MOE + SHARED),
    ],
)
def test_each_part_saves_what_its_formula_says(part, formula):
    saved = _kept_numbers(GQA, ()) - _kept_numbers(GQA, (part,))
    assert saved == pytest.approx(formula, rel=0.1)


def test_the_heads_of_latent_attention_are_not_kept():
    saved = _kept_numbers(LATENT, ()) - _kept_numbers(LATENT, ("mla_up",))
    assert saved == pytest.approx(2 * 3 * A * 16, rel=0.1)


def test_a_layer_that_runs_again_keeps_its_input():
    # The inputs of two layers; behind the last, the norm and the loss keep what they always keep.
    head = _kept_numbers(ModelConfig(**{**_fields(GQA), "num_layers": 1, "layer_pattern": "D"}), ("layer",)) - H
    assert _kept_numbers(GQA, ("layer",)) - head == pytest.approx(2 * H, rel=0.1)


def _fields(model: ModelConfig) -> dict[str, object]:
    return {name: getattr(model, name) for name in ModelConfig.__dataclass_fields__}


def _double(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, x + w


def test_recalled_results_are_made_again_once_and_give_the_gradients():
    calls = []

    def counted(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return _double(x, w)

    found = []
    for recall in (all_kept, recalled):
        x, w = (torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3) * k for k in (1, 3))
        x.requires_grad_()
        w.requires_grad_()
        with recall(counted, x, w) as (product, total):
            y = (product * total).t() @ total.flatten()[2:4] + product.sum()
        y.square().sum().backward()
        found.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(calls) == 1 + 2


def test_nothing_is_made_again_without_gradients():
    x = torch.ones(3)
    with torch.no_grad(), recalled(_double, x.requires_grad_(), x) as results:
        assert not any(result.requires_grad for result in results)
