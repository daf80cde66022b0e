"""The record of kernel times: of one device and one version of the libraries. Entries not understood are named."""

import json
import logging

import pytest

from moefold.ops.kernel_times import add_times, read_times

H100 = {"format": "1", "device": "NVIDIA H100", "torch": "2.11.0", "triton": "3.6.0"}
TIMES = {"product: 64, True": {11: {"first": 2.0, "second": 1.5}}}


def test_times_are_found_again_and_added_to(tmp_path):
    path = add_times(H100, TIMES, tmp_path)
    assert path is not None
    assert path.parent == tmp_path
    assert read_times(H100, tmp_path) == TIMES
    newer = {"product: 64, True": {3: {"first": 0.5, "second": 0.6}}, "weights: 8": {1: {"a": 1.0, "b": 2.0}}}
    assert add_times(H100, newer, tmp_path) == path
    merged = {"product: 64, True": TIMES["product: 64, True"] | newer["product: 64, True"]} | {
        "weights: 8": newer["weights: 8"]
    }
    assert read_times(H100, tmp_path) == merged
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("part", ["device", "torch", "triton", "format"])
def test_times_of_another_environment_are_not_used(tmp_path, part):
    add_times(H100, TIMES, tmp_path)
    assert read_times(H100 | {part: "another"}, tmp_path) == {}


def test_a_file_under_the_name_of_another_environment_is_named(tmp_path, caplog):
    path = add_times(H100, TIMES, tmp_path)
    newer = H100 | {"torch": "2.13.0"}
    other = add_times(newer, TIMES, tmp_path)
    other.write_bytes(path.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert read_times(newer, tmp_path) == {}
    assert "2.11.0" in caplog.text
    assert "they are measured again" in caplog.text


def test_octaves_with_a_candidate_that_raised_are_not_recorded(tmp_path):
    failed = {"first": 1.0, "second": float("inf")}
    add_times(H100, TIMES | {"weights: 8": {4: failed}}, tmp_path)
    assert read_times(H100, tmp_path) == TIMES


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "is not an object of"),
        ('{"environment": {}, "ms": {}, "more": 1}', "is not an object of"),
        ({"product": []}, "'product' has no times by octave"),
        ({"product": {"x": {"a": 1, "b": 2}}}, "'x' of 'product' is not an octave"),
        ({"product": {"3": {"a": 1}}}, "'3' of 'product' is not an octave"),
        ({"product": {"3": {"a": 1, "b": "fast"}}}, "'b' of 'product' takes 'fast' ms"),
        ({"product": {"3": {"a": True, "b": 1}}}, "'a' of 'product' takes True ms"),
        ({"product": {"3": {"a": -1, "b": 1}}}, "'a' of 'product' takes -1 ms"),
        ('{"environment": ENV, "ms": {"product": {"3": {"a": NaN, "b": 1}}}}', "takes nan ms"),
    ],
)
def test_entries_that_are_not_understood_are_named(tmp_path, caplog, content, reason):
    path = add_times(H100, TIMES, tmp_path)
    text = content if isinstance(content, str) else json.dumps({"environment": H100, "ms": content})
    path.write_text(text.replace("ENV", json.dumps(H100)))
    with caplog.at_level(logging.WARNING):
        assert read_times(H100, tmp_path) == {}
    assert reason in caplog.text
    assert str(path) in caplog.text
    # Measured again, it is replaced.
    add_times(H100, TIMES, tmp_path)
    assert read_times(H100, tmp_path) == TIMES


def test_a_folder_that_cannot_be_written_is_named(tmp_path, caplog, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(blocked))
    assert add_times(H100, TIMES, blocked) is None
    assert "cannot be written" in caplog.text
