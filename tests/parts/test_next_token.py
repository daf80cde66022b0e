"""The z-loss of the output head: equal to the oracle under mappings, logged, absent from evaluations, refused if idle.

`test_every_kind.py` compares it with its formula on one rank.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold import api
from moefold.config.base.part import make_part
from moefold.errors import ConfigError
from moefold.recipe import load_config, load_recipe
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from tests.objectives.example import example
from tests.slow import slow
from tests.verify.oracle import TOLERANCE
from tests.verify.recipes import tiny, without_mapping

Z_LOSS = make_part("loss", "next_token", z_loss=0.05)
CASES: dict[str, dict[str, Any]] = {
    "tp2-chunks": {"world_size": 2, "tp": 2, "train": {"loss_chunk": 3}},
    "tp2-cp2-chunks": {"world_size": 4, "tp": 2, "cp": 2, "train": {"loss_chunk": 3}},
    "pp2-mtp": {"world_size": 2, "pp": 2, "model": {"mtp_layers": 1}},
    "tp2-pp2-mtp": {"world_size": 4, "tp": 2, "pp": 2, "model": {"mtp_layers": 1}},
    "zero3-documents": {"world_size": 2, "zero": 3, "model": {"vocab_size": 8}, "data": {"document_end": 2}},
    "overlapped": {"world_size": 4, "cp": 2, "ep": 2, "overlap_experts": True},
    "interleaved": {"world_size": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
}
FAST = ("tp2-chunks", "pp2-mtp")


@pytest.mark.parity
@pytest.mark.parametrize("name", [*FAST, *slow((name,) for name in CASES if name not in FAST)])
def test_the_z_loss_under_a_mapping_equals_the_oracle(pool, name):
    """Two tp ranks do not divide the vocabulary. Padding and first tokens of documents do not count."""
    case = {"model": {}, "train": {}} | CASES[name]
    model = {"vocab_size": 33} | case["model"]
    cfg = tiny(**case | {"model": model, "train": case["train"] | {"loss": Z_LOSS}})
    ranks = pool.run(cfg.parallel.world_size, run_distributed, cfg, 2)
    oracle = run_oracle(without_mapping(cfg), 2)
    assert [one for one in compare_records(oracle, ranks) if one.error > TOLERANCE] == []
    terms = ranks[-1].steps[0].loss_terms
    assert list(terms) == ["cross_entropy", "z"]
    assert terms["z"] > 0
    # The first loss differs only by the term, and the evaluation has none.
    off = run_oracle(without_mapping(replace(cfg, train=replace(cfg.train, loss="next_token"))), 1)
    assert off.steps[0].loss == pytest.approx(terms["cross_entropy"], rel=1e-9)
    assert oracle.eval_loss < oracle.steps[-1].loss - terms["z"] / 2


def test_the_term_and_its_gradient_by_definition():
    found = example()
    z = Z_LOSS(found.output(), found.columns)[1:]
    weights = found.columns["weights"]
    normalizers = (found.hidden.transpose(0, 1) @ found.head.weight.t()).exp().sum(-1).log()
    expected = 0.05 * (weights * normalizers**2).sum()
    torch.testing.assert_close(z.sum(), expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, found.hidden)[0] for value in (z.sum(), expected)))


@pytest.mark.parametrize(
    "words", [["data.kind=task", "rl.group_size=4"], ["data.kind=preference", "data.path=x", "align.method=dpo"]]
)
def test_it_is_refused_where_another_loss_is_minimised(words):
    with pytest.raises(ConfigError, match=r"^train\.loss\.z_loss=0\.0001 has no effect: "):
        load_config(None, [*words, "train.loss.z_loss=1e-4"])
    load_config(None, words)


def test_it_is_refused_beside_the_loss_of_a_program():
    with pytest.raises(ConfigError, match="loss= replaces the loss of the recipe, which sets train.loss"):
        api._check_loss(load_recipe(None, ["train.loss.z_loss=1e-4"]), Z_LOSS)
