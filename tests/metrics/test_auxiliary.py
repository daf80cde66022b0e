"""Outputs that fail: said once, and left out."""

import errno
from pathlib import Path

import pytest

from moefold.config.sections.metrics import MetricsConfig
from moefold.errors import ConfigError
from moefold.metrics.writer import AuxiliaryOutputs, MetricsWriter
from tests.metrics.example import STEP


def _raise(error: Exception) -> None:
    raise error


def test_an_output_that_fails_is_reported_once_and_left_out() -> None:
    said: list[str] = []
    outputs = AuxiliaryOutputs(said.append)
    assert outputs.attempt("a", lambda: 3) == 3
    for _ in range(3):
        assert outputs.attempt("a", lambda: _raise(OSError(errno.ENOSPC, "full"))) is None
    outputs.attempt("b", lambda: _raise(RuntimeError("the server\nis away")))
    assert outputs.attempt("c", lambda: 4) == 4
    assert [outputs.has_failed(name) for name in "abc"] == [True, True, False]
    assert len(said) == 2
    assert said[0].startswith("warning: a cannot be written any more (No space left on device): the run goes on")
    assert said[1].startswith("warning: b cannot be written any more (RuntimeError: the server): ")


def test_errors_of_others_and_wrong_settings_at_the_start_are_raised() -> None:
    outputs = AuxiliaryOutputs()
    with pytest.raises(RuntimeError):
        outputs.attempt("a", lambda: _raise(RuntimeError("a rank is lost")), (OSError,))
    outputs.rejects_settings = True
    with pytest.raises(ConfigError):
        outputs.attempt("a", lambda: _raise(ConfigError("metrics.jsonl is a folder")))
    assert not outputs.has_failed("a")


class _BrokenTracker:
    """A tracker whose server is away, and that would wait for it for ever at the end."""

    def log(self, metrics: object) -> None:
        raise ConnectionError("the server is away")

    def close(self) -> None:
        raise AssertionError("it is left alone")


def test_a_broken_tracker_leaves_the_metrics(tmp_path: Path) -> None:
    said: list[str] = []
    with MetricsWriter(tmp_path, MetricsConfig(), outputs=AuxiliaryOutputs(said.append)) as writer:
        writer._trackers["wandb"] = _BrokenTracker()  # type: ignore[assignment]
        for _ in range(2):
            writer.write(STEP)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [line.split(":")[1] for line in said] == [" wandb cannot be written any more (ConnectionError"]


def test_a_run_goes_on_without_a_run_folder_for_metrics(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    with MetricsWriter(tmp_path / "file/run", MetricsConfig(), outputs=AuxiliaryOutputs(said.append)) as writer:
        writer.write(STEP)
        writer.add_evaluation(STEP["step"], 1.0)
        assert not writer.lacks_evaluation(STEP["step"])
    assert len(said) == 1
