"""Test that each user error is one message and exit status 2 within two seconds, before any rank starts."""

import pytest

from tests.clock import processor_s
from tests.e2e.command import fresh, here, small

pytestmark = pytest.mark.e2e

BAD = {
    "unknown key": (["train.seq_length=64"], "unknown key train.seq_length; moefold calls this train.seq_len"),
    "wrong type": (["run.steps=many"], "run.steps='many' must be an integer"),
    "degree": (["parallel.world_size=8", "parallel.tp=3"], "parallel.tp=3 must divide"),
    "heads": (["parallel.world_size=16", "parallel.tp=16"], "parallel.tp=16 must divide model.attention.num_heads=8"),
    "experts": (
        ["parallel.world_size=3", "parallel.ep=3", "train.global_batch_size=9"],
        "parallel.ep=3 must divide model.ffn.moe.num_experts=8",
    ),
    "sequence": (
        ["parallel.world_size=4", "parallel.cp=4", "train.seq_len=60"],
        "train.seq_len=60 must be divisible by 2*cp=8",
    ),
    "order": (
        [
            "parallel.world_size=8",
            "parallel.pp=2",
            "parallel.tp=2",
            "parallel.order=dp-pp-cp-tp",
            "parallel.moe_order=edp-pp-ep-etp",
        ],
        "parallel.order",
    ),
    "missing file": (["data.kind=text", "data.path={folder}/absent/file.txt"], "absent/file.txt"),
    "empty data": (["data.kind=text", "data.path={folder}/empty.toml"], "empty.toml"),
    "vocabulary": (["data.kind=python-docs", "model.vocab_size=100"], "model.vocab_size=100"),
    "no held-out text": (
        ["train.eval_every=1", "data.validation_fraction=0"],
        "train.eval_every=1 needs held-out text",
    ),
    "missing checkpoint": (["checkpoint.resume={folder}/absent/step-000001"], "checkpoint.resume="),
    "unwritable run folder": (["run.dir={folder}/empty.toml/run"], "run.dir="),
}


FRESH = ("degree", "empty data", "missing checkpoint")
"""One of each kind, in an interpreter of its own as from a shell: it imports before it refuses."""


@pytest.mark.parametrize("name", BAD)
def test_bad_setting_is_one_message(tmp_path, capsys, name):
    words, expected = BAD[name]
    command = small(tmp_path / "run", *(word.format(folder=tmp_path) for word in words))
    before_s = processor_s()
    done = fresh(*command, timeout_s=30.0) if name in FRESH else here(capsys, *command)
    took_s = processor_s() - before_s
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("moefold: error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert not (tmp_path / "run").exists()
    assert took_s < 2.0
