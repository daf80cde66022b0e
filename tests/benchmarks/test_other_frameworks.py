"""A peer's layer gives the same numbers as ours, or does not compete and says why."""

from dataclasses import replace

import pytest
import torch

from benchmarks.race import other_frameworks
from benchmarks.race.other_frameworks import PEERS, Peer, PeerUnavailableError, build_peer_layer, unavailable_reason
from moefold.model.mlp import SwiGLU
from moefold.recipe import load_config
from tests.bench.small_sizes import SIZES
from tests.model.moe.layers import moe_layer
from tests.models import edit_model

CPU = torch.device("cpu")
MEGATRON, TORCHTITAN = PEERS
KINDS = {
    "mixtral": [],
    "scaled": ["model.ffn.moe.router.scaling_factor=2.5"],
    "qwen2": [
        "model.ffn.moe.router.softmax=pre",
        "model.ffn.moe.shared.intermediate_size=40",
        "model.ffn.moe.shared.gate=true",
    ],
    "sigmoid": ["model.ffn.moe.router=sigmoid", "model.ffn.moe.router.normalize=true"],
    "plain sigmoid": ["model.ffn.moe.router=sigmoid", "model.ffn.moe.router.normalize=false"],
    "deepseek": [
        "model.ffn.moe.router=sigmoid",
        "model.ffn.moe.router.normalize=true",
        "model.ffn.moe.router.scaling_factor=2.5",
        "model.ffn.moe.router.num_groups=4",
        "model.ffn.moe.router.top_groups=2",
        "model.ffn.moe.router.expert_bias=true",
        "model.ffn.moe.shared.intermediate_size=24",
    ],
}
CASES = [(MEGATRON, "float64", kind) for kind in ("mixtral", "scaled", "qwen2", "sigmoid")]
CASES += [(TORCHTITAN, "bfloat16", kind) for kind in KINDS]
REFUSED = [
    (MEGATRON, "float32", ["model.ffn.moe.router.expert_bias=true"], "expert bias needs CUDA"),
    (MEGATRON, "float32", ["model.ffn.moe.router.num_groups=2"], "group-limited"),
    (MEGATRON, "float32", KINDS["plain sigmoid"], "always normalised"),
    (MEGATRON, "float32", ["model.ffn.moe.top_k=1"], "single chosen expert"),
    (TORCHTITAN, "float32", [], "bfloat16 only"),
    (TORCHTITAN, "bfloat16", ["model.ffn.moe.router.num_groups=2"], "two best experts"),
    *[(peer, "bfloat16", ["model.ffn.moe.router=sqrtsoftplus"], "sqrtsoftplus") for peer in PEERS],
    *[(peer, "bfloat16", ["model.ffn.moe.bias=true"], "without biases") for peer in PEERS],
]


def config(words, dtype="float64"):
    # A balance loss is not raced.
    return load_config(None, [*SIZES, f"run.dtype={dtype}", "moe.aux_loss=0", *words])


def our_layer(cfg, dtype):
    """A layer whose every number matters, the bias of the choice included. Its router is float32 or wider."""
    model, generator = cfg.model, torch.Generator().manual_seed(5)
    inner = model.ffn.moe.shared_width
    shared = SwiGLU(model.hidden_size, inner) if inner else None
    layer = moe_layer(model, cfg.moe, loss_scale=1.0, shared=shared).to(dtype)
    layer.router.to(torch.promote_types(dtype, torch.float32))
    with torch.no_grad():
        for tensor in [*layer.parameters(), layer.router.expert_bias]:
            if tensor is not None:
                tensor.normal_(0.0, 0.3, generator=generator)
    states = torch.randn(2, 16, 2, model.hidden_size, generator=generator, dtype=torch.float64)
    return layer, *states.to(dtype)


def gradients(layer, x, grad):
    """Result and gradient of the states after one pass over fresh gradients."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(grad)
    return y.detach(), leaf.grad


def by_our_names(peer, theirs):
    """The gradients of a peer's weights, in our shapes."""
    shared = theirs.shared_experts
    found = {}
    if peer is TORCHTITAN:
        inner = theirs.routed_experts.inner_experts
        found["router.weight"] = theirs.router.gate.weight.grad
        found["experts.w_gate"], found["experts.w_up"] = inner.w1_EFD.grad.mT, inner.w3_EFD.grad.mT
        found["experts.w_down"] = inner.w2_EDF.grad.mT
        if shared is not None:
            found["shared.w_gate"], found["shared.w_up"] = shared.w1.weight.grad, shared.w3.weight.grad
            found["shared.w_down"] = shared.w2.weight.grad
            found["shared_gate"] = shared.gate.weight.grad if hasattr(shared, "gate") else None
        return found
    outer, inner = (
        torch.stack([getattr(expert, name).weight.grad.mT for expert in theirs.experts.local_experts])
        for name in ("linear_fc1", "linear_fc2")
    )
    found["router.weight"], found["experts.w_down"] = theirs.router.weight.grad, inner
    found["experts.w_gate"], found["experts.w_up"] = outer.chunk(2, dim=2)
    if shared is not None:
        found["shared.w_gate"], found["shared.w_up"] = shared.linear_fc1.weight.grad.chunk(2)
        found["shared.w_down"], found["shared_gate"] = shared.linear_fc2.weight.grad, shared.gate_weight.grad
    return found


@pytest.mark.parametrize(("peer", "dtype", "kind"), CASES, ids=[f"{p.name}-{kind}" for p, _, kind in CASES])
def test_results_and_gradients_are_ours(group_of_one, peer, dtype, kind):
    pytest.importorskip(peer.module, reason=f"{peer.name} is not installed: pip install -e '.[peers]'")
    cfg = config(KINDS[kind], dtype)
    ours, x, grad = our_layer(cfg, getattr(torch, dtype))
    assert unavailable_reason(peer, cfg, "layer", CPU) == ""
    theirs = build_peer_layer(peer, ours, cfg, x)
    (y, x_grad), (y_theirs, x_grad_theirs) = gradients(ours, x, grad), gradients(theirs, x, grad)
    found = by_our_names(peer, theirs)
    pairs = {name: (p.grad, found[name]) for name, p in ours.named_parameters()}
    pairs |= {"result": (y, y_theirs), "states": (x_grad, x_grad_theirs)}
    # Their softmax is float32 even of float64; bfloat16 rounds each of several results to 8 bits.
    tolerance = 1e-6 if dtype == "float64" else 1e-2
    for name, (expected, value) in pairs.items():
        assert (value.double() - expected.double()).norm() <= tolerance * expected.double().norm(), name


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_other_maths_does_not_compete(group_of_one, peer):
    pytest.importorskip(peer.module, reason=f"{peer.name} is not installed: pip install -e '.[peers]'")
    cfg = config([], "bfloat16")
    ours, x, _ = our_layer(cfg, torch.bfloat16)
    other = replace(cfg, model=edit_model(cfg.model, {"ffn.moe.router.scaling_factor": 1.1}))
    with pytest.raises(PeerUnavailableError, match="failed: its results differ from ours by .*something else"):
        build_peer_layer(peer, ours, other, x)


@pytest.mark.parametrize(
    ("peer", "dtype", "words", "message"), REFUSED, ids=[f"{p.name}-{message}" for p, _, _, message in REFUSED]
)
def test_missing_features_of_a_peer_are_named(monkeypatch, peer, dtype, words, message):
    monkeypatch.setattr(other_frameworks, "_is_installed", lambda module: True)
    monkeypatch.setattr(other_frameworks, "which", lambda program: program)
    assert message in unavailable_reason(peer, config(words, dtype), "layer", CPU)


def test_where_a_peer_cannot_run(monkeypatch):
    monkeypatch.setattr(other_frameworks, "_is_installed", lambda module: True)
    cfg = config([], "bfloat16")
    monkeypatch.setattr(other_frameworks, "which", lambda program: None)
    assert "g++" in unavailable_reason(MEGATRON, cfg, "layer", CPU)
    assert "transformer-engine" in unavailable_reason(MEGATRON, cfg, "layer", torch.device("cuda"))
    assert unavailable_reason(TORCHTITAN, cfg, "layer", torch.device("cuda")) == ""
    for part in ("model", "stack"):
        assert "its MoE layer only" in unavailable_reason(TORCHTITAN, cfg, part, CPU)


def test_an_installed_version_that_fails_is_not_called_absent(tmp_path, monkeypatch):
    cfg = config([], "bfloat16")
    ours, x, _ = our_layer(cfg, torch.bfloat16)
    layers = {
        "builds_nothing": "def build(*_):\n    raise RuntimeError('no device\\nhere')",
        "runs_nothing": "def build(*_):\n    return lambda x: 1 / 0",
        "has_no_gradient": "def build(*_):\n    return lambda x: x",
    }
    reasons = ["No module named", "RuntimeError: no device$", "ZeroDivisionError: ", "does not require grad"]
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in layers.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name, reason in zip(["no_such_layer", *layers], reasons, strict=True):
        with pytest.raises(PeerUnavailableError, match=f"^failed: version 2.*{reason}"):
            build_peer_layer(Peer("torch", "torch", name, lambda *_: ""), ours, cfg, x)
