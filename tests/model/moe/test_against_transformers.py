"""The router against the routers of transformers on random tokens: the same experts, the same weights."""

from typing import Any

import pytest
import torch

from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.token_group import MicroBatchGroup, TokenPositions
from tests.model.moe.layers import moe_router
from tests.models import model_of

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")

H, T = 48, 4096


def _mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    config = MixtralConfig(hidden_size=H, num_local_experts=8, num_experts_per_tok=2)
    return MixtralTopKRouter(config), {"ffn.moe.num_experts": 8, "ffn.moe.top_k": 2}


def _qwen3(normalises: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=H, num_experts=128, num_experts_per_tok=8, norm_topk_prob=normalises)
    model = {"ffn.moe.num_experts": 128, "ffn.moe.top_k": 8, "ffn.moe.router.softmax": "post" if normalises else "pre"}
    return Qwen3MoeTopKRouter(config), model


def _deepseek(num_groups: int, top_groups: int, normalises: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=64,
        num_experts_per_tok=8,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=normalises,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.2)
    model = {
        "ffn.moe.num_experts": 64,
        "ffn.moe.top_k": 8,
        "ffn.moe.router": "sigmoid",
        "ffn.moe.router.normalize": normalises,
        "ffn.moe.router.scaling_factor": 2.5,
        "ffn.moe.router.expert_bias": True,
        "ffn.moe.router.num_groups": num_groups,
        "ffn.moe.router.top_groups": top_groups,
    }
    return router, model


ROUTERS = {
    "mixtral": _mixtral,
    "qwen3-moe": lambda: _qwen3(True),
    "qwen3-moe without normalisation": lambda: _qwen3(False),
    "deepseek-v3": lambda: _deepseek(8, 4, True),
    "deepseek-v3 without groups and normalisation": lambda: _deepseek(1, 1, False),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_same_experts_and_weights_as_transformers(name):
    torch.manual_seed(0)
    theirs, sizes = ROUTERS[name]()
    torch.nn.init.normal_(theirs.weight, std=0.2)
    ours = moe_router(model_of({"hidden_size": H, **sizes}), MoEConfig())
    ours.weight.data = theirs.weight.data.clone()
    if ours.expert_bias is not None:
        ours.expert_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(T, H)
    routing = ours(x, TokenPositions(MicroBatchGroup(), T, torch.arange(1)))
    logits, weights, ids = theirs(x)
    torch.testing.assert_close(routing.logits_TE, logits, rtol=0, atol=1e-5)
    # transformers leaves the order of a token's experts open: both go by their number.
    ids, order = ids.sort(1)
    my_ids, my_order = routing.ids_TK.sort(1)
    assert torch.equal(my_ids, ids)
    torch.testing.assert_close(routing.probs_TK.gather(1, my_order), weights.gather(1, order), rtol=0, atol=1e-6)
