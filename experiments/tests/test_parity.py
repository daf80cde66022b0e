"""Every case of the parts equals the one-process float64 oracle: losses, norm, gradients, weights."""

import pytest

from moefold_experiments.gradient_delay.part import DelayedAdamW, DelayedMuon
from moefold_experiments.spsa.part import Spsa
from tests.verify.cases import Case, cases
from tests.verify.feature_cases import SHARED, TIED
from tests.verify.oracle import assert_equals_oracle

# Delayed gradients, with and without the correction of updates; four steps have three updates.

CORRECTED = {"optimizer": DelayedAdamW(correction=1.0), "global_batch_size": 4}
CORRECTED_MUON = CORRECTED | {"optimizer": DelayedMuon(correction=1.0)}
DELAYED = [
    {"train": CORRECTED, "world_size": 2, "ep": 2, "zero": 3},
    {"train": CORRECTED, "world_size": 4, "cp": 2, "ep": 2, "zero": 3},
    {"train": CORRECTED_MUON, "world_size": 2, "tp": 2, "ep": 2},
    {"train": CORRECTED_MUON, "world_size": 4, "pp": 2, "etp": 2, "zero": 2},
    {
        "train": CORRECTED | {"optimizer": DelayedAdamW(correction=0.5), "reset_moments_every": 2},
        "world_size": 2,
        "zero": 0,
    },
    {"train": {"optimizer": DelayedAdamW(), "global_batch_size": 4}, "world_size": 2, "zero": 1},
    {"train": {"optimizer": DelayedMuon(), "global_batch_size": 4}, "world_size": 1},
    {"train": CORRECTED, "world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
]

# Two forward passes instead of gradients; weights are perturbed by the same numbers under every mapping.

SPSA = {"optimizer": Spsa(max_gradient=5.0), "global_batch_size": 4}
SPSA_LOSSES = {
    "moe": {"aux_loss": 0.1, "z_loss": 0.1},
    "model": SHARED | TIED | {"mtp_layers": 1, "ffn.moe.router.expert_bias": True},
}
SPSA_MAPPED = [
    {"train": SPSA, **SPSA_LOSSES, "world_size": 2, "tp": 2, "ep": 2},
    {"train": SPSA, **SPSA_LOSSES, "world_size": 4, "cp": 2, "pp": 2, "ep": 2, "zero": 2},
    {"train": SPSA, **SPSA_LOSSES, "world_size": 4, "tp": 2, "ep": 2, "etp": 2, "zero": 3},
    {"train": SPSA, **SPSA_LOSSES, "world_size": 1},
    {"train": SPSA, **SPSA_LOSSES, "world_size": 2, "zero": 0},
    {"train": SPSA, **SPSA_LOSSES, "world_size": 2, "zero": 1},
    {"train": SPSA, "world_size": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "zero": 1},
    {"train": SPSA, "model": {"ffn.moe.bias": True}, "world_size": 4, "ep": 2, "etp": 2, "zero": 3},
    {"train": SPSA, "moe": {"aux_kind": "global_batch", "aux_loss": 0.1}, "world_size": 2, "pp": 2},
    {"train": SPSA, "moe": {"aux_kind": "last_global_batch", "aux_loss": 0.1}, "world_size": 2, "ep": 2},
    {"train": SPSA, "moe": {"capacity_factor": 1.0, "input_jitter": 0.1}, "world_size": 2, "tp": 2},
    {"train": SPSA, "lora": {"rank": 2}, "world_size": 4, "tp": 2, "ep": 2, "zero": 2},
    {"train": SPSA, **SPSA_LOSSES, "world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 3},
    {"model": {"vocab_size": 33}, "train": {"optimizer": Spsa()}, "world_size": 4, "tp": 2, "ep": 2, "zero": 3},
]
CASES = [
    *cases("delayed gradients", DELAYED[:1], DELAYED[1:], steps=4),
    *cases("spsa", SPSA_MAPPED[:1], SPSA_MAPPED[1:]),
]


@pytest.mark.parity
@pytest.mark.parametrize("case", [case.param() for case in CASES])
def test_it_equals_the_oracle(pool, tmp_path, case: Case):
    assert_equals_oracle(pool, case.config(tmp_path), case.steps)
