"""Test random models of every family on any mapping: logits, gradients and ten AdamW steps as in transformers."""

from functools import cache
from pathlib import Path

import pytest

from moefold.config.edit import edit
from tests.convert.hf_models import make_model, save_model
from tests.convert.random_sizes import FAMILIES, NEWER_FAMILIES, random_sizes
from tests.convert.side_by_side import (
    LOGITS,
    Reference,
    assert_close,
    assert_equal,
    assert_gradients,
    gradients_by_our_names,
    recipe,
    run_both,
    train_ours,
    train_theirs,
)
from tests.slow import slow


@pytest.mark.parametrize("seed", [0, *slow([(1,), (2,), (3,)])])
@pytest.mark.parametrize("family", [*FAMILIES, *slow((family,) for family in NEWER_FAMILIES)])
def test_logits_and_gradients_equal_transformers(tmp_path, family, seed):
    theirs = make_model(family, **random_sizes(family, seed, is_cut=False))
    folder = save_model(theirs, tmp_path / "hf")
    logits, expected, gradients = run_both(theirs, folder, recipe(folder, folder))
    assert_close(logits, expected, LOGITS, "logits")
    assert_gradients(gradients, gradients_by_our_names(theirs, tmp_path / "gradients"))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """A folder and its results by transformers, made once for each family."""

    @cache
    def make(family: str) -> tuple[Path, Reference]:
        parent = tmp_path_factory.mktemp(family)
        theirs = make_model(family, **random_sizes(family, SEEDS.get(family, 0), is_cut=True))
        folder = save_model(theirs, parent / "hf")
        return folder, train_theirs(theirs, recipe(folder, folder), parent / "gradients")

    return make


DENSE = ("llama", "qwen2", "qwen3")
TWO_RANKS = ({"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2})
FAST = ("deepseek-v3",)
"""Families with a fast mapping of two ranks. The others have no block that `verify/test_parity.py` lacks under
every axis, and equal transformers on one rank in `test_logits_and_gradients_equal_transformers`."""
FOLDED = {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2}
SEEDS = {"qwen3-5-moe": 1, "qwen2-moe": 1, "qwen3-moe": 4, "gpt-oss": 2, "deepseek-v2": 2, "deepseek-v3": 3}
"""Where the first draw lacks a feature of a mapping test: tied embeddings, a dense layer, windows, YaRN, a latent;
or, for Qwen3.5, has a gradient of the decays (7e-4) near the rounding of the float32 recurrence in transformers."""


def _cases() -> list[object]:
    cases = []
    for i, family in enumerate((*FAMILIES, *NEWER_FAMILIES)):
        for degrees in (*TWO_RANKS, FOLDED):
            mapping = {axis: n for axis, n in degrees.items() if family not in DENSE or axis not in ("ep", "etp")}
            mapping = {"world_size": 8 if degrees is FOLDED else 2} | mapping
            is_fast = degrees == TWO_RANKS[i % len(TWO_RANKS)] and family in FAST
            marks = () if is_fast else (pytest.mark.slow,)
            name = "-".join(f"{axis}{n}" for axis, n in mapping.items())
            cases.append(pytest.param(family, mapping, marks=marks, id=f"{family}-{name}"))
    return cases


@pytest.mark.parity
@pytest.mark.parametrize(("family", "mapping"), _cases())
def test_every_mapping_trains_as_transformers_does(pool, references, family, mapping):
    folder, expected = references(family)
    assert expected.losses[-1] < expected.losses[0] - 0.1
    ranks = pool.run(mapping["world_size"], train_ours, recipe(folder, folder, **mapping))
    assert_equal(ranks, expected, mapping.get("tp", 1))


@pytest.mark.parity
@pytest.mark.parametrize(
    ("key", "value", "culprit"),
    [
        ("model.rope.theta", 100.0, "logits"),
        ("train.lr", 2.9e-3, "losses"),
        ("train.optimizer.beta2", 0.9, "losses"),
    ],
)
def test_a_run_that_differs_a_little_is_noticed(pool, references, key, value, culprit):
    folder, expected = references("qwen2-moe")
    other = edit(recipe(folder, folder), {key: value})
    with pytest.raises(AssertionError, match=culprit):
        assert_equal(pool.run(1, train_ours, other), expected, tp=1)
