"""Results of the sites of a test, and their comparison with the oracle."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moefold.checkpoint.safe_metadata import SafeReader, read_metadata
from moefold.config.schema import Config
from tests.metrics.undefined import undefined
from tests.train.oracle_sites import SitesState

TOLERANCE = 1e-9


def records(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert not [key for record in found for key in undefined(record)]
    return found


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin with a prefix, without it."""
    stored = read_metadata(path).state_dict_metadata
    state = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in stored.items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=SafeReader(path), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-30))
        for name, tensor in expected.items()
        if tensor.numel()
    )


def assert_equals_oracle(
    cfg: Config, number: int, run_dir: Path, expected: Sequence[SitesState], steps: Sequence[int]
) -> None:
    """Compare weights, outer weights and momentum of a site after some steps, and all losses, with the oracle."""
    for step in steps:
        path = checkpoint(run_dir, step)
        state = expected[step - 1]
        assert largest_error(tensors(path, "model."), state.weights[number]) <= TOLERANCE
        assert largest_error(tensors(path, "outer.weights."), state.outer[number]) <= TOLERANCE
        if cfg.sites.momentum:
            assert largest_error(tensors(path, "outer.momentum."), state.momentum[number]) <= TOLERANCE
    losses = [record["loss"] for record in records(run_dir)]
    assert losses == pytest.approx([state.losses[number] for state in expected], rel=TOLERANCE)
