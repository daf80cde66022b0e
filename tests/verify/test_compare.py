"""Comparison of a run with its oracle finds a difference in any record, on any rank."""

from dataclasses import fields, replace

import pytest
import torch

from moefold.verify.compare import (
    NamedError,
    OracleRecord,
    compare_records,
    run_oracle,
    sort_by_cause,
    token_chunks,
    zero_gradients,
)
from tests.verify.oracle import TOLERANCE
from tests.verify.perfect_record import perfect
from tests.verify.recipes import tiny


@pytest.fixture(scope="module")
def oracle() -> OracleRecord:
    return run_oracle(
        tiny(
            model={
                "mtp_layers": 1,
                "attention.indexer.top_k": 5,
                "attention.indexer.num_heads": 3,
                "attention.indexer.head_dim": 6,
            }
        ),
        2,
    )


def test_equal_sides_have_no_difference(oracle):
    found = compare_records(oracle, [perfect(oracle)])
    assert {d.error for d in found} == {0.0}
    of_layers = sum(len(fields(layer)) for step in oracle.steps for layer in step.moe_layers)
    assert len(found) == 3 * len(oracle.weights) + 2 * 6 + of_layers + 1


@pytest.mark.parametrize("term", ["loss", "aux_loss", "z_loss", "mtp_loss", "indexer_loss", "grad_norm"])
def test_a_number_of_any_step_counts(oracle, term):
    record = perfect(oracle)
    wrong = replace(record.steps[1], **{term: getattr(record.steps[1], term) * 1.5})
    worst = compare_records(oracle, [replace(record, steps=(record.steps[0], wrong))])[0]
    assert worst.name == f"step 2 {term} (rank 0)"
    assert worst.error == pytest.approx(0.5)


def test_another_evaluation_loss_is_a_difference(oracle):
    worst = compare_records(oracle, [replace(perfect(oracle), eval_loss=oracle.eval_loss * 2)])[0]
    assert (worst.name, worst.error) == ("eval_loss (rank 0)", pytest.approx(1.0))


def test_the_error_of_a_tensor_is_relative_to_its_largest_element(oracle):
    record = perfect(oracle)
    changed = record.weights["head.weight"].clone()
    changed[0, 0] += 0.5 * changed.abs().max()
    record.weights["head.weight"] = changed
    worst = compare_records(oracle, [record])[0]
    assert (worst.name, worst.error) == ("weights head.weight", pytest.approx(0.5))


def test_a_wrong_copy_on_any_rank_counts(oracle):
    good, bad = perfect(oracle), perfect(oracle)
    bad.gradients["head.weight"] = bad.gradients["head.weight"] * 2
    found = [d for d in compare_records(oracle, [good, bad]) if d.error > 0]
    assert [(d.name, d.error) for d in found] == [("gradients head.weight", pytest.approx(1.0))]


@pytest.fixture(scope="module")
def without_rope() -> OracleRecord:
    """Without RoPE, the biases of keys change no probability."""
    return run_oracle(tiny(model={"layers.position": "nope", "attention.qkv_bias": True}), 2)


KEY_BIAS = "layers.0.attention.bk"


def test_gradients_that_are_zero_are_found(oracle, without_rope):
    assert zero_gradients(without_rope.gradients) == [KEY_BIAS, "layers.1.attention.bk"]
    assert zero_gradients(oracle.gradients) == []


@pytest.mark.parametrize(("share", "is_wrong"), [(1e-14, False), (1e-8, True), (1.0, True)])
def test_a_gradient_that_should_be_zero_is_compared_with_its_layer(without_rope, share, is_wrong):
    record = perfect(without_rope)
    largest = max(g.abs().max() for name, g in record.gradients.items() if name.startswith("layers.0."))
    record.gradients[KEY_BIAS] = record.gradients[KEY_BIAS] + share * largest
    worst = compare_records(without_rope, [record])[0]
    assert (worst.error > TOLERANCE) is is_wrong
    if is_wrong:
        assert (worst.name, worst.error) == (f"gradients {KEY_BIAS}", pytest.approx(share))


@pytest.mark.parametrize(("moved", "is_wrong"), [(1e-9, False), (1e-4, True)])
def test_a_weight_moved_by_more_than_rounding_counts(without_rope, moved, is_wrong):
    """AdamW makes a step of up to the learning rate, 1e-2, of a wrong gradient, and of rounding 1e-9 of that."""
    record = perfect(without_rope)
    record.weights[KEY_BIAS] = record.weights[KEY_BIAS] + moved
    worst = compare_records(without_rope, [record])[0]
    assert (worst.error > TOLERANCE) is is_wrong
    assert not is_wrong or worst.name == f"weights {KEY_BIAS}"


def test_a_gradient_that_is_exactly_zero_is_compared_with_its_layer(oracle):
    gradients = dict(oracle.gradients)
    name = "layers.0.attention.wk"
    gradients[name] = torch.zeros_like(gradients[name])
    expected = replace(oracle, gradients=gradients)
    largest = max(g.abs().max() for key, g in gradients.items() if key.startswith("layers.0."))
    for share in (0.0, 1e-14, 1e-8, 1.0):
        record = perfect(expected)
        record.gradients[name] = gradients[name] + share * largest
        worst = compare_records(expected, [record])[0]
        assert worst.error == pytest.approx(share)
        assert (worst.error > TOLERANCE) is (share > 1e-9)
    assert zero_gradients(gradients) == [name]


def test_a_weight_that_is_exactly_zero_is_compared_with_its_layer(oracle):
    """A bias that starts at zero and has no gradient has no magnitude of its own, initially and later."""
    name = "layers.0.attention.wk"
    for part in ("initial", "weights"):
        tensors = dict(getattr(oracle, part))
        tensors[name] = torch.zeros_like(tensors[name])
        expected = replace(oracle, **{part: tensors})
        largest = max(oracle_part.abs().max() for key, oracle_part in tensors.items() if key.startswith("layers.0."))
        record = perfect(expected)
        getattr(record, part)[name] = tensors[name] + 1e-3 * largest
        assert compare_records(expected, [record])[0].error == pytest.approx(1e-3)


def test_a_number_that_is_exactly_zero_is_compared_by_its_deviation(oracle):
    steps = (replace(oracle.steps[0], z_loss=0.0), oracle.steps[1])
    expected = replace(oracle, steps=steps)
    for deviation in (0.0, 1e-17, 1e-3):
        record = perfect(expected)
        wrong = replace(record, steps=(replace(record.steps[0], z_loss=deviation), record.steps[1]))
        assert compare_records(expected, [wrong])[0].error == deviation


@pytest.mark.parametrize(
    "broken",
    [
        lambda tensor: tensor[:-1],
        lambda tensor: torch.full_like(tensor, torch.nan),
    ],
    ids=["shape", "not a number"],
)
def test_tensors_that_cannot_be_compared_are_infinitely_wrong(oracle, broken):
    record = perfect(oracle)
    record.weights["head.weight"] = broken(record.weights["head.weight"])
    worst = compare_records(oracle, [record])[0]
    assert (worst.name, worst.error) == ("weights head.weight", float("inf"))


def test_a_tensor_that_one_side_lacks_is_infinitely_wrong(oracle):
    record = perfect(oracle)
    record.weights["another"] = record.weights.pop("head.weight")
    found = [d for d in compare_records(oracle, [record]) if d.error > 0]
    assert {d.name for d in found} == {
        "weights another (missing on one side)",
        "weights head.weight (missing on one side)",
    }
    assert {d.error for d in found} == {float("inf")}


WEIGHTS = ("embedding.weight", *(f"layers.{i}.ffn.router.weight" for i in range(11)), "head.weight")
LAYERS_2_AND_10 = [f"{part} layers.{i}.ffn.router.weight" for part in ("gradients", "weights") for i in (2, 10)]


@pytest.mark.parametrize(
    ("numbers", "tensors"),
    [
        (["step 1 grad_norm (rank 0)", "step 2 layer 2 z_loss (rank 0)"], [1, 0, 3, 2]),
        (["step 1 layer 2 entropy (rank 0)", "step 1 layer 10 entropy (rank 0)"], [0, 1, 2, 3]),
    ],
    ids=["backward", "forward"],
)
def test_differences_begin_at_the_cause(numbers, tensors):
    """A gradient of the last layer makes those before it wrong, an output of the first layer all after it."""
    expected = ["initial embedding.weight", *(LAYERS_2_AND_10[i] for i in tensors), *numbers, "eval_loss (rank 1)"]
    differences = [NamedError(name, float(error)) for error, name in enumerate(expected)]
    found = sort_by_cause(reversed(differences), WEIGHTS)
    assert [difference.name for difference in found] == expected


def test_chunks_are_the_positions_of_each_rank_of_a_sample():
    recipe = tiny(world_size=2, tp=2)
    assert token_chunks(recipe.parallel, recipe.train) == [list(range(8)), list(range(8, 16))]
    cfg = tiny(world_size=2, cp=2)
    zigzag = token_chunks(cfg.parallel, cfg.train)
    assert zigzag == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))]
    given = tiny(world_size=4, cp=2, tp=2)
    assert sorted(sum(token_chunks(given.parallel, given.train), [])) == list(range(16))
