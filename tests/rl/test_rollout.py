"""Weights, advantages and packing of rollouts."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.sections.rl import RLConfig
from moefold.data.prompts import Prompt
from moefold.data.sample import stack_samples
from moefold.rl.plateau import Plateau
from moefold.rl.rollout import (
    Rollout,
    RolloutGroup,
    adjust_rewards,
    empty_sample,
    pack_rollouts,
    rollout_positions,
    weigh_rollouts,
)
from moefold.rl.round_statistics import RoundStatistics

SEQ_LEN = 24
END = 0


def rollout(prompt_tokens: int, tokens: int, number: int = 0, *, is_truncated: bool = False) -> Rollout:
    """A rollout whose tokens say where they come from."""
    return Rollout(
        prompt_number=number,
        sample_number=0,
        prompt_ids=1000 + np.arange(prompt_tokens),
        tokens=2000 + 100 * number + np.arange(tokens),
        log_probs=-(1 + np.arange(tokens, dtype=np.float64)),
        finish_reason="length" if is_truncated else "eos",
    )


def group(rewards: list[float], lengths: list[int], *, truncated: tuple[int, ...] = ()) -> RolloutGroup:
    rollouts = tuple(rollout(3, n, i, is_truncated=i in truncated) for i, n in enumerate(lengths))
    scores = np.array(rewards)
    return RolloutGroup(Prompt("p", "p", (1, 2, 3)), rollouts, scores, scores)


@given(st.lists(st.tuples(st.integers(1, 10), st.integers(1, 15)), min_size=1, max_size=20))
@settings(max_examples=50)
def test_packing_keeps_every_token_and_trains_exactly_the_sampled_ones(sizes):
    rollouts = [rollout(p, n, i) for i, (p, n) in enumerate(sizes)]
    groups = [RolloutGroup(Prompt("p", "p", (1,)), (one,), np.zeros(1), np.zeros(1)) for one in rollouts]
    weighed = weigh_rollouts(groups, RLConfig(group_size=2), 15)
    batch = stack_samples([*pack_rollouts(weighed, seq_len=SEQ_LEN, pad_id=END), empty_sample(SEQ_LEN, END)], SEQ_LEN)
    assert batch.weights is not None
    trained = batch.weights != 0
    expected = np.sort(np.concatenate([one.tokens for one in rollouts]))
    assert np.sort(batch.labels[trained]).tolist() == expected.tolist()
    assert (trained == (batch.token_columns["sequence_ids"] >= 0)).all()
    assert batch.weights.sum() == pytest.approx(1)
    # The log-probability -(1 + k) belongs to token k of a completion.
    assert (batch.token_columns["old_log_probs"][trained] == -(1 + batch.labels[trained] % 100)).all()
    target_weights = batch.target_weights()
    assert target_weights is not None
    assert (target_weights == batch.weights).all()
    starts = batch.document_starts()
    assert starts is not None
    assert not trained[-1].any()
    _assert_positions(rollouts, batch.inputs)


def _assert_positions(rollouts: list[Rollout], inputs_NS: np.ndarray) -> None:
    """Each input is the token of its rollout, and padding is of no rollout; only last inputs may be missing."""
    index_NS, offset_NS = rollout_positions(rollouts, seq_len=SEQ_LEN, num_samples=len(inputs_NS))
    texts = [np.concatenate((one.prompt_ids, one.tokens)) for one in rollouts]
    for index, offset, token in zip(index_NS.flat, offset_NS.flat, inputs_NS.flat, strict=True):
        assert token == (END if index < 0 else texts[index][offset])
    found = sorted(zip(index_NS[index_NS >= 0].tolist(), offset_NS[index_NS >= 0].tolist(), strict=True))
    routed = [(i, offset) for i, text in enumerate(texts) for offset in range(len(text) - 1)]
    assert set(routed) <= set(found)
    assert len(set(found)) == len(found)


def test_rollout_weights_of_each_loss_mean():
    groups = [group([1, 0], [2, 6]), group([1, 1], [4, 4])]
    token, per_rollout, constant = (
        [one.weight for one in weigh_rollouts(groups, RLConfig(group_size=2, loss_mean=mean), 8)]
        for mean in ("token", "rollout", "constant")
    )
    assert token == [1 / 16] * 4
    assert per_rollout == pytest.approx([1 / 8, 1 / 24, 1 / 16, 1 / 16])
    assert constant == [1 / 32] * 4


def test_ignored_and_unscored_rollouts_count_in_no_denominator():
    groups = [group([1, 0, np.nan], [2, 6, 3], truncated=(1,))]
    weights = [one.weight for one in weigh_rollouts(groups, RLConfig(group_size=3, truncated="ignore"), 8)]
    assert weights == [1 / 2, 0, 0]
    assert all(np.isfinite(one.advantage) for one in weigh_rollouts(groups, RLConfig(group_size=3), 8))


def test_rewards_of_truncated_and_long_rollouts():
    found = group([1.0, 1.0, 1.0], [2, 6, 8], truncated=(2,))
    rl = RLConfig(group_size=3, truncated="zero", length_penalty_from=4)
    assert adjust_rewards(found.scores, found.rollouts, rl, 8).tolist() == [1.0, 0.5, -1.0]


def test_statistics_of_a_round():
    groups = [group([1, 1], [2, 6]), group([1, 0], [4, 8], truncated=(1,)), group([np.nan, np.nan], [1, 1])]
    statistics = RoundStatistics().add(groups, 2.0, 1.0)
    metrics = statistics.metrics(groups[:2])
    assert metrics["reward"] == 0.75
    assert metrics["solved"] == 0.5
    assert metrics["mixed_groups"] == pytest.approx(1 / 3)
    assert metrics["truncated"] == 0.25
    assert (metrics["length_mean"], metrics["length_max"]) == (5, 8)
    assert metrics["dropped"] == 1
    assert metrics["rollout_tokens_per_s"] == 11
    assert RoundStatistics().add(groups[2:], 1.0, 1.0).metrics(groups[2:])["reward"] is None


def test_a_plateau_counts_evaluations_since_the_best():
    state = Plateau()
    counts = []
    for reward in (0.1, 0.3, 0.3, 0.2, 0.4):
        state = state.record(reward)
        counts.append(state.num_since_best)
    assert counts == [0, 0, 1, 2, 0]
    assert state.best == 0.4


@pytest.mark.parametrize(
    "state",
    [3, {}, {"best": 1.0}, asdict(Plateau()) | {"best": "x"}, asdict(Plateau()) | {"reference": 3}],
)
def test_a_broken_state_of_a_checkpoint_is_refused(state):
    with pytest.raises(TypeError):
        Plateau.from_json(state)


def test_the_state_of_a_checkpoint_is_restored():
    state = Plateau(best=0.5, num_since_best=2, num_resets=1, reference="runs/a", reference_folder="runs/a/1")
    assert Plateau.from_json(asdict(state)) == state
    assert Plateau.from_json(None) == Plateau()
    # Earlier versions recorded neither the adapters of the reference nor a digest, and no evaluation to make up.
    new = ("reference_adapters", "reference_digest", "lacks_evaluation")
    assert Plateau.from_json({name: value for name, value in asdict(state).items() if name not in new}) == state
