"""The table of rollouts that wait for training: order, skipped prompts, and its columns in a checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.prompts import Prompt
from moefold.errors import ConfigError
from moefold.rl.rollout import Rollout, RolloutGroup, StepPacking, split_steps
from moefold.rl.rollout_table import (
    FINISH_REASONS,
    TABLE_KEY,
    RolloutTable,
    Round,
    check_headers,
    empty_arrays,
    make_round,
    restore_table,
    table_headers,
)
from moefold.rl.round_statistics import RoundStatistics

GROUP_SIZE = 2
FUNCTIONS = [(), ("exact", "length"), ("a", "b", "c")]


def prompt_of(number: int) -> Prompt:
    return Prompt(source=f"p{number}", text=f"p{number}", ids=(number % 7, 3))


def group_of(number: int, rng: np.random.Generator) -> RolloutGroup:
    rollouts = []
    for sample in range(GROUP_SIZE):
        count = int(rng.integers(1, 5))
        rollouts.append(
            Rollout(
                prompt_number=number,
                sample_number=sample,
                prompt_ids=np.array(prompt_of(number).ids),
                tokens=rng.integers(0, 9, count),
                log_probs=rng.normal(size=count),
                finish_reason=FINISH_REASONS[int(rng.integers(3))],
            )
        )
    scores = np.where(rng.random(GROUP_SIZE) < 0.3, np.nan, rng.normal(size=GROUP_SIZE))
    return RolloutGroup(prompt_of(number), tuple(rollouts), scores, scores - 1)


def round_of(prompts: list[int], version: int, seed: int = 0, functions: tuple[str, ...] = ()) -> Round:
    rng = np.random.default_rng(seed)
    groups = [group_of(number, rng) for number in prompts]
    groups = [replace(one, by_function={name: rng.normal(size=GROUP_SIZE) for name in functions}) for one in groups]
    statistics = RoundStatistics().add(groups, 1.0, 2.0)
    return make_round(groups, version=version, prompts=prompts, statistics=statistics)


def test_rounds_are_trained_on_in_the_order_of_their_sampling():
    table = RolloutTable()
    assert table.next_prompt is None
    for version in range(3):
        table.add(round_of([2 * version, 2 * version + 1], version))
    assert table.next_prompt == 6
    assert [table.pop().version for _ in range(3)] == [0, 1, 2]
    assert not len(table)


@pytest.mark.parametrize(("skipped", "kept"), [([], [0, 1, 2]), ([range(3, 4)], [0, 2]), ([range(1, 5)], [])])
def test_rounds_with_skipped_prompts_are_dropped(skipped, kept):
    table = RolloutTable(round_of([2 * version, 2 * version + 1], version) for version in range(3))
    assert table.drop(skipped) == 3 - len(kept)
    assert [header["version"] for header in table.headers()] == kept


@pytest.mark.parametrize(
    ("versions", "step", "staleness", "updates", "num_kept"),
    [
        ([3, 4], 5, 2, 1, 2),
        ([3, 4], 5, 3, 1, 2),
        ([3, 4], 5, 1, 1, 0),
        ([5, 5], 5, 1, 1, 2),
        ([5, 3], 5, 1, 1, 1),
        ([0, 0, 0], 1, 3, 1, 3),
        ([0, 2], 4, 4, 2, 2),
        ([0, 2], 4, 2, 2, 0),
    ],
)
def test_rounds_of_older_weights_than_allowed_are_dropped_with_those_after(
    versions, step, staleness, updates, num_kept
):
    table = RolloutTable([round_of([i], version) for i, version in enumerate(versions)])
    assert table.drop_older(step, staleness, updates) == len(versions) - num_kept
    assert [table.pop().prompts for _ in range(len(table))] == [(i,) for i in range(num_kept)]


@given(sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(FUNCTIONS)), max_size=4), seed=st.integers(0, 99))
def test_a_checkpoint_has_every_row(sizes, seed):
    """Rounds may have other reward functions, as in a resumed run."""
    rounds = [
        round_of(list(range(10 * i, 10 * i + size)), i, seed + i, functions)
        for i, (size, functions) in enumerate(sizes)
    ]
    table = RolloutTable(rounds)
    arrays = table.arrays()
    headers = table_headers({TABLE_KEY: table.headers()})
    sized = empty_arrays(headers)
    assert {name: (values.shape, values.dtype) for name, values in sized.items()} == {
        name: (values.shape, values.dtype) for name, values in arrays.items()
    }
    restored = restore_table(headers, arrays, prompt_of, GROUP_SIZE)
    assert restored.headers() == table.headers()
    for expected in rounds:
        found = restored.pop()
        assert found.version == expected.version
        assert found.prompts == expected.prompts
        for left, right in zip(found.groups, expected.groups, strict=True):
            assert left.prompt == right.prompt
            assert np.array_equal(left.scores, right.scores, equal_nan=True)
            assert np.array_equal(left.rewards, right.rewards, equal_nan=True)
            assert left.by_function.keys() == right.by_function.keys()
            assert all(np.array_equal(left.by_function[name], right.by_function[name]) for name in left.by_function)
            for one, other in zip(left.rollouts, right.rollouts, strict=True):
                assert (one.prompt_number, one.sample_number) == (other.prompt_number, other.sample_number)
                assert one.finish_reason == other.finish_reason
                for name in ("prompt_ids", "tokens", "log_probs"):
                    assert np.array_equal(getattr(one, name), getattr(other, name))


def test_rounds_of_other_sizes_are_refused():
    headers = RolloutTable([round_of([0, 1], 0)]).headers()
    cfg = Config(rl=RLConfig(group_size=2), train=TrainConfig(global_batch_size=4))
    check_headers(headers, cfg.train, cfg.rl)
    for group_size, batch in ((4, 4), (2, 8)):
        other = Config(rl=RLConfig(group_size=group_size), train=TrainConfig(global_batch_size=batch))
        with pytest.raises(ConfigError, match=f"4 a round in groups of 2, and the recipe needs {batch} in groups of"):
            check_headers(headers, other.train, other.rl)


@pytest.mark.parametrize(
    "damage",
    [
        {"version": -1},
        {"prompts": []},
        {"groups": 0},
        {"tokens": 1.5},
        {"rollouts": None},
        {"more": 1},
        {"reward_functions": []},
    ],
)
def test_a_damaged_header_is_not_a_header(damage):
    (header,) = RolloutTable([round_of([0, 1], 0)]).headers()
    with pytest.raises(TypeError):
        table_headers({TABLE_KEY: [header | damage]})


def test_data_parallel_ranks_have_all_rows_of_a_step_between_them():
    one = round_of(list(range(6)), 0)
    train = TrainConfig(seq_len=8, micro_batch_size=1, global_batch_size=6)
    alone = Config(rl=RLConfig(group_size=GROUP_SIZE), train=train)
    two = replace(alone, parallel=ParallelConfig(world_size=2))
    for groups in split_steps(one.groups, 2):
        expected = StepPacking(alone.parallel, alone.train, alone.rl, alone.rollout, 0).rows(groups, 0)
        packing = StepPacking(two.parallel, two.train, two.rl, two.rollout, 0)
        parts = [packing.rows(groups, rank) for rank in range(2)]
        assert [part.first for part in parts] == [0, parts[0].num_micro_batches]
        columns = [part.samples.token_columns for part in (expected, *parts)]
        for name, values in columns[0].items():
            found = np.concatenate([part[name] for part in columns[1:]])
            assert np.array_equal(found[: len(values)], values)
        tokens = np.concatenate([part.samples.tokens for part in parts])
        assert np.array_equal(tokens[: len(expected.samples.tokens)], expected.samples.tokens)
        weights = np.concatenate([part.samples.weights for part in parts])
        assert weights[len(expected.samples.tokens) :].sum() == 0
