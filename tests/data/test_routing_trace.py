"""Test that a routing trace is read as it was written, and refused with a reason if it cannot be replayed."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from moefold.config.sections.moe import TRACE_FOLDER
from moefold.data.routing_trace import (
    MANIFEST,
    RoutingTrace,
    RoutingTraceWriter,
    TraceShape,
    expert_index_dtype,
    traced_steps,
    truncate_trace,
)
from moefold.data.shard_reader import BrokenShardError
from moefold.errors import ConfigError

SHAPE = TraceShape(layers=(1, 3), num_experts=8, top_k=2, global_batch_size=4, seq_len=6)


def _choices(step: int, shape: TraceShape = SHAPE) -> np.ndarray:
    """Random experts, no two of a token the same."""
    first, *others = shape.file_shape
    tokens = int(np.prod([first, *others[:2]]))
    draw = np.random.default_rng(step)
    chosen = [draw.choice(shape.num_experts, shape.top_k, replace=False) for _ in range(tokens)]
    return np.array(chosen).reshape(shape.file_shape).astype(shape.dtype)


def _write(run_dir, steps, shape: TraceShape = SHAPE) -> RoutingTrace:
    writer = RoutingTraceWriter(run_dir, shape)
    for step in steps:
        writer.write(step, iter(_choices(step, shape)))
    return RoutingTrace(run_dir, "moe.replay")


@pytest.mark.parametrize(
    ("num_experts", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "int16"), (32768, "int16"), (32769, "int32")],
)
def test_the_smallest_type_that_holds_every_expert(num_experts, name):
    assert expert_index_dtype(num_experts) == np.dtype(name)
    assert np.array(num_experts - 1).astype(name) == num_experts - 1


@pytest.mark.parametrize("num_experts", [8, 300, 40_000])
def test_written_records_are_read(tmp_path, num_experts):
    shape = replace(SHAPE, num_experts=num_experts)
    trace = _write(tmp_path, [1, 5], shape)
    assert (trace.shape, trace.steps) == (shape, [1, 5])
    for step in (1, 5):
        np.testing.assert_array_equal([*trace.step(step)], _choices(step, shape))
        plain = np.load(tmp_path / TRACE_FOLDER / f"step-{step:06d}.npy")
        assert (plain.dtype, plain.shape) == (shape.dtype, (2, 4, 6, 2))


def test_a_trace_is_found_by_its_run_and_by_its_folder(tmp_path):
    _write(tmp_path, [1])
    assert RoutingTrace(tmp_path / TRACE_FOLDER, "x").steps == RoutingTrace(tmp_path, "x").steps == [1]


def test_a_resumed_run_repeats_the_steps_past_its_checkpoint(tmp_path):
    _write(tmp_path, [1, 2, 3])
    (tmp_path / TRACE_FOLDER / ".step-000004.npy.tmp").touch()
    RoutingTraceWriter(tmp_path, SHAPE, resume_step=2)
    assert traced_steps(tmp_path / TRACE_FOLDER) == [1, 2]
    assert sorted(path.name for path in (tmp_path / TRACE_FOLDER).iterdir()) == [
        "step-000001.npy",
        "step-000002.npy",
        MANIFEST,
    ]
    truncate_trace(tmp_path, 0)
    assert traced_steps(tmp_path / TRACE_FOLDER) == []


@pytest.mark.parametrize("change", [{"global_batch_size": 8}, {"seq_len": 12}, {"num_experts": 300}])
def test_steps_of_another_shape_go(tmp_path, change):
    _write(tmp_path, [1, 2, 3])
    shape = replace(SHAPE, **change)
    writer = RoutingTraceWriter(tmp_path, shape, resume_step=2)
    assert writer.num_dropped == 2
    writer.write(3, iter(_choices(3, shape)))
    trace = RoutingTrace(tmp_path, "run")
    assert (trace.shape, trace.steps) == (shape, [3])
    np.testing.assert_array_equal([*trace.step(3)], _choices(3, shape))


def test_steps_of_the_same_shape_stay_and_those_without_a_manifest_go(tmp_path):
    _write(tmp_path, [1, 2, 3])
    assert RoutingTraceWriter(tmp_path, SHAPE, resume_step=3).num_dropped == 0
    (tmp_path / TRACE_FOLDER / MANIFEST).write_text("torn")
    assert RoutingTraceWriter(tmp_path, SHAPE, resume_step=3).num_dropped == 3


def test_a_run_without_a_trace_has_nothing_to_truncate(tmp_path):
    truncate_trace(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (1,)}, r"traced with the MoE layers=\[1, 3\], and this run has \[1\]"),
        ({"num_experts": 16}, "traced with model.ffn.moe.num_experts=8, and this run has 16"),
        ({"zero_experts": 2}, "traced with model.ffn.moe.zero_experts=0, and this run has 2"),
        ({"top_k": 1}, "traced with model.ffn.moe.top_k=2, and this run has 1"),
        ({"global_batch_size": 8}, "traced with train.global_batch_size=4, and this run has 8"),
        ({"seq_len": 5}, "traced with train.seq_len=6, and this run has 5"),
    ],
)
def test_a_trace_of_another_shape_is_refused(tmp_path, change, message):
    trace = _write(tmp_path, [1])
    with pytest.raises(ConfigError, match=message):
        trace.check_replay(replace(SHAPE, **change), 1)


def test_every_difference_is_named_at_once(tmp_path):
    trace = _write(tmp_path, [1])
    with pytest.raises(ConfigError) as caught:
        trace.check_replay(replace(SHAPE, top_k=1, seq_len=5), 1)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([1, 2], "step 3 is missing; it holds 2 steps, 1 to 2; choose run.steps=2 or less"),
        ([2, 4], "step 1 is missing; it holds 2 steps, 2 to 4"),
        ([], "step 1 is missing; it holds no step"),
    ],
)
def test_missing_steps_are_refused(tmp_path, steps, message):
    trace = _write(tmp_path, steps)
    with pytest.raises(ConfigError, match=message):
        trace.check_replay(SHAPE, 4)


def test_a_whole_trace_can_be_replayed(tmp_path):
    _write(tmp_path, [1, 2, 3]).check_replay(SHAPE, 2)


def test_damaged_files_are_refused(tmp_path):
    trace = _write(tmp_path, [1, 2, 3])
    (tmp_path / TRACE_FOLDER / "step-000001.npy").write_bytes(b"torn")
    np.save(tmp_path / TRACE_FOLDER / "step-000002.npy", np.zeros((1, 2), np.uint8))
    with pytest.raises(ConfigError, match="step-000001.npy cannot be read"):
        trace.check_replay(SHAPE, 3)
    with pytest.raises(
        ConfigError, match=r"step-000002.npy holds uint8 \(1, 2\), but its manifest requires uint8 \(2, 4"
    ):
        trace.step(2)
    with pytest.raises(ConfigError, match="has no step 4"):
        trace.step(4)


def _spoil(run_dir, step: int, value: int) -> RoutingTrace:
    path = run_dir / TRACE_FOLDER / f"step-{step:06d}.npy"
    choices = np.load(path)
    choices[1, 3, 5, 0] = choices[1, 3, 5, 1] if value < 0 else value
    np.save(path, choices)
    return RoutingTrace(run_dir, "moe.replay")


def test_the_content_of_every_step_is_read_before_the_run(tmp_path):
    _write(tmp_path, [1, 2, 3]).check_content(3)
    trace = _spoil(tmp_path, 3, 9)
    trace.check_content(2)
    with pytest.raises(ConfigError, match=r"moe.replay='.*' names expert 9 in step 3, and there are 8"):
        trace.check_content(3)


def test_a_token_that_has_an_expert_twice_is_refused(tmp_path):
    _write(tmp_path, [1, 2, 3])
    trace = _spoil(tmp_path, 2, -1)
    trace.check_replay(SHAPE, 3)
    with pytest.raises(ConfigError, match="position 5 of sample 3 twice to one expert in step 2, layer 3: the 2 choic"):
        trace.check_content(3)


@pytest.mark.parametrize("number", [8, 255])
def test_an_expert_that_does_not_exist_is_refused(number):
    choices = np.zeros((2, 3), np.uint8)
    assert np.array_equal(SHAPE.check_expert_indices(choices, 1), choices)
    choices[1, 2] = number
    with pytest.raises(ConfigError, match=f"names expert {number} in step 7, and there are 8"):
        SHAPE.check_expert_indices(choices, 7)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "other"}', '{"format": "moefold-routing-1", "layers": 3}'],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match=r"moe.replay='.*' has a trace.json that is not a moefold-routing-1 manifest"):
        RoutingTrace(tmp_path, "moe.replay")


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no routing trace"):
        RoutingTrace(tmp_path, "moe.replay")
    with pytest.raises(ConfigError, match="does not exist"):
        RoutingTrace(tmp_path / "absent", "moe.replay")


def test_the_manifest_is_plain_json(tmp_path):
    _write(tmp_path, [])
    record = json.loads((tmp_path / TRACE_FOLDER / MANIFEST).read_text())
    assert record == {
        "format": "moefold-routing-1",
        "layers": [1, 3],
        "num_experts": 8,
        "zero_experts": 0,
        "top_k": 2,
        "global_batch_size": 4,
        "seq_len": 6,
    }


def test_a_step_that_is_cut_under_the_run_is_named(tmp_path):
    step = _write(tmp_path, [1]).step(1)
    path = tmp_path / TRACE_FOLDER / "step-000001.npy"
    os.truncate(path, path.stat().st_size - 1)
    num_layers, num_samples, *_ = SHAPE.file_shape
    with pytest.raises(BrokenShardError, match=r"step-000001.npy broke while the run read it"):
        step.samples(num_layers - 1, 0, num_samples)


def test_a_step_that_is_not_written_row_by_row_is_refused(tmp_path):
    trace = _write(tmp_path, [1])
    np.save(tmp_path / TRACE_FOLDER / "step-000001.npy", np.asfortranarray(_choices(1, SHAPE)))
    with pytest.raises(ConfigError, match="step-000001.npy is not a C-contiguous array"):
        trace.step(1)
