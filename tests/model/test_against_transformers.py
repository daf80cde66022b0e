"""The maths against another implementation of the same families: logits and gradients of transformers."""

from typing import Any

import pytest
import torch

from moefold.config.schema import Config
from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from tests.model.transformers_families import FAMILIES, SHARED, SIZES, their_tensor
from tests.models import config_of

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")


def _ours(model: dict[str, Any]) -> tuple[Config, Transformer]:
    sections = {"run": {"dtype": "float64", "seed": 5}, "model": SIZES | model, "train": {"global_batch_size": 2}}
    sections["train"] = {"seq_len": 24, "global_batch_size": 2, "micro_batch_size": 2}
    cfg = config_of(sections)
    ours = build_model(cfg).double()
    init_weights(ours, cfg.model, cfg.run.seed)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name or name.endswith(("bq", "bk", "bv")):
                generator = torch.Generator().manual_seed(len(name))
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    ours.set_positions(torch.arange(cfg.train.seq_len))
    return cfg, ours.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family):
    model, class_name, sizes = FAMILIES[family]
    cfg, ours = _ours(model)
    config = getattr(transformers, f"{class_name}Config")(**SHARED | sizes)
    theirs = getattr(transformers, f"{class_name}ForCausalLM")(config).double().eval()
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(their_tensor(name, weights))
    tokens = torch.randint(64, (2, 25), generator=torch.Generator().manual_seed(1))
    logits = ours(tokens[:, :-1]).transpose(0, 1)
    expected = theirs(input_ids=tokens[:, :-1]).logits
    # transformers rounds routing weights and rotary tables to float32 even in float64.
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    for name, parameter in theirs.named_parameters():
        mine = their_tensor(name, gradients)
        scale = float(parameter.grad.abs().max())
        assert float((mine - parameter.grad).abs().max()) <= 1e-4 * scale, name
