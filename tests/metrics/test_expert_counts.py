"""expert_counts.bin: append, resume, torn ends."""

import numpy as np
import pytest

from moefold.errors import ConfigError
from moefold.metrics.expert_counts import COUNTS_FILE, ExpertCountsWriter, read_expert_counts, truncate_expert_counts

LAYERS, E = (0, 2, 5), 4


def _counts(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 2**32, (len(LAYERS), E), dtype=np.uint32)


def _write(run_dir, steps, resume_step: int = 0) -> None:
    with ExpertCountsWriter(run_dir, LAYERS, E, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, _counts(step).astype(np.int64))


def _assert_holds(run_dir, steps) -> None:
    found = read_expert_counts(run_dir)
    assert found is not None
    assert found.layers == LAYERS
    assert found.steps.tolist() == list(steps)
    assert found.counts.shape == (len(steps), len(LAYERS), E)
    for i, step in enumerate(steps):
        np.testing.assert_array_equal(found.counts[i], _counts(step))


def test_written_records_are_read(tmp_path):
    _write(tmp_path, [1, 2, 30])
    _assert_holds(tmp_path, [1, 2, 30])
    assert (tmp_path / COUNTS_FILE).stat().st_size == 128 + 3 * (8 + 4 * len(LAYERS) * E)


def test_it_can_be_read_with_only_numpy(tmp_path):
    _write(tmp_path, [7])
    record = np.dtype([("step", "<i8"), ("counts", "<u4", (len(LAYERS), E))])
    (only,) = np.fromfile(tmp_path / COUNTS_FILE, record, offset=128)
    assert only["step"] == 7
    np.testing.assert_array_equal(only["counts"], _counts(7))


def test_counts_are_empty_before_the_first_step(tmp_path):
    assert read_expert_counts(tmp_path) is None
    _write(tmp_path, [])
    _assert_holds(tmp_path, [])


@pytest.mark.parametrize("resume_step", [0, 2, 3, 9])
def test_resumed_run_continues_after_its_checkpoint(tmp_path, resume_step):
    _write(tmp_path, [1, 2, 3, 4])
    _write(tmp_path, [resume_step + 1], resume_step)
    _assert_holds(tmp_path, [*(step for step in (1, 2, 3, 4) if step <= resume_step), resume_step + 1])


def test_a_torn_record_is_left_out_and_dropped(tmp_path):
    _write(tmp_path, [1, 2])
    path = tmp_path / COUNTS_FILE
    path.write_bytes(path.read_bytes()[:-5])
    _assert_holds(tmp_path, [1])
    _write(tmp_path, [2], resume_step=2)
    _assert_holds(tmp_path, [1, 2])


def test_a_run_that_stops_counting_keeps_nothing_past_its_checkpoint(tmp_path):
    truncate_expert_counts(tmp_path, 0)
    assert not (tmp_path / COUNTS_FILE).exists()
    _write(tmp_path, [1, 2, 3])
    truncate_expert_counts(tmp_path, 1)
    _assert_holds(tmp_path, [1])


def test_counts_of_another_model_are_replaced(tmp_path):
    with ExpertCountsWriter(tmp_path, (0,), 64) as writer:
        writer.write(1, np.ones((1, 64)))
    _write(tmp_path, [1])
    _assert_holds(tmp_path, [1])


@pytest.mark.parametrize("content", [b"", b"something else\n", b'{"layers": [0], "num_experts": 4}\n'])
def test_a_file_of_another_kind_is_refused_and_a_run_replaces_it(tmp_path, content):
    (tmp_path / COUNTS_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="is not a file of expert counts"):
        read_expert_counts(tmp_path)
    _write(tmp_path, [1])
    _assert_holds(tmp_path, [1])
