"""Runs are found, and read as training writes, resumes and breaks them."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moefold.board import expert_tail, run_reader
from moefold.board.rollout_index import RolloutQuery
from moefold.board.run_finder import find_runs
from moefold.board.run_list import RunList, unused_style
from moefold.board.run_reader import RunReader
from moefold.data.routing_trace import RoutingTraceWriter, TraceShape
from moefold.errors import ConfigError
from moefold.metrics.expert_counts import ExpertCountsWriter
from moefold.metrics.writer import MetricsWriter, to_record
from tests.board.run_files import HOSTILE, step_metrics, write_faults, write_rollouts, write_run


def open_run(run_dir) -> RunReader:
    (found,) = find_runs([run_dir])
    reader = RunReader(found)
    reader.read()
    return reader


def shares(reader: RunReader) -> np.ndarray:
    experts = reader.experts()["experts"]
    shape = (len(experts["steps"]), len(experts["numbers"]), experts["num_experts"])
    return np.frombuffer(base64.b64decode(experts["shares"]), np.uint8).reshape(shape)


def test_a_run_has_all_that_training_wrote(tmp_path):
    run_dir = write_run(tmp_path / "run")
    write_faults(run_dir)
    reader = open_run(run_dir)
    summary = reader.summary()
    assert (summary["name"], summary["state"], summary["step"], summary["steps"]) == ("run", "finished", 30, 30)
    assert (summary["loss"], summary["mapping"], summary["problems"]) == (5.0 / 30, "1 rank", [])
    series = reader.series()
    assert series["series"]["loss"]["steps"] == list(range(1, 31))
    assert series["series"]["loss"]["values"] == pytest.approx([5.0 / step for step in range(1, 31)], rel=1e-6)
    assert series["series"]["eval_loss"]["steps"] == [10, 20, 30]
    assert series["axes"]["tokens"]["values"][-1] == 30 * 2048
    assert series["axes"]["time_s"]["values"][-1] == 15.0
    layers = reader.experts()["layers"]
    assert (layers["numbers"], len(layers["load"]), layers["load"][-1]) == ([0, 1], 30, [1.5, 1.3])
    # Even experts are the middle of the scale; twice the mean is a quarter above it; 0 is an expert without tokens.
    assert shares(reader)[-1].tolist() == [[128, 128, 128, 128], [128, 128, 191, 0]]
    memory = reader.memory()["memory"]
    assert (memory["step"], memory["peak_bytes"]["weights"]) == (30, [2**31, 2**30])
    ranks = reader.ranks()
    assert {one["rank"]: one["steps"] for one in ranks["slowest"]} == {0: 15, 1: 15}
    assert [one["host"] for one in ranks["stragglers"]] == ["node-7"]
    faults = reader.faults()
    assert (faults["total"], [one["kind"] for one in faults["faults"]]) == (2, ["spike", "straggler"])
    assert faults["faults"][0]["loss"] == "nan"
    assert reader.recipe()["settings"]["run.steps"] == 30


def test_a_running_job_is_followed(tmp_path):
    run_dir = write_run(tmp_path / "run", 4)
    reader = open_run(run_dir)
    before = reader.summary()["version"]
    reader.read()
    assert reader.summary()["version"] == before
    # The lock of a run folder belongs to a process: another one holds it.
    code = "import sys; from moefold.host.folder_lock import FolderLock; from pathlib import Path\n"
    code += f"with FolderLock(Path({str(run_dir)!r}), 'run.dir', 0):\n  print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"locked\n"
        assert reader.summary()["state"] == "running"
        job.communicate()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(to_record(step_metrics(5))) + "\n")
    reader.read()
    summary = reader.summary()
    assert (summary["step"], summary["state"]) == (5, "finished")
    assert summary["version"] != before


def test_a_resumed_run_replaces_its_later_steps(tmp_path):
    run_dir = write_run(tmp_path / "run", 20)
    write_rollouts(run_dir)
    reader = open_run(run_dir)
    write_run(run_dir, 15, resume_step=10)
    (run_dir / "rollouts.jsonl").unlink()
    reader.read()
    assert reader.summary()["step"] == 15
    assert reader.series()["series"]["loss"]["steps"] == list(range(1, 16))
    assert reader.experts()["experts"]["steps"] == [[step, step] for step in range(1, 16)]
    assert reader.rollouts(RolloutQuery())["total"] == 0


def test_counts_truncated_between_two_reads_are_read_again(tmp_path):
    run_dir = write_run(tmp_path / "run", 6)
    reader = open_run(run_dir)
    with ExpertCountsWriter(run_dir, (0, 1), 4, resume_step=3) as writer:
        for step in (4, 5, 6, 7):
            writer.write(step, np.array([[0, 0, 0, 8], [1, 1, 1, 1]]))
    reader.read()
    assert reader.experts()["experts"]["steps"][-1] == [7, 7]
    assert shares(reader)[3:, 0].tolist() == [[0, 0, 0, 255]] * 4
    assert shares(reader)[:3, 0].tolist() == [[128] * 4] * 3


def test_without_counts_a_trace_is_read_and_read_again_after_a_resume(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run", 3)
    (run_dir / "expert_counts.bin").unlink()
    shape = TraceShape(layers=(1, 3), num_experts=4, top_k=2, global_batch_size=2, seq_len=8)

    def trace(steps: range, expert: int) -> None:
        writer = RoutingTraceWriter(run_dir, shape, resume_step=steps.start - 1)
        for step in steps:
            even = np.arange(32, dtype=np.uint8).reshape(2, 8, 2) % 4
            writer.write(step, [even, np.full((2, 8, 2), expert, np.uint8)])

    trace(range(1, 4), 0)
    reader = open_run(run_dir)
    experts = reader.experts()["experts"]
    assert (experts["numbers"], experts["steps"], experts["is_sampled"]) == ([1, 3], [[1, 1], [2, 2], [3, 3]], False)
    assert shares(reader).tolist() == [[[128, 128, 128, 128], [255, 0, 0, 0]]] * 3
    version = reader.summary()["version"]
    trace(range(2, 6), 3)
    # A call reads about one step of 64 choices; of a step with more, the first sample.
    monkeypatch.setattr("moefold.board.expert_tail.MAX_READ_CHOICES", 40)
    reader.read()
    assert reader.summary()["has_more"]
    while reader.summary()["has_more"]:
        reader.read()
    assert reader.summary()["version"] != version
    assert reader.experts()["experts"]["is_sampled"]
    assert shares(reader)[:, 1].tolist() == [[255, 0, 0, 0], *[[0, 0, 0, 255]] * 4]
    assert reader.summary()["problems"] == []
    (run_dir / "routing/step-000006.npy").write_bytes(b"x")
    reader.read()
    assert reader.summary()["problems"][0].startswith("routing/ cannot be read: ")
    shutil.rmtree(run_dir / "routing")
    reader.read()
    assert (reader.experts()["experts"], reader.summary()["problems"]) == (None, [])


def test_experts_without_computation_have_no_share(tmp_path):
    run_dir = write_run(tmp_path / "run", 1)
    (run_dir / "expert_counts.bin").unlink()
    shape = TraceShape(layers=(1,), num_experts=6, zero_experts=2, top_k=2, global_batch_size=1, seq_len=6)
    choices = np.array([0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5], np.uint8).reshape(1, 6, 2)
    RoutingTraceWriter(run_dir, shape, resume_step=0).write(1, [choices])
    reader = open_run(run_dir)
    assert reader.experts()["experts"]["num_experts"] == 4
    assert shares(reader).tolist() == [[[128] * 4]]


def test_a_large_file_of_counts_is_sampled(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run", 30)
    monkeypatch.setattr(expert_tail, "MAX_READ_BYTES", 10 * 40)
    reader = open_run(run_dir)
    experts = reader.experts()["experts"]
    assert experts["is_sampled"]
    assert len(experts["steps"]) == 10
    assert experts["steps"][-1] == [28, 28]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "no step yet"),
        (lambda run: (run / "config.json").unlink(), "config.json is missing"),
        (lambda run: (run / "config.json").write_text("{"), "config.json cannot be read: Expecting property name"),
        (lambda run: (run / "config.json").write_text("[]"), "config.json cannot be read: it is not an object"),
        (lambda run: (run / "config.json").write_text('{"run": 3}'), "config.json cannot be read: it is not an object"),
        (lambda run: (run / "expert_counts.bin").write_bytes(b"x\n"), "expert_counts.bin is not a file of expert"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": "a"}\n'), "metrics.jsonl: 1 lines have no step"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\nx\n'), "metrics.jsonl: line 2 is not a JSON"),
        (lambda run: (run / "faults.jsonl").write_text("x\n"), "faults.jsonl: line 1 is not a JSON object"),
    ],
)
def test_a_half_written_or_damaged_run_is_shown_with_its_problem(tmp_path, damage, problem):
    run_dir = write_run(tmp_path / "run", 3)
    damage(run_dir)
    reader = open_run(run_dir)
    problems = reader.summary()["problems"]
    assert len(problems) == 1
    assert problems[0].startswith(problem)
    for answer in (reader.series, reader.experts, reader.memory, reader.ranks, reader.faults, reader.recipe):
        json.dumps(answer(), allow_nan=False)


@pytest.mark.parametrize(
    "record",
    [
        {"moe_layers": [{"layer": 0, "load": []}]},
        {"moe_layers": [{"layer": "0"}], "memory_by_part": [], "rank_times": {"slowest_rank": "a"}},
        {"moe_layers": [1], "memory_by_part": {"peak_bytes": {"weights": ["a", None, 1e400]}}, "rl": []},
        {"moe_layers": [{"layer": 0, "load": 10**400}], "expert_load": ["a", {}], "nonfinite": []},
        {"memory_by_part": {"peak_bytes": {"weights": 3}}, "rank_times": {"slowest_rank": 0, "own_max_s": "a"}},
    ],
)
def test_values_of_wrong_types_are_left_out(tmp_path, record):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0} | record) + "\n")
    reader = open_run(run_dir)
    assert reader.series()["series"]["loss"]["values"] == [2.0]
    for answer in (reader.experts, reader.memory, reader.ranks):
        json.dumps(answer(), allow_nan=False)


def test_long_runs_of_faults_and_long_faults_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(run_reader, "MAX_FAULTS", 3)
    run_dir = write_run(tmp_path / "run", 1)
    with (run_dir / "faults.jsonl").open("w") as file:
        for step in range(5):
            file.write(json.dumps({"step": step, "kind": "data", "text": "x" * (30_000 if step == 4 else 1)}) + "\n")
    faults = open_run(run_dir).faults()
    assert (faults["total"], [one["step"] for one in faults["faults"]]) == (5, [2, 3, 4])
    assert "text" not in faults["faults"][-1]


def test_rollouts_are_found_by_text_step_and_reward(tmp_path):
    run_dir = write_run(tmp_path / "run", 3)
    write_rollouts(run_dir)
    reader = open_run(run_dir)

    def numbers(**query) -> list[int]:
        return [one["number"] for one in reader.rollouts(RolloutQuery(**query))["rollouts"]]

    assert numbers() == [5, 4, 3, 2, 1, 0]
    assert numbers(text="QUESTION") == [5, 3, 1]
    assert numbers(text="answer 4") == [4]
    assert numbers(text="<script>") == [0]
    assert numbers(step=2) == [3, 2]
    assert numbers(min_reward=0.5) == [5, 4]
    assert numbers(max_reward=0.4) == [2, 1, 0]
    page = reader.rollouts(RolloutQuery(limit=4))
    assert (page["before"], page["total"]) == (2, 6)
    assert numbers(before=2) == [1, 0]
    assert reader.rollouts(RolloutQuery(before=2))["before"] is None
    (hostile,) = reader.rollouts(RolloutQuery(text="</pre>"))["rollouts"]
    assert hostile["completion"] == [{"role": "", "text": HOSTILE, "left_out": 0}]
    (chat,) = reader.rollouts(RolloutQuery(text="answer 5"))["rollouts"]
    assert (chat["prompt"][0]["role"], chat["completion"][0]["role"]) == ("user", "assistant")


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"prompt": 3, "completion": None},
        {"prompt": [3, None, {"role": 4, "content": {}}], "step": "x", "tokens": []},
    ],
)
def test_rollouts_of_wrong_types_are_texts(tmp_path, record):
    run_dir = write_run(tmp_path / "run", 1)
    (run_dir / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    (rollout,) = open_run(run_dir).rollouts(RolloutQuery())["rollouts"]
    assert all(isinstance(part["text"], str) for part in (*rollout["prompt"], *rollout["completion"]))
    assert rollout["step"] is None


def test_long_texts_are_cut_and_a_search_goes_on_where_it_stopped(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run", 1)
    with (run_dir / "rollouts.jsonl").open("w") as file:
        for i in range(4):
            file.write(
                json.dumps({"step": 1, "prompt": "needle" if i == 0 else "hay", "completion": "x" * 30_000}) + "\n"
            )
    reader = open_run(run_dir)
    (newest, *_) = reader.rollouts(RolloutQuery())["rollouts"]
    assert newest["completion"][0]["left_out"] == 10_000
    monkeypatch.setattr("moefold.board.rollout_index.MAX_SEARCH_BYTES", 40_000)
    first = reader.rollouts(RolloutQuery(text="needle"))
    assert (first["rollouts"], first["before"]) == ([], 2)
    second = reader.rollouts(RolloutQuery(text="needle", before=2))
    assert [one["number"] for one in second["rollouts"]] == [0]


def test_runs_are_found_in_folders_and_named_by_their_differences(tmp_path):
    for name in ("a/seed0", "a/seed1", "b/seed0", "b/deep/er/seed2"):
        write_run(tmp_path / name, 1)
    for name in (".hidden/run", "a/seed0/checkpoints/step-000001"):
        shutil.copytree(tmp_path / "a/seed1", tmp_path / name)
    os.symlink(tmp_path, tmp_path / "b/loop")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "llama"}')
    found = find_runs([tmp_path, tmp_path / "b"])
    assert [run.name for run in found] == ["a/seed0", "a/seed1", "b/seed0", "er/seed2"]
    assert len({run.key for run in found}) == 4
    (alone,) = find_runs([tmp_path / "a/seed1"])
    assert alone.name == "seed1"


def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path, monkeypatch):
    write_run(tmp_path / "mine", 1)
    (tmp_path / "others").mkdir()
    is_file = Path.is_file

    def refuse(path):
        if path.parent.name == "others":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert [run.name for run in find_runs([tmp_path])] == ["mine"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "nothing' does not exist; name the run.dir of a training run"),
        ("file", "file' is not a folder; name the run.dir"),
    ],
)
def test_a_path_that_is_not_a_folder_is_one_message(tmp_path, path, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as raised:
        RunList([tmp_path / path])
    assert message in str(raised.value)


def test_jobs_that_start_later_are_listed_and_unread_runs_show_their_last_line(tmp_path):
    now_s = 0.0
    write_run(tmp_path / "one", 3)
    runs = RunList([tmp_path], clock=lambda: now_s)
    (summary,) = runs.summaries([])
    assert (summary["step"], summary["loss"], summary["state"], summary["problems"]) == (3, 5 / 3, "finished", [])
    write_run(tmp_path / "two", 2)
    assert len(runs.summaries([])) == 1
    now_s = 11.0
    one, two = runs.summaries([summary["key"]])
    assert (one["name"], two["name"], two["step"]) == ("one", "two", 2)
    reader = runs.reader(summary["key"])
    assert reader is not None
    assert reader.series()["series"]["loss"]["steps"] == [1, 2, 3]
    shutil.rmtree(tmp_path)
    now_s = 22.0
    assert [run["name"] for run in runs.summaries([summary["key"]])] == ["one", "two"]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_run_whose_folder_vanishes_keeps_its_numbers_and_goes_on(tmp_path, is_read):
    run_dir = write_run(tmp_path / "run", 3)
    write_faults(run_dir)
    runs = RunList([tmp_path])
    (key,) = (reader.run.key for reader in runs.readers)
    wanted = [key] if is_read else []
    runs.summaries(wanted)
    run_dir.rename(tmp_path / ".moved")
    for _ in range(2):
        (gone,) = runs.summaries(wanted)
        assert (gone["state"], gone["step"], gone["loss"], gone["num_faults"]) == ("gone", 3, 5 / 3, 2)
        assert gone["problems"] == ["the folder is gone: this is what was read of it"]
    assert ("loss" in runs.readers[0].series()["series"]) == is_read
    (tmp_path / ".moved").rename(run_dir)
    write_run(run_dir, 5, resume_step=3)
    (back,) = runs.summaries([key])
    assert (back["state"], back["step"], back["problems"]) == ("finished", 5, [])
    assert runs.readers[0].series()["series"]["loss"]["steps"] == [1, 2, 3, 4, 5]


def test_a_folder_without_runs_waits_for_them(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "llama"}')
    now_s = 0.0
    runs = RunList([tmp_path], clock=lambda: now_s)
    assert runs.summaries([]) == []
    write_run(tmp_path / "a/run", 3)
    now_s = 1.0
    assert [run["name"] for run in runs.summaries([])] == ["run"]
    write_run(tmp_path / "b/run", 3)
    now_s = 12.0
    # The name of an earlier run becomes longer when another one has it, too.
    assert [run["name"] for run in runs.summaries([])] == ["a/run", "b/run"]


def append_steps(run_dir: Path, first: int, last: int, **values) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps(to_record(step_metrics(step, **values))) + "\n")


ROW = ("state", "step", "loss", "eval_loss", "tokens_per_s", "num_faults")


@pytest.mark.parametrize("was_charted", [True, False])
def test_every_row_is_fresh_whether_or_not_its_run_was_charted(tmp_path, was_charted):
    run_dir = write_run(tmp_path / "run", 80)
    (run_dir / "metrics.jsonl").unlink()
    append_steps(run_dir, 1, 40)
    runs = RunList([tmp_path])
    key = runs.readers[0].run.key
    (row,) = runs.summaries([key] if was_charted else [])
    assert [row[name] for name in ROW] == ["stopped", 40, 5 / 40, 5.5 / 40, 4096.0, 0]
    append_steps(run_dir, 41, 80, tokens_per_s=1000.0)
    write_faults(run_dir)
    expected = ["finished", 80, 5 / 80, 5.5 / 80, 1000.0, 2]
    for wanted in ([], [key], []):
        (row,) = runs.summaries(wanted)
        assert [row[name] for name in ROW] == expected
    # A run that went back has the row of its second attempt.
    write_run(run_dir, 50, resume_step=45)
    for wanted in ([], [key], []):
        (row,) = runs.summaries(wanted)
        assert [row[name] for name in ROW] == ["finished", 50, 5 / 50, 5.5 / 50, 4096.0, 2]


def test_a_line_that_a_stopped_job_did_not_finish_is_named(tmp_path):
    run_dir = write_run(tmp_path / "run", 3)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    runs = RunList([tmp_path])
    key = runs.readers[0].run.key
    for wanted in ([], [key]):
        (row,) = runs.summaries(wanted)
        assert (row["step"], row["problems"]) == (3, ["metrics.jsonl: the last line is not complete; it is left out"])
    assert runs.readers[0].series()["series"]["loss"]["steps"] == [1, 2, 3]


def test_ten_thousand_steps_that_are_not_finite_are_shown_as_such(tmp_path):
    run_dir = write_run(tmp_path / "run", 1)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(json.dumps({"step": step, "loss": None, "nonfinite": {"loss": "nan"}}) + "\n")
    runs = RunList([tmp_path])
    (row,) = runs.summaries([runs.readers[0].run.key])
    assert (row["step"], row["loss"], row["problems"]) == (10_000, "nan", [])
    loss = runs.readers[0].series(weights=["0.9"])["series"]["loss"]
    assert (loss["num_points"], loss["num_nonfinite"], set(loss["values"])) == (10_000, 10_000, {None})
    json.dumps(row | loss, allow_nan=False)


def test_a_run_of_an_earlier_version_is_shown_and_named_as_such(tmp_path):
    run_dir = write_run(tmp_path / "run", 3)
    settings = json.loads((run_dir / "config.json").read_text())
    settings["parallel"]["cpu"] = 1
    del settings["train"]["lr"], settings["metrics"]["wandb"]
    (run_dir / "config.json").write_text(json.dumps(settings))
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "lr": 0.1}\n{"step": 2, "loss": 2.0, "lr": 0.1}\n')
    runs = RunList([tmp_path])
    (row,) = runs.summaries([runs.readers[0].run.key])
    assert (row["step"], row["steps"], row["loss"], row["mapping"]) == (2, 3, 2.0, "1 rank")
    assert row["problems"] == [
        "config.json is of another version of moefold: it has no metrics.wandb, train.lr; it has parallel.cpu"
    ]
    assert runs.readers[0].series()["series"]["loss"]["values"] == [3.0, 2.0]


def test_styles_of_runs_depend_on_no_choice_and_differ(tmp_path):
    folders = [write_run(tmp_path / f"run-{i}", 1) for i in range(20)]
    runs = RunList([tmp_path])
    styles = {run["name"]: run["style"] for run in runs.summaries([])}
    assert len(set(styles.values())) == 20
    assert sorted(styles.values())[:16] == list(range(16))
    keys = [reader.run.key for reader in runs.readers]
    assert {run["name"]: run["style"] for run in runs.summaries(keys[::-1])} == styles
    assert {run["name"]: run["style"] for run in RunList([tmp_path]).summaries([])} == styles
    # A few runs have the colours of their own keys.
    (alone,) = RunList([folders[3]]).summaries([])
    assert alone["style"] == int(alone["key"], 16) % 16
    later = "0" * 12
    assert unused_style(later, set(range(16))) == 16
    assert unused_style(later, set(range(48))) == 0


def test_a_request_out_of_time_gives_each_run_its_turn(tmp_path):
    for i in range(3):
        write_run(tmp_path / f"run-{i}", 2)
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.6
        return now_s

    runs = RunList([tmp_path], clock=clock)
    keys = [reader.run.key for reader in runs.readers]
    seen = [[run["has_more"] for run in runs.summaries(keys)] for _ in range(3)]
    assert seen == [[False, True, True], [True, False, True], [True, True, False]]
    assert all("loss" in reader.series()["series"] for reader in runs.readers)


def test_the_slowest_ranks_over_steps(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 1001):
            slowest = 7 if step > 500 else step % 2
            file.write(json.dumps({"step": step, "rank_times": {"slowest_rank": slowest, "own_max_s": 1.0}}) + "\n")
    ranks = open_run(run_dir).ranks()
    assert (ranks["steps"], ranks["slowest"]) == (100, [{"rank": 7, "steps": 100}])
    over = ranks["slowest_over_steps"]
    assert (over["ranks"], over["left_out"], len(over["steps"])) == ([0, 1, 7], 0, run_reader.MAX_SLOWEST_RANGES)
    assert (over["steps"][0][0], over["steps"][-1][1]) == (1, 1000)
    assert over["shares"][0] == [0.5, 0.5, 0.0]
    assert over["shares"][-1] == [0.0, 0.0, 1.0]
    assert all(sum(row) == pytest.approx(1.0) for row in over["shares"])


def test_a_run_whose_metrics_are_replaced_by_an_evaluation_keeps_its_curve(tmp_path):
    run_dir = write_run(tmp_path / "run", 5)
    reader = open_run(run_dir)
    from moefold.config.schema import Config

    with MetricsWriter(run_dir, Config().metrics, resume_step=5) as writer:
        writer.add_evaluation(5, 0.75)
    reader.read()
    evaluated = reader.series()["series"]["eval_loss"]
    assert (evaluated["steps"], evaluated["values"]) == ([5], [0.75])
    assert reader.series()["series"]["loss"]["steps"] == [1, 2, 3, 4, 5]
