"""Experts' exchanges hidden behind another micro-batch change no bit, and equal the oracle."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from tests.verify.recipes import LATENT, tiny
from tests.verify.same_bits import assert_same_bits
from tests.verify.test_parity import assert_equals_oracle

pytestmark = pytest.mark.parity

SHARED = {"shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True, "expert_bias": True, "layer_pattern": "DM"}
FURTHER = {"mtp_layers": 1, "tie_embeddings": True}
DROPS = {"capacity_factor": 1.0, "input_jitter": 0.1}
LOAN = {"choice": "skewed", "llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0, "aux_loss": 0.0}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2, "pp": 2}
DUALPIPEV = {"schedule": "dualpipev", "virtual_stages": 2, "pp": 2}


def _recipe(
    parallel: dict[str, object],
    model: dict[str, object] | None = None,
    moe: dict[str, object] | None = None,
    recompute: tuple[str, ...] = (),
    batch: int = 8,
    **other: object,
) -> Config:
    """A recipe with overlapped experts."""
    train = {"global_batch_size": batch, "recompute": recompute}
    return tiny(model=model, moe=moe, train=train, overlap_experts=True, **parallel, **other)


def _without_overlap(cfg: Config) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, overlap_experts=False))


FAST = {
    "one stage": _recipe({"world_size": 2, "ep": 2}, SHARED | FURTHER, batch=6),
    "1f1b": _recipe({"world_size": 4, "pp": 2, "ep": 2, "zero": 2}, moe=DROPS, recompute=("moe", "norms")),
    "interleaved": _recipe({"world_size": 4, "etp": 2, "zero": 0, **INTERLEAVED}, SHARED),
    "dualpipev": _recipe({"world_size": 4, "ep": 2, "tp": 2, **DUALPIPEV}, FURTHER, recompute=("layer",)),
}
WIDE = {
    "tp": _recipe({"world_size": 4, "tp": 2, "ep": 4}, SHARED),
    "cp": _recipe({"world_size": 4, "cp": 2, "ep": 2, "etp": 2, "zero": 2}, FURTHER, DROPS),
    "gathered": _recipe({"world_size": 4, "cp": 2, "ep": 4, "dispatcher": "allgather"}, SHARED, recompute=("layer",)),
    "lent": _recipe({"world_size": 4, "ep": 4, "dispatcher": "leastloaded"}, moe=LOAN),
    "lent again": _recipe({"world_size": 4, "ep": 2, "etp": 2, "dispatcher": "leastloaded"}, {}, LOAN, ("moe",)),
    "weights in experts": _recipe({"world_size": 4, "ep": 2, "etp": 2}, moe={"weight_in_expert": True}),
    "padded": _recipe(
        {"world_size": 2, "ep": 2}, moe={"capacity_factor": 1.0, "pad_to_capacity": True, "drop_scope": "sub_sequence"}
    ),
    "replayed loads": _recipe({"world_size": 2, "ep": 2}, moe={"aux_kind": "global_batch"}, recompute=("moe",)),
    "latent": _recipe({"world_size": 4, "pp": 2, "tp": 2, "etp": 2}, LATENT | FURTHER, recompute=("mla_up", "norms")),
    "checked": _recipe({"world_size": 4, "pp": 2, "ep": 2}, SHARED, faults={"check_dispatch": True}),
    "pp=4": _recipe({"world_size": 8, "pp": 4, "ep": 2}, SHARED, DROPS, batch=16),
    "pp=4, two chunks": _recipe({"world_size": 8, **INTERLEAVED, "pp": 4, "ep": 2, "zero": 2}),
    "three chunks": _recipe({"world_size": 4, **INTERLEAVED, "virtual_stages": 3, "ep": 2}, recompute=("layer",)),
    "pp=4, dualpipev": _recipe({"world_size": 8, **DUALPIPEV, "pp": 4, "ep": 2, "zero": 2}, SHARED, batch=16),
    "folded": _recipe({"world_size": 8, "pp": 2, "tp": 2, "cp": 2, "ep": 4}, SHARED | FURTHER, DROPS, ("moe",)),
    "folded, v": _recipe({"world_size": 8, **DUALPIPEV, "tp": 2, "cp": 2, "ep": 2, "etp": 2}, SHARED | FURTHER),
    "uneven": _recipe(
        {"world_size": 4, **INTERLEAVED, "virtual_stages": 3, "ep": 2, "pipeline_layout": "Et|tt|||tt|mL"},
        FURTHER | {"num_layers": 5, "layer_pattern": "DM"},
    ),
    "uneven v": _recipe(
        {"world_size": 4, **DUALPIPEV, "ep": 2, "pipeline_layout": "E|ttt|tt|mL"},
        FURTHER | {"num_layers": 5, "layer_pattern": "MD"},
    ),
    "few micro-batches": _recipe({"world_size": 4, "pp": 2, "ep": 2}, batch=4),
}


def _cases(every: int) -> list[object]:
    """The fast ones, and behind them the others as slow."""
    wide = [pytest.param(cfg, id=name, marks=pytest.mark.slow) for name, cfg in list(WIDE.items())[::every]]
    return [*(pytest.param(cfg, id=name) for name, cfg in FAST.items()), *wide]


@pytest.mark.parametrize("cfg", _cases(1))
def test_no_bit_changes(pool, cfg):
    assert_same_bits(pool, _without_overlap(cfg), cfg, steps=2, timeout_s=120.0)


@pytest.mark.parametrize("cfg", [cfg for cfg in _cases(1) if "lent" not in cfg.id][1:])
def test_equals_the_oracle(pool, cfg):
    assert_equals_oracle(pool, cfg)
