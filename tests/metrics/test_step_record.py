"""One step as a line of JSON."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moefold.metrics.definitions import number_of
from moefold.metrics.reader import read_lines
from moefold.metrics.writer import to_record
from moefold.parallel.memory_tracking import PARTS, MemoryByPart
from moefold.train.step_meter import offload_metrics
from tests.metrics.example import LAYER, MEMORY, STEP

KEYS = [
    "step",
    "loss",
    "aux_loss",
    "z_loss",
    "mtp_loss",
    "indexer_loss",
    "grad_norm",
    "projected_gradient",
    "lr",
    "tokens",
    "tokens_consumed",
    "step_time_s",
    "tokens_per_s",
    "tflops_per_rank",
    "mfu",
    "memory_gib",
    "expert_load",
    "dropped_fraction",
    "save_s",
    "moe_layers",
    "eval_loss",
    "skipped",
    "replicas",
    "offload",
    "memory_by_part",
    "rank_times",
    "attention_max_over_mean",
    "attention_moved_rows",
    "attention_bytes",
    "loss_terms",
    "loss_metrics",
    "rl",
    "sites",
]


def test_holds_every_key_in_order_and_null_for_unknown_values() -> None:
    record = to_record(STEP)
    assert list(record) == KEYS
    assert record["mfu"] is None
    assert record["eval_loss"] is None
    assert record["expert_load"] == [1.5, 1.25]
    assert record["skipped"] is None
    assert to_record(STEP | {"skipped": "spike"})["skipped"] == "spike"
    assert to_record(STEP | {"mfu": 0.5, "eval_loss": 2.75})["eval_loss"] == 2.75


def test_offload_is_summed_in_bytes_and_averaged_in_seconds() -> None:
    metrics = offload_metrics((3 * 2**30, 2**29, 6.0, 1.0), num_ranks=4)
    record = to_record(STEP | {"offload": metrics})["offload"]
    assert record == {"stored_gib": 3.0, "kept_gib": 0.5, "io_s": 1.5, "waited_s": 0.25}


@pytest.mark.parametrize("value", [0.1 + 0.2, 1 / 3, 5e-324, 2.2250738585072014e-308, 123456789.12345679])
def test_floats_keep_full_precision(value: float) -> None:
    record = to_record(STEP | {"loss": value, "expert_load": (value,)})
    assert record["loss"] == value
    assert record["expert_load"] == [value]


def test_nonfinite_values_become_null_and_are_named() -> None:
    metrics = STEP | {"loss": float("nan"), "grad_norm": float("inf"), "expert_load": (1.0, float("-inf"))}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(json.dumps(to_record(metrics)), parse_constant=refuse)
    assert record["loss"] is None
    assert record["grad_norm"] is None
    assert record["expert_load"] == [1.0, None]
    assert record["nonfinite"] == {"loss": "nan", "grad_norm": "inf", "expert_load[1]": "-inf"}


def test_each_moe_layer_is_an_object() -> None:
    layer = replace(LAYER, layer=3, router_entropy=float("nan"))
    record = to_record(STEP | {"moe_layers": (LAYER, layer)})
    assert record["moe_layers"][0] == asdict(LAYER)
    assert record["moe_layers"][1] == asdict(layer) | {"router_entropy": None}
    assert record["nonfinite"] == {"moe_layers[1].router_entropy": "nan"}


def test_the_number_of_a_list_is_its_largest() -> None:
    assert number_of(STEP, "expert_load") == 1.5
    assert number_of(STEP | {"expert_load": ()}, "expert_load") is None
    worst = number_of(STEP | {"expert_load": (1.0, float("nan"), 2.0)}, "expert_load")
    assert worst != worst


def test_read_lines_marks_lines_without_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnull\n{"loss": 2}\n{"step": "2"}\n[1]\n\n\xff\x00\n{"step": 3, "lo')
    assert [record for _, record in read_lines(path)] == [{"step": 1}, *[None] * 7]
    assert list(read_lines(tmp_path / "absent")) == []


def test_memory_by_part_has_a_number_for_each_rank() -> None:
    record = to_record(STEP | {"memory_by_part": MEMORY})
    assert record["memory_by_part"] == {
        "peak_bytes": {"weights": [2147483648, 1073741824], "experts": [1048576, 2097152]},
        "current_bytes": {"weights": [2147483648, 1073741824]},
    }


def test_memory_by_part_omits_empty_parts() -> None:
    row = [0.0] * (2 * len(PARTS))
    row[PARTS.index("norms")] = 7.0
    assert MemoryByPart.from_ranks([[0.0] * len(row), row]) == MemoryByPart(
        peak_bytes={"norms": [0, 7]}, current_bytes={}
    )
