"""Every pipeline schedule with every saver of memory equals the one-process float64 oracle: gradients and weights."""

from pathlib import Path

import pytest

from tests.verify.recipes import LATENT, tiny
from tests.verify.test_parity import assert_equals_oracle
from tests.verify.test_pipeline_parity import write_split_rows

pytestmark = [pytest.mark.parity, pytest.mark.slow]

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zero-bubble", 3),
    ("zbv", 2),
    ("dualpipev", 2),
    ("csv", 2),
)
"""Each with its virtual stages."""
AXES = ({"tp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2})
SHARED = {"shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True}
MODELS = (SHARED, {"tie_embeddings": True}, {"layer_pattern": "DM"}, LATENT | {"mtp_layers": 1})
AGAIN = (("norms", "core_attention", "expert_activation"), ("moe", "norms"), ("layer",), ("core_attention", "moe"))
AWAY = (("layer",), ("moe", "core_attention"), ("norms", "expert_activation"))
SAVERS = {
    "plain": lambda i: {},
    "recompute": lambda i: {"recompute": AGAIN[i % len(AGAIN)]},
    "recompute, chunked loss": lambda i: {"recompute": AGAIN[(i + 1) % len(AGAIN)], "loss_chunk": 3},
    # On CPU other memory of the host; all of it leaves, so that all of it has to come back.
    "offload": lambda i: {"offload": AWAY[i % len(AWAY)], "offload_min_kib": 0, "offload_waits": True},
    "offload, recompute": lambda i: {"offload": ("layer",), "offload_min_kib": 0, "recompute": AGAIN[i % len(AGAIN)]},
}
"""Keys of [train]; which parts are saved differs from case to case."""


def _cases() -> list[tuple[str, str, dict[str, object], int]]:
    """Schedule, saver, mapping and number of each case: four ranks with each axis in turn, a few with eight."""
    cases = []
    for i, (schedule, chunks) in enumerate(SCHEDULES):
        for j, saver in enumerate(SAVERS):
            number = i + j
            base = {"schedule": schedule, "virtual_stages": chunks, "zero": number % 4}
            cases.append((schedule, saver, base | {"world_size": 4, "pp": 2, **AXES[number % 5]}, number))
            wide = {"world_size": 8, **AXES[(number + 2) % 5]} if number % 3 == 0 else {"world_size": 4}
            cases.append((schedule, saver, base | {"pp": 4, **wide}, number + 1))
    return cases


@pytest.mark.parametrize(("schedule", "saver", "mapping", "number"), _cases(), ids=str)
def test_each_schedule_with_each_saver(pool, tmp_path: Path, schedule, saver, mapping, number):
    if schedule == "csv":
        ranks = tuple(range(mapping["pp"])) * 2
        micro_batches = 16 * mapping["pp"] * mapping.get("tp", 1) * mapping.get("cp", 1) // mapping["world_size"]
        mapping = mapping | {"schedule_csv": write_split_rows(tmp_path / "rows.csv", ranks, micro_batches)}
    train = {"global_batch_size": 16, **SAVERS[saver](number)}
    model = MODELS[number % len(MODELS)]
    if "mtp_layers" not in model:
        model = model | {"num_layers": mapping["pp"] * mapping["virtual_stages"]}
    assert_equals_oracle(pool, tiny(model=model, train=train, **mapping))
