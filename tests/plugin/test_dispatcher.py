"""Test the dispatcher of the package: equal to built-in ones, priced by its messages, refused by its check."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from moefold.errors import ConfigError
from moefold.launch.rank_pool import WorkerPool
from moefold.validate.config import check_config
from moefold.verify.distributed_run import run_distributed
from tests.e2e.command import moefold
from tests.plugin.recipes import recipe, words

GATHERING = words("parallel.dispatcher")
TWO = ("parallel.world_size=2", "parallel.ep=2")


@pytest.mark.slow
@pytest.mark.parity
def test_it_equals_the_built_in_one(pool: WorkerPool) -> None:
    mine = pool.run(2, run_distributed, recipe(*TWO, *GATHERING), 2)
    theirs = pool.run(2, run_distributed, recipe(*TWO, "parallel.dispatcher=allgather"), 2)
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=1e-12)


def plan(folder: Path, dispatcher: str) -> tuple[dict[str, object], str]:
    """Return the plan of a fixed mapping, and the dispatcher of the recipe that it writes."""
    fixed = f"tp=1,cp=1,pp=1,ep=4,etp=1,mbs=1,zero=3,recompute=layer,offload=none,overlap=off,dispatcher={dispatcher}"
    path = folder / f"{dispatcher}.toml"
    asked = ["plan", "qwen3-30b-a3b", "--gpu", "h200", "--num-gpus", "8", "--fix", fixed, "--json"]
    done = moefold(*asked, "--recipe", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["mappings"][0], tomllib.loads(path.read_text())["parallel"].get("dispatcher", "")


@pytest.mark.e2e
def test_it_is_priced_by_its_messages(tmp_path: Path) -> None:
    mine, written = plan(tmp_path, "gathering")
    assert (mine["dispatcher"], written) == ("gathering", {"kind": "gathering"})
    like, other = (plan(tmp_path, kind)[0] for kind in ("allgather", "alltoall"))
    assert mine["step_time_s"] == like["step_time_s"] != other["step_time_s"]
    assert mine["memory_gib"] == pytest.approx(like["memory_gib"], rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("moe.capacity_factor=1.0", *TWO), "parallel.dispatcher='gathering' cannot run: it drops no token"),
        (("parallel.world_size=2", "parallel.etp=2"), "parallel.dispatcher='gathering' sends tokens to whole experts"),
        ((), "parallel.dispatcher='gathering' sends tokens between the ranks of ep and etp, and parallel.ep=1"),
    ],
    ids=range(3),
)
def test_it_is_refused_where_it_says_so(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(recipe(*GATHERING, *overrides))
    assert message in str(refused.value)
