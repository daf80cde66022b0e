"""The folder that a start of a recipe writes into, by the contents of the folder that it names."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE
from moefold.host.folder_lock import FolderLock, is_in_use
from moefold.train.run_folder import choose_run_folder
from tests.train.written_runs import config, write_run


@contextmanager
def job_in(folder: Path) -> Iterator[None]:
    """Another process that holds the lock of a folder."""
    code = "import sys; from moefold.host.folder_lock import FolderLock; from pathlib import Path\n"
    code += f"with FolderLock(Path({str(folder)!r}), 'run.dir', 0):\n  print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield


def chosen(run_dir: Path, *words: str) -> tuple[str, str]:
    folder = choose_run_folder(config(run_dir, *words))
    return Path(folder.cfg.run.dir).name, folder.message


def test_a_folder_without_a_run_is_taken(tmp_path):
    assert chosen(tmp_path / "run") == ("run", "")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    (tmp_path / "run/metrics.jsonl").touch()
    assert chosen(tmp_path / "run") == ("run", "")


UPCYCLED = "checkpoint.upcycle.dense=a"
MOVED = ["parallel.world_size=2", "parallel.tp=2"]
CASES = {
    # words of the run that is there, its steps, those saved; words of the start; folder; part of the note
    "goes on": ([], 6, 5, [], "run", ""),
    "done": ([], 10, 10, [], "run", ""),
    "more steps": ([], 10, 10, ["run.steps=20"], "run", ""),
    "layers in words": (["model.layers='moe, moe'"], 10, 10, [], "run", ""),
    "another mapping": ([], 6, 5, MOVED, "run", ""),
    "new settings": ([], 6, 5, ["train.lr=0.1"], "run", "goes on with other settings: train.lr=0.1 (it has 0.0003)"),
    "saves otherwise": ([], 10, 10, ["checkpoint.every=3", "metrics.tensorboard=true"], "run", ""),
    "fewer steps": (
        [],
        10,
        10,
        ["run.steps=2"],
        "run-2",
        "it has 10 steps, with other settings: run.steps=2 (it has 10)",
    ),
    "done with others": ([], 10, 10, ["train.lr=0.1"], "run-2", "train.lr=0.1 (it has 0.0003)"),
    "done by others": ([], 10, 10, MOVED, "run-2", "parallel.tp=2 (it has 1)"),
    "another model": ([], 6, 5, ["model.layers=3"], "run-2", "layers 2 there, 3 here"),
    "another start": ([UPCYCLED], 6, 5, [], "run", 'checkpoint.upcycle="none" (it has "given")'),
    "a start": ([], 6, 5, [UPCYCLED], "run", 'checkpoint.upcycle.dense="a" (it has "none")'),
    "done with another start": ([UPCYCLED], 10, 10, [], "run-2", 'checkpoint.upcycle="none"'),
    "other data": ([], 6, 5, ["run.seed=7"], "run-2", "seed 0 there, 7 here"),
    "never saved": ([], 6, None, [], "run", "ended before its first checkpoint: it starts over"),
    "another, never saved": ([], 6, None, ["train.lr=0.1"], "run-2", "it has no checkpoint to go on from"),
    "never": ([], 6, 5, ["checkpoint.resume=never"], "run-2", "checkpoint.resume='never'"),
    "another resume": ([], 6, 5, ["checkpoint.resume=elsewhere/step-000009"], "run-2", "is of another run"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_continued_or_not_changed(tmp_path, name):
    before, steps, saved, words, expected, note = CASES[name]
    write_run(tmp_path / "run", *before, steps=steps, saved=saved)
    folder, said = chosen(tmp_path / "run", *words)
    assert folder == expected
    assert note in said
    assert bool(note) == bool(said)


def test_a_run_with_an_indexer_of_an_earlier_version_is_the_same_run(tmp_path):
    words = ("model.attention.indexer.top_k=8",)
    write_run(tmp_path / "run", *words, steps=10, saved=10)
    file = tmp_path / "run" / "config.json"
    tree = json.loads(file.read_text())
    indexer = tree["model"]["attention"].pop("indexer")
    tree["model"] |= {"index_topk": 8, "index_heads": indexer["num_heads"], "index_head_dim": indexer["head_dim"]}
    tree["model"] |= {"index_rope_interleaved": False}
    file.write_text(json.dumps(tree))
    assert chosen(tmp_path / "run", *words) == ("run", "")


@pytest.mark.parametrize("saved", [5, 10])
def test_a_run_whose_data_moved_is_the_same_run(tmp_path, saved):
    for name, text in (("a", "text"), ("same", "text"), ("other", "another")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(text)
    data = ("data.kind=text", f"data.path={tmp_path}/a")
    write_run(tmp_path / "run", *data, steps=saved, saved=saved)
    assert chosen(tmp_path / "run", *data) == ("run", "")
    for path in (tmp_path / "same", tmp_path / "." / "a" / ".." / "a", tmp_path / "a" / "x.txt"):
        assert chosen(tmp_path / "run", data[0], f"data.path={path}") == ("run", ""), path
    (tmp_path / "a" / "x.txt").rename(tmp_path / "a" / "y.txt")
    assert chosen(tmp_path / "run", data[0], f"data.path={tmp_path}/same") == ("run", "")
    folder, said = chosen(tmp_path / "run", data[0], f"data.path={tmp_path}/other")
    assert folder == "run-2"
    assert f"path '{tmp_path}/a' there, '{tmp_path}/other' here" in said
    assert f"data file {tmp_path}/other/x.txt has other content than then" in said


def test_a_numbered_run_is_found_again(tmp_path):
    run_dir = tmp_path / "run"
    write_run(run_dir, steps=10, saved=10)
    write_run(tmp_path / "run-2", "train.lr=0.1", steps=6, saved=5)
    assert chosen(run_dir, "train.lr=0.1")[0] == "run-2"
    assert chosen(run_dir, "train.lr=0.1", *MOVED)[0] == "run-2"
    assert chosen(run_dir, "train.lr=0.2")[0] == "run-3"
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run-3/mine.txt").touch()
    assert chosen(run_dir, "train.lr=0.2")[0] == "run-4"
    assert chosen(run_dir, "run.steps=20")[0] == "run"
    # It gets a folder of its own when it is named.
    assert chosen(tmp_path / "run-2", "train.lr=0.3")[0] == "run-2"


def test_a_checkpoint_that_is_named_is_continued_where_it_is(tmp_path):
    write_run(tmp_path / "run", steps=6, saved=5)
    named = f"checkpoint.resume={tmp_path}/run/checkpoints/step-000005"
    assert chosen(tmp_path / "run", named, "train.lr=0.1") == ("run", "")
    # With later ones beside it the start is refused, not moved.
    write_run(tmp_path / "run", steps=9, saved=8)
    assert chosen(tmp_path / "run", named)[0] == "run"


def test_checkpoints_of_a_folder_of_their_own_belong_to_the_run_started_last(tmp_path):
    apart = f"checkpoint.dir={tmp_path}/saved"
    write_run(tmp_path / "run", apart, steps=3, saved=None)
    write_run(tmp_path / "run-2", apart, steps=6, saved=5)
    assert chosen(tmp_path / "run", apart)[0] == "run-2"


def test_damaged_settings_and_checkpoints_are_left_to_the_start(tmp_path):
    write_run(tmp_path / "run", steps=6, saved=5)
    (tmp_path / "run/config.json").write_text("[1]")
    assert chosen(tmp_path / "run") == ("run", "")
    (tmp_path / "run/checkpoints/step-000005" / META_FILE).write_text("{}")
    assert chosen(tmp_path / "run") == ("run", "")


def test_a_run_that_has_saved_nothing_yet_is_waited_for(tmp_path):
    run_dir = tmp_path / "run"
    write_run(run_dir, steps=6, saved=None)
    with job_in(run_dir):
        assert is_in_use(run_dir)
        assert chosen(run_dir) == ("run", "")
        assert chosen(run_dir, "train.lr=0.1")[0] == "run-2"
    assert not is_in_use(run_dir)
    assert "starts over" in chosen(run_dir)[1]


@pytest.mark.parametrize(("steps", "saved"), [(6, 5), (6, None), (0, None)])
def test_another_run_does_not_wait_for_the_job_in_its_folder(tmp_path, steps, saved):
    run_dir = tmp_path / "run"
    write_run(run_dir, steps=steps, saved=saved)
    with job_in(run_dir):
        folder, note = chosen(run_dir, "train.lr=0.1")
        assert (folder, "a job is training it" in note) == ("run-2", True)
        # The same run does: a launcher may have started it again.
        assert chosen(run_dir)[0] == "run"
        # Its own lock is not another job.
        with FolderLock(tmp_path / "run-2", "run.dir", 0.0):
            again = choose_run_folder(config(run_dir, "train.lr=0.1"), locked_folder=tmp_path / "run-2")
            assert again.cfg.run.dir == str(tmp_path / "run-2")
            assert is_in_use(tmp_path / "run-2")


ENDED_EARLY = {
    # words of both runs, steps, unfinished save; whether the run starts over
    "before the first save": (["checkpoint.every=10", "run.steps=20"], 9, False, True),
    "in the first save": (["checkpoint.every=10", "run.steps=20"], 10, True, True),
    "in the save of its end": ([], 10, True, True),
    "checkpoints removed": (["checkpoint.every=10", "run.steps=20"], 14, False, False),
    "done, checkpoint removed": ([], 10, False, False),
    "saves nothing": (["checkpoint.every=0", "checkpoint.at_end=false"], 6, False, False),
    "named checkpoint": (["checkpoint.resume=elsewhere/step-000001"], 6, False, False),
}


@pytest.mark.parametrize("name", ENDED_EARLY)
def test_a_run_that_ended_before_its_first_checkpoint_starts_over_in_place(tmp_path, name):
    words, steps, is_saving, starts_over = ENDED_EARLY[name]
    run_dir = tmp_path / "run"
    write_run(run_dir, *words, steps=steps, saved=None)
    if is_saving:
        (run_dir / f"checkpoints/.step-{steps:06d}.partial").mkdir(parents=True)
    folder, note = chosen(run_dir, *words)
    assert folder == ("run" if starts_over else "run-2")
    assert ("ended before its first checkpoint: it starts over" in note) == starts_over
    assert chosen(run_dir, *words, "run.seed=3")[0] == "run-2"


def test_a_run_with_checkpoints_goes_on_before_one_starts_over(tmp_path):
    write_run(tmp_path / "run", steps=6, saved=None)
    write_run(tmp_path / "run-2", steps=6, saved=5)
    assert chosen(tmp_path / "run")[0] == "run-2"
