"""DeepSeek-V2, DeepSeek-V3 and OLMoE against transformers: logits and gradients of random small models of odd sizes."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefold.config.schema import Config
from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from tests.models import config_of

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")

SEQ_LEN, VOCAB = 23, 61
COMMON = {"vocab_size": VOCAB, "use_cache": False, "tie_word_embeddings": False, "max_position_embeddings": 64}
COMMON |= {"attn_implementation": "eager", "experts_implementation": "eager", "rms_norm_eps": 1e-6}
# The row of a padding token would get no gradient.
COMMON |= {"pad_token_id": None}
Sizes = dict[str, Any]


def _rope(rng: random.Random, stretches: bool) -> tuple[Sizes, Sizes]:
    """The same rotation in our words and in theirs."""
    theta = rng.uniform(50.0, 5000.0)
    if not stretches:
        return {"rope.theta": theta}, {"rope_type": "default", "rope_theta": theta}
    theirs = {"rope_type": "yarn", "rope_theta": theta, "factor": rng.uniform(2.0, 40.0), "beta_fast": 3.0}
    theirs |= {"beta_slow": 0.7, "original_max_position_embeddings": 16}
    ours = {"rope.theta": theta, "rope.scaling": "yarn", "rope.scaling.factor": theirs["factor"]}
    ours |= {"rope.scaling.beta_fast": 3.0, "rope.scaling.beta_slow": 0.7, "rope.scaling.original_seq_len": 16}
    if rng.random() < 0.7:
        mscales = {"mscale": rng.uniform(0.3, 1.0), "mscale_all_dim": rng.uniform(0.3, 1.5)}
        theirs |= mscales
        ours |= {f"rope.scaling.{key}": value for key, value in mscales.items()}
    return ours, theirs


def _latent(rng: random.Random) -> tuple[Sizes, Sizes]:
    """Latent attention and experts of DeepSeek, as far as V2 and V3 agree."""
    stretched = _rope(rng, stretches=rng.random() < 0.7)
    heads, num_layers = rng.choice([1, 3, 5]), rng.choice([2, 3])
    dense = rng.randint(0, num_layers - 1)
    shared = rng.choice([1, 2])
    widths = {"kv_lora_rank": rng.choice([5, 11]), "q_lora_rank": rng.choice([0, 7])}
    widths |= {"qk_nope_head_dim": rng.choice([3, 7]), "qk_rope_head_dim": rng.choice([2, 6])}
    widths |= {"v_head_dim": rng.choice([4, 5, 16])}
    ours = {"layers": num_layers, "hidden_size": heads * 9, "attention.num_heads": heads, "attention": "mla"}
    ours |= {"layers.ffn": f"{dense} dense, {num_layers - dense} moe" if dense else "moe", "rope.interleaved": True}
    ours |= {
        "ffn.moe.intermediate_size": 13,
        "ffn.moe.shared.intermediate_size": 13 * shared,
        "ffn.dense.intermediate_size": 19,
    }
    theirs = {"num_hidden_layers": num_layers, "hidden_size": heads * 9, "num_attention_heads": heads}
    theirs |= {"num_key_value_heads": heads, "first_k_dense_replace": dense, "rope_parameters": stretched[1]}
    theirs |= {"moe_intermediate_size": 13, "n_shared_experts": shared, "intermediate_size": 19}
    theirs |= widths | {"q_lora_rank": widths["q_lora_rank"] or None}
    return ours | {f"attention.{name}": width for name, width in widths.items()} | stretched[0], theirs


def _deepseek_v2(rng: random.Random) -> tuple[Sizes, Sizes]:
    ours, theirs = _latent(rng)
    has_groups, factor = rng.random() < 0.6, rng.choice([1.0, 3.7])
    ours |= {
        "ffn.moe.num_experts": 12,
        "ffn.moe.top_k": 3,
        "ffn.moe.router.softmax": "pre",
        "ffn.moe.router.scaling_factor": factor,
    }
    theirs |= {"n_routed_experts": 12, "num_experts_per_tok": 3, "routed_scaling_factor": factor}
    if has_groups:
        ours |= {"ffn.moe.router.num_groups": 4, "ffn.moe.router.top_groups": 2}
        theirs |= {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    return ours, theirs


def _deepseek_v3(rng: random.Random) -> tuple[Sizes, Sizes]:
    ours, theirs = _latent(rng)
    groups, normalizes, interleaves = rng.choice([1, 3]), rng.random() < 0.5, rng.random() < 0.5
    ours |= {
        "ffn.moe.num_experts": 12,
        "ffn.moe.top_k": 3,
        "ffn.moe.router": "sigmoid",
        "ffn.moe.router.scaling_factor": 2.5,
    }
    ours |= {
        "ffn.moe.router.normalize": normalizes,
        "ffn.moe.router.expert_bias": True,
        "rope.interleaved": interleaves,
    }
    theirs |= {"n_routed_experts": 12, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "n_group": groups}
    theirs |= {"norm_topk_prob": normalizes, "topk_group": min(groups, 2), "rope_interleave": interleaves}
    if groups > 1:
        ours |= {"ffn.moe.router.num_groups": groups, "ffn.moe.router.top_groups": 2}
    return ours, theirs


def _olmoe(rng: random.Random) -> tuple[Sizes, Sizes]:
    groups, share = rng.choice([1, 3]), rng.choice([1, 2])
    heads, normalizes = groups * share, rng.random() < 0.5
    stretched = _rope(rng, stretches=False)
    ours = {"layers": 2, "hidden_size": heads * 10, "attention.num_heads": heads, "attention.num_kv_heads": groups}
    ours |= {
        "ffn.moe.num_experts": 7,
        "ffn.moe.top_k": 3,
        "ffn.moe.intermediate_size": 11,
        "attention.qk_norm": {},
        "attention.qk_norm.over": "all_heads",
    }
    ours |= {"ffn.moe.router.softmax": "post" if normalizes else "pre"}
    theirs = {"num_hidden_layers": 2, "hidden_size": heads * 10, "num_attention_heads": heads}
    theirs |= {"num_key_value_heads": groups, "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 11}
    theirs |= {"norm_topk_prob": normalizes, "rope_parameters": stretched[1]}
    return ours | stretched[0], theirs


FAMILIES = {"DeepseekV2": _deepseek_v2, "DeepseekV3": _deepseek_v3, "Olmoe": _olmoe}


def ours_of(model: Sizes, seed: int) -> tuple[Config, Transformer]:
    """A model in float64 with random norms and expert biases."""
    sections = {"run": {"dtype": "float64", "seed": seed}, "model": {"vocab_size": VOCAB, "init_std": 0.3} | model}
    sections["moe"] = {"aux_loss": 0.0}
    sections["train"] = {"seq_len": SEQ_LEN, "global_batch_size": 2, "micro_batch_size": 2}
    cfg = config_of(sections)
    ours = build_model(cfg).double()
    init_weights(ours, cfg.model, cfg.run.seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for buffer in ours.buffers():
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    ours.set_positions(torch.arange(cfg.train.seq_len))
    return cfg, ours.eval()


RENAMED = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attention.query_norm.weight",
    "self_attn.k_norm.weight": "attention.key_norm.weight",
    "self_attn.q_a_proj.weight": "attention.wq_down",
    "self_attn.q_a_layernorm.weight": "attention.query_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_up",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_down",
    "self_attn.kv_a_layernorm.weight": "attention.key_value_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_up",
    **{f"self_attn.{letter}_proj.weight": f"attention.w{letter}" for letter in "qkvo"},
    "mlp.gate.weight": "ffn.router.weight",
    "mlp.gate.e_score_correction_bias": "ffn.router.expert_bias",
    **{f"mlp.{kind}_proj.weight": f"ffn.w_{kind}" for kind in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{kind}_proj.weight": f"ffn.shared.w_{kind}" for kind in ("gate", "up", "down")},
}


def block_tensor(rest: str, prefix: str, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a name inside a layer of transformers; fails on a name that nothing answers."""
    if rest == "mlp.experts.gate_up_proj":
        return torch.cat([weights[f"{prefix}ffn.experts.w_{kind}"].mT for kind in ("gate", "up")], dim=1)
    if rest == "mlp.experts.down_proj":
        return weights[f"{prefix}ffn.experts.w_down"].mT
    return weights[prefix + RENAMED[rest]]


def their_tensor(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a name of transformers."""
    whole = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "head.norm.weight"}
    whole["lm_head.weight"] = "head.weight"
    if name in whole:
        return weights[whole[name]]
    _, _, layer, rest = name.split(".", 3)
    return block_tensor(rest, f"layers.{layer}.", weights)


def theirs_of(kind: str, sizes: Sizes, ours: Transformer) -> nn.Module:
    """The same model with the same weights as transformers computes it, in float64."""
    config = getattr(transformers, f"{kind}Config")(**COMMON | sizes)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    weights = dict(ours.named_parameters()) | dict(ours.named_buffers())
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            tensor.copy_(their_tensor(name, weights))
        for name, tensor in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(their_tensor(name, weights))
    return theirs


def random_tokens(seed: int) -> Tensor:
    """Two samples with one token more than they have positions."""
    return torch.randint(VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_gradients_equal_transformers(kind, seed):
    model, sizes = FAMILIES[kind](random.Random(seed))
    _, ours = ours_of(model, seed)
    theirs = theirs_of(kind, sizes, ours)
    tokens = random_tokens(seed)
    logits = ours(tokens[:, :-1]).transpose(0, 1)
    expected = theirs(input_ids=tokens[:, :-1]).logits
    # transformers rounds norms, routing weights and rotary tables to float32 even in float64.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            mine = their_tensor(name, gradients)
            assert float((mine - parameter.grad).abs().max()) <= 1e-4 * float(parameter.grad.abs().max()), name


@pytest.mark.parametrize("seed", range(2))
def test_multi_token_prediction_equals_transformers(seed):
    """The loss of two further tokens, and its gradients, through the layers that transformers drafts tokens with."""
    from transformers.modeling_layers import MtpModel

    model, sizes = _deepseek_v3(random.Random(seed))
    cfg, ours = ours_of(model | {"mtp_layers": 2}, seed)
    theirs = theirs_of("DeepseekV3", sizes | {"num_mtp_layers": 2}, ours)
    further = MtpModel(theirs, 2).double().eval()
    weights = dict(ours.named_parameters()) | dict(ours.named_buffers())
    with torch.no_grad():
        for name, tensor in (*further.layers.named_parameters(), *further.layers.named_buffers()):
            tensor.copy_(_further_tensor(name, cfg.model.num_layers, weights))
    tokens = random_tokens(seed)
    ahead = torch.stack([torch.nn.functional.pad(tokens[:, 1 + depth :], (0, depth)) for depth in (1, 2)], 1)
    shares = torch.zeros(2, 2, SEQ_LEN, dtype=torch.float64)
    for depth in (1, 2):
        shares[:, depth - 1, : SEQ_LEN - depth] = 1 / (2 * (SEQ_LEN - depth))
    ours.train()
    targets = {"labels": tokens[:, 1:], "weights": torch.full((2, SEQ_LEN), 0.0)}
    mine = ours(tokens[:, :-1], **targets, mtp_labels=ahead, mtp_weights=shares)[1]
    hidden = theirs.model(input_ids=tokens[:, :-1]).last_hidden_state
    expected, read = 0.0, tokens[:, 1:]
    for depth in (1, 2):
        hidden = further.forward_layer(depth - 1, hidden, torch.arange(SEQ_LEN)[None], None, input_ids=read)
        read = ahead[:, depth - 1]
        logits = theirs.lm_head(hidden)[:, : SEQ_LEN - depth]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, depth + 1 :].flatten())
        expected = expected + 0.3 / 2 * loss
    assert mine.item() == pytest.approx(expected.item(), rel=1e-6)
    mine.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    named = [(their_tensor(name, gradients), p, name) for name, p in theirs.named_parameters() if p.grad is not None]
    for name, p in further.layers.named_parameters():
        named += [(_further_tensor(name, cfg.model.num_layers, gradients), p, name)] if p.grad is not None else []
    for given, parameter, name in named:
        assert float((given - parameter.grad).abs().max()) <= 1e-4 * float(parameter.grad.abs().max()), name
    assert len(named) > 20


def _further_tensor(name: str, num_layers: int, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a name inside the layers of MtpModel."""
    layer, rest = name.split(".", 1)
    prefix = f"layers.{num_layers + int(layer)}."
    own = {"enorm.weight": "embedding_norm.weight", "hnorm.weight": "hidden_norm.weight"}
    own |= {"eh_proj.weight": "projection", "post_norm.weight": "output_norm.weight"}
    if rest in own:
        return weights[prefix + own[rest]]
    return block_tensor(rest.removeprefix("mtp_block."), prefix, weights)
