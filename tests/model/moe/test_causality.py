"""Which rules of routing let a token depend on later ones: the table of docs/formulas.md, "What looks ahead"."""

import pytest
import torch

from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.layer import MoELayer
from tests.model.moe.layers import moe_layer
from tests.model.moe.reference import make_weights
from tests.models import model_of

SIZES = {"hidden_size": 6, "ffn.moe.num_experts": 4, "ffn.moe.top_k": 2, "ffn.moe.intermediate_size": 8}
S, B = 12, 2
TRIES = 12
"""Change the last tokens, so that a rule that may look ahead does."""

DROPS = {"capacity_factor": 0.8}
RULES: dict[str, tuple[dict[str, object], dict[str, object], bool, bool]] = {
    "top-k": ({}, {}, True, True),
    "sigmoid in groups with bias": (
        {
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            "ffn.moe.router.num_groups": 2,
            "ffn.moe.router.top_groups": 1,
        },
        {},
        True,
        True,
    ),
    "losses": ({}, {"aux_loss": 1.0, "z_loss": 1.0}, True, True),
    "round robin": ({}, {"choice": "round_robin"}, True, True),
    "skewed": ({}, {"choice": "skewed"}, True, True),
    "jitter": ({}, {"input_jitter": 0.2}, True, True),
    "sinkhorn": ({}, {"choice": "sinkhorn"}, False, True),
    "quantile": ({"ffn.moe.router.expert_bias": True}, {"choice": "quantile"}, False, True),
    "probs": ({}, DROPS, False, False),
    "probs, sub-sequence": ({}, DROPS | {"drop_scope": "sub_sequence"}, False, False),
    "probs, dropless evaluation": ({}, DROPS | {"eval_capacity_factor": 0.0}, False, True),
    "position": ({}, DROPS | {"drop_policy": "position"}, True, True),
    "position, sub-sequence": ({}, DROPS | {"drop_policy": "position", "drop_scope": "sub_sequence"}, True, True),
}
"""Settings of the model and of its routing, and whether earlier tokens ignore later ones at training and evaluation."""


def _looks_ahead(layer: MoELayer) -> bool:
    """Return whether another last position changes the output at any position before it."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(S, B, 6, dtype=torch.float64, generator=generator)
    y = layer(x).y
    for _ in range(TRIES):
        other = x.clone()
        other[-1] = 3 * torch.randn(B, 6, dtype=torch.float64, generator=generator)
        if not torch.allclose(layer(other).y[:-1], y[:-1], rtol=1e-10, atol=1e-12):
            return True
    return False


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_looks_ahead_where_it_is_said_to_and_nowhere_else(rule):
    changes, moe, trains_causally, evaluates_causally = RULES[rule]
    model = model_of(SIZES | changes)
    layer = moe_layer(model, MoEConfig(**{"aux_loss": 0.0} | moe), loss_scale=1.0).double()
    layer.load_state_dict(make_weights(model), strict=False)
    found = {}
    for is_training in (True, False):
        layer.train(is_training)
        with torch.no_grad():
            found[is_training] = not _looks_ahead(layer)
    assert found == {True: trains_causally, False: evaluates_causally}
