"""The loss picture: its inputs, the drawing, and its refusals."""

import json
import subprocess
import sys
from math import isnan, nan
from pathlib import Path

import pytest

from moefold.errors import ConfigError
from moefold.metrics.plot import plot_loss, read_curves, smooth


def write_metrics(run_dir: Path, records: list[dict[str, object]], tail: str = "") -> None:
    run_dir.mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "metrics.jsonl").write_text(lines + tail)


def record(step: int, **changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "step": step,
        "loss": 5.0 / step,
        "lr": 1e-3,
        "grad_norm": 2.0 / step,
        "tokens": 64 * step,
        "eval_loss": None,
    }
    return values | {"expert_load": [1.5, 1.1]} | changes


def picture_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_reads_the_curves_with_gaps_and_without_a_torn_line(tmp_path: Path) -> None:
    records = [record(1), record(2, loss=None, expert_load=[1.0, 2.0]), record(3, eval_loss=2.5)]
    write_metrics(tmp_path, records, tail='{"step": 4, "loss')
    curves = read_curves(tmp_path)
    assert curves.steps == [1, 2, 3]
    assert curves.loss[0] == 5.0
    assert isnan(curves.loss[1])
    assert (curves.eval_steps, curves.eval_loss) == ([3], [2.5])
    assert curves.worst_load == [1.5, 2.0, 1.5]
    assert curves.mean_load == pytest.approx([1.3, 1.5, 1.3])
    assert curves.tokens == 192
    assert (curves.lr, curves.grad_norm) == ([1e-3] * 3, pytest.approx([2.0, 1.0, 2 / 3]))


@pytest.mark.parametrize(
    "records",
    [
        [record(1)],
        [record(step, eval_loss=1.0 if step % 20 == 0 else None) for step in range(1, 101)],
        [record(step, expert_load=[]) for step in range(1, 51)],
        [record(step, loss=None, expert_load=[None, None]) for step in range(1, 31)],
    ],
    ids=["one step", "evaluated", "dense", "nothing finite"],
)
def test_draws_a_picture(tmp_path: Path, records: list[dict[str, object]]) -> None:
    write_metrics(tmp_path, records)
    path = plot_loss(tmp_path)
    assert path == tmp_path / "loss.png"
    # A panel less without experts.
    assert picture_size(path) == (1200, 1020 if records[0]["expert_load"] else 840)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


@pytest.mark.filterwarnings("error")
def test_a_name_that_the_font_cannot_draw_warns_of_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "ünï 你好 dir a$b_{c$d tab\tname"
    write_metrics(run_dir, [record(step) for step in range(1, 4)])
    assert picture_size(plot_loss(run_dir))[0] > 100


def test_the_picture_follows_the_numbers(tmp_path: Path) -> None:
    write_metrics(tmp_path, [record(step) for step in range(1, 40)])
    first = plot_loss(tmp_path).read_bytes()
    assert plot_loss(tmp_path).read_bytes() == first
    write_metrics(tmp_path, [record(step, loss=3.0) for step in range(1, 40)])
    assert plot_loss(tmp_path).read_bytes() != first


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_folder_without_metrics_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="holds no metrics to plot"):
        plot_loss(tmp_path)


def test_smooth_by_hand() -> None:
    assert smooth([1.0, 2.0, 6.0, 7.0, 9.0], 1) == pytest.approx([1.0, 3.0, 5.0, 22 / 3, 8.0])
    assert smooth([1.0, 2.0, 3.0, 4.0], 10) == [1.0, 2.0, 2.5, 2.5]
    assert smooth([], 3) == []


def test_smooth_keeps_a_straight_line_and_steps_over_nan() -> None:
    line = [float(i) for i in range(50)]
    assert smooth(line, 4)[:-4] == pytest.approx(line[:-4])
    assert smooth([2.0, nan, 4.0, 6.0], 1) == pytest.approx([2.0, 3.0, 5.0, 5.0])
    assert all(isnan(value) for value in smooth([nan, nan], 1))


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, moefold.metrics.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_of_reinforcement_learning_shows_rewards(tmp_path):
    rewards = [{"reward": step / 4, "eval_reward": 0.5 if step == 2 else None} for step in range(1, 4)]
    write_metrics(tmp_path, [record(step, rl=rl) for step, rl in enumerate(rewards, 1)])
    curves = read_curves(tmp_path)
    assert curves.is_reward
    assert curves.loss == [0.25, 0.5, 0.75]
    assert (curves.eval_steps, curves.eval_loss) == ([2], [0.5])
    assert plot_loss(tmp_path).stat().st_size > 0
