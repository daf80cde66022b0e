"""Bytes that a round of sites sends, counted parameter by parameter."""

from collections import Counter
from dataclasses import replace

from moefold.config.schema import Config
from moefold.config.sections.sites import SitesConfig
from moefold.cost.layer_spec import model_weights
from moefold.cost.shard_boxes import WeightSharding
from moefold.cost.site_traffic import PART_ELEMENTS, recipe_format, site_traffic
from moefold.topology.fragments import fragment_of, recipe_fragments
from moefold.validate.config import check_config
from tests.verify.recipes import tiny

MAPPINGS = [
    {},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 4, "pp": 2, "zero": 3},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 6},
    {"world_size": 4, "pp": 2, "schedule": "zbv", "virtual_stages": 2},
]
MODELS = {
    "a bias of experts, tied embeddings": {
        "ffn.moe.router.expert_bias": True,
        "ffn.moe.router": "sigmoid",
        "tie_embeddings": True,
    },
    "multi-token prediction": {"mtp_layers": 1},
}


def recipe(model: str, mapping: dict[str, object], **sites: object) -> Config:
    keys = {"aux_loss": 0.0, "bias_update_rate": 0.01} if "bias" in model else {}
    cfg = tiny(model=MODELS[model], moe=keys, train={"global_batch_size": 24}, **mapping)
    return replace(cfg, run=replace(cfg.run, steps=8), sites=SitesConfig(count=2, every=8, **sites))


def assert_bytes(model: str, keys: dict[str, object]) -> None:
    """A coded parameter takes whole blocks on each rank that has a part of it; a bias is sent by every rank."""
    num_checked = 0
    for mapping in MAPPINGS:
        cfg = recipe(model, mapping, fragment_layers=1, **keys)
        if "virtual_stages" in mapping and "bias" not in model:
            continue
        check_config(cfg)
        count = recipe_fragments(cfg.model, cfg.sites)
        code = recipe_format(cfg.run, cfg.sites)
        item = 8 if cfg.run.dtype == "float64" else 4
        sharding = WeightSharding.from_config(cfg, for_training=True)
        weights = model_weights(cfg.model)
        total = Counter[int]()
        longest = Counter[int]()
        for rank in range(cfg.parallel.world_size):
            coded = Counter[int]()
            plain = Counter[int]()
            for name, box in sharding.boxes(rank).items():
                if name in weights:
                    coded[fragment_of(name, count)] += -(-box.numel // code.block) * code.block
                    plain[fragment_of(name, count)] += 2 * box.numel * item * ("moments" in keys)
                else:
                    plain[fragment_of(name, count)] += box.numel * item
            for fragment in range(count):
                total[fragment] += code.num_bytes(coded[fragment]) + plain[fragment]
                messages = -(-coded[fragment] // PART_ELEMENTS) + (plain[fragment] > 0)
                longest[fragment] = max(longest[fragment], messages)
        found = site_traffic(cfg)
        assert [part.num_bytes(code) for part in found] == [total[p] for p in range(count)]
        assert [part.messages for part in found] == [longest[p] for p in range(count)]
        num_checked += 1
    assert num_checked >= 5
