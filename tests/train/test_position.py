"""The position of a run counts steps, samples and tokens through skips and rollbacks."""

import json

from moefold.train.position import Position


def test_a_step_without_update_counts_its_samples_and_not_its_tokens():
    position = Position()
    position.advance(range(4), 30, is_updated=True)
    # Samples 4 and 6 are skipped.
    position.advance([5, 7], 20, is_updated=False)
    assert position == Position(step=2, samples=8, tokens=30, tokens_consumed=50)


def test_a_position_keeps_the_samples_that_it_skips_through_a_rollback():
    position = Position(step=4, samples=20, skipped=[(8, 12)])
    saved = json.loads(json.dumps(position.state_dict()))
    position.skip(12, 17)
    position.adopt(7)
    position.load_state_dict(saved)
    assert (position.step, position.skipped_ranges) == (4, (range(8, 12), range(12, 17)))
    assert json.loads(json.dumps(position.state_dict()))["skipped"] == [[8, 12], [12, 17]]
    # Samples of other data: the samples that this run skips stay.
    other = Position(samples=20, skipped=[(0, 4)])
    other.restart_data(is_other=True)
    other.load_state_dict(saved)
    assert (other.step, other.samples, other.skipped) == (4, 0, [(0, 4)])
    assert "restarts_data" not in other.state_dict()


def test_an_old_checkpoint_has_one_count_of_tokens():
    position = Position()
    position.load_state_dict({"step": 3, "samples": 12, "tokens": 90, "skipped": [], "of_a_later_version": 1})
    assert position == Position(step=3, samples=12, tokens=90, tokens_consumed=90)
