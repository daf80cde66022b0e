"""metrics.jsonl: appended and flushed each step, and cut back to the checkpoint on resume."""

import json
import math
from pathlib import Path

import pytest

from moefold.config.sections.metrics import MetricsConfig
from moefold.metrics.writer import MetricsWriter, to_record, truncate_metrics
from tests.metrics.example import STEP


def write_steps(run_dir: Path, first: int, last: int, *, resume_step: int = 0) -> int:
    with MetricsWriter(run_dir, MetricsConfig(), resume_step=resume_step) as writer:
        for step in range(first, last + 1):
            writer.write(STEP | {"step": step, "loss": float(first * 1000 + step)})
    return writer.removed_lines


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_step_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    with MetricsWriter(run_dir, MetricsConfig()) as writer:
        for step in (1, 2, 3):
            writer.write(STEP | {"step": step})
            text = (run_dir / "metrics.jsonl").read_text()
            assert text.endswith("\n")
            assert steps_in(run_dir / "metrics.jsonl") == list(range(1, step + 1))


def test_resume_replaces_the_steps_past_the_checkpoint(tmp_path: Path) -> None:
    assert write_steps(tmp_path, 1, 9) == 0
    assert write_steps(tmp_path, 6, 12, resume_step=5) == 4
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 13))
    assert [r["loss"] for r in records[:5]] == [1001, 1002, 1003, 1004, 1005]
    assert [r["loss"] for r in records[5:7]] == [6006, 6007]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    assert write_steps(tmp_path, 1, 2) == 3
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b"\x00\x00\x00", b"{", b'{"step": 4, "loss": 1.0}\n{"st'])
def test_incomplete_last_line_is_removed(tmp_path: Path, torn: bytes) -> None:
    write_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert write_steps(tmp_path, 4, 4, resume_step=3) == len(torn.split(b"\n"))
    assert path.read_bytes().startswith(whole)
    assert steps_in(path) == [1, 2, 3, 4]


def test_a_last_line_that_lacks_only_its_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert truncate_metrics(path, 2) == 0
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_nothing_to_cut_leaves_the_file_unchanged(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    inode = path.stat().st_ino
    assert truncate_metrics(path, 3) == 0
    assert path.stat().st_ino == inode
    assert truncate_metrics(tmp_path / "absent", 3) == 0
    assert not (tmp_path / "absent").exists()


def test_the_file_is_replaced_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the draft and the move leaves the old file whole, and the next start cleans up after it."""
    write_steps(tmp_path, 1, 9)
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            truncate_metrics(path, 5)
    assert path.read_bytes() == before
    assert truncate_metrics(path, 5) == 4
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_no_tracker_makes_no_other_file(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_held_out_loss_can_be_added_to_its_step(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with MetricsWriter(tmp_path, MetricsConfig(), resume_step=3) as writer:
        writer.write(STEP | {"step": 4, "eval_loss": None})
        assert [writer.lacks_evaluation(step) for step in (4, 5)] == [True, False]
        writer.add_evaluation(4, 1 / 3)
        assert not writer.lacks_evaluation(4)
        writer.write(STEP | {"step": 5, "eval_loss": None})
        writer.add_evaluation(5, math.nan)
        assert not writer.lacks_evaluation(5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:3] == before
    assert lines[3] == json.dumps(to_record(STEP | {"step": 4, "eval_loss": 1 / 3}))
    assert json.loads(lines[4])["nonfinite"]["eval_loss"] == "nan"
