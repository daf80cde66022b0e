"""Evaluation gives the loss and logits of transformers on the same weights, under every axis."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.inference.scoring import Evaluation, LogitsFile, evaluate
from moefold.inference.token_dataset import TokenDataset
from tests.inference.example import opened, recipe, row_of_ids, theirs
from tests.verify.covering import few_else_slow

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
pytestmark = pytest.mark.parity

S = 13
"""No degree but 1 divides it: sequences are filled up."""
MAPPINGS = [
    {},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 2, "pp": 2, "pipeline_layout": "E|tttL"},
    {"world_size": 2, "cp": 2},
    {"world_size": 2},
    {"world_size": 4, "tp": 2, "cp": 2, "ep": 4},
]


def run_evaluation(path: Path, mapping: dict[str, int], ids: np.ndarray, keeps_tail: bool, logits: Path | None):
    """Return the results of one rank for the row, three sequences of S at once."""
    model = opened(path, "evaluate", mapping, S, 3)
    row = TokenDataset(ids, S, keeps_tail)
    with nullcontext() if logits is None else LogitsFile(logits, model, row) as file:
        return evaluate(model, row, file)


def expected(family: str, ids: np.ndarray) -> tuple[float, torch.Tensor]:
    """(mean loss, logits [sequences, S, V]) of transformers on whole sequences."""
    tokens = torch.from_numpy(ids[: len(ids) // S * S].astype(np.int64)).view(-1, S)
    with torch.no_grad():
        logits = theirs(recipe(family, Path("unused")), family).double()(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return float(loss), logits


@pytest.mark.parametrize(
    "mapping",
    few_else_slow(MAPPINGS, [MAPPINGS[1], *MAPPINGS[3:6]]),
)
def test_loss_and_logits_equal_transformers(pool, mixtral, tmp_path, mapping):
    ids, file = row_of_ids(7 * S + 5), tmp_path / "logits.npy"
    # In float32 the two differ by more than 1e-5 on some processors.
    wide = mapping | {"dtype": "float64"}
    ranks = pool.run(mapping.get("world_size", 1), run_evaluation, mixtral, wide, ids, False, file)
    loss, logits = expected("mixtral", ids)
    assert {rank.tokens for rank in ranks} == {7 * (S - 1)}
    assert all(rank.loss == pytest.approx(loss, rel=1e-5) for rank in ranks)
    written = np.load(file)
    assert (written.dtype, written.shape) == (np.float32, (7, S, 64))
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npy"]
    torch.testing.assert_close(torch.from_numpy(written), logits.float(), rtol=1e-5, atol=1e-5)


def test_another_family_with_a_dense_layer(pool, qwen3):
    ids = row_of_ids(5 * S)
    (found,) = pool.run(1, run_evaluation, qwen3, {}, ids, False, None)
    assert found.loss == pytest.approx(expected("qwen3-moe", ids)[0], rel=1e-5)


@pytest.mark.parametrize("mapping", [{}, {"world_size": 2, "cp": 2}], ids=["one", "cp2"])
def test_included_tail_is_one_more_shorter_sequence(pool, mixtral, mapping):
    ids = row_of_ids(2 * S + 5)
    whole = pool.run(1, run_evaluation, mixtral, {}, ids, False, None)[0]
    found = pool.run(mapping.get("world_size", 1), run_evaluation, mixtral, mapping, ids, True, None)[0]
    model = theirs(recipe("mixtral", Path("unused")), "mixtral")
    tail = torch.from_numpy(ids[2 * S :].astype(np.int64)).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=tail).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tail[0, 1:])
    assert (whole.tokens, found.tokens) == (2 * (S - 1), 2 * (S - 1) + 4)
    assert found.loss == pytest.approx((whole.loss * whole.tokens + float(loss) * 4) / found.tokens, rel=1e-5)


def test_another_type_than_the_weights_have(pool, mixtral):
    ids = row_of_ids(7 * S)
    mapping = {"world_size": 2, "tp": 2, "ep": 2}
    single, found = (
        pool.run(2, run_evaluation, mixtral, mapping | more, ids, False, None)[0]
        for more in ({}, {"dtype": "bfloat16"})
    )
    assert found.loss == pytest.approx(single.loss, rel=1e-2)
    assert found.loss != single.loss


def test_tokens_are_dropped_only_if_asked(pool, mixtral):
    ids = row_of_ids(7 * S)
    plain = pool.run(1, run_evaluation, mixtral, {}, ids, False, None)[0]
    dropping = {"moe.eval_capacity_factor": 0.5}
    dropped = pool.run(1, run_evaluation, mixtral, dropping, ids, False, None)[0]
    assert plain.loss == pytest.approx(expected("mixtral", ids)[0], rel=1e-5)
    assert abs(dropped.loss - plain.loss) > 1e-3


def test_perplexity_beyond_float_is_infinite():
    assert Evaluation(2.0, 10).perplexity == pytest.approx(7.389056)
    assert Evaluation(1e4, 10).perplexity == float("inf")
