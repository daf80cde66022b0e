"""`moefold checkpoint` as a user sees it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.checkpoint.checkpoint_meta import META_FILE
from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest
from moefold.cli.main import main
from tests.cli.without_torch import run_calls_without_torch
from tests.models import edit_model
from tests.train.tiny_runs import recipe, train_rank

pytestmark = pytest.mark.parity

STEPS = ("step-000002", "step-000004")


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory) -> Path:
    """A run of two ranks, saved after steps 2 and 4."""
    run_dir = tmp_path_factory.mktemp("run")
    pool.run(2, train_rank, recipe(run_dir, 4, dtype="float32", world_size=2, ep=2))
    return run_dir


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """The same run, to be damaged."""
    for file in run.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return tmp_path


def _flip(checkpoint: Path) -> None:
    file = checkpoint / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _words(*words: object) -> list[str]:
    return ["checkpoint", *map(str, words)]


def test_list(run, capsys):
    assert main(_words("list", run)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", *STEPS]
    assert lines[1].split()[1:3] == ["128", "8"]
    assert "2 ranks ep=2" in lines[1]


def test_list_as_json(run, capsys):
    assert main(_words("list", run / "checkpoints", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(Path(row["path"]).name, row["meta"]["states"]["position"]["step"], row["faults"]) for row in found] == [
        (STEPS[0], 2, []),
        (STEPS[1], 4, []),
    ]
    assert found[0]["size_bytes"] == sum(file.stat().st_size for file in (run / "checkpoints" / STEPS[0]).iterdir())


def test_show_takes_the_newest_of_a_run(run, capsys):
    assert main(_words("show", run, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["states"]["position"]["step"] == 4
    experts = next(tensor for tensor in found["tensors"] if tensor["name"] == "model.layers.1.ffn.experts.w_up")
    assert (experts["shape"], experts["dtype"], experts["num_chunks"]) == ([8, 16, 8], "float32", 2)
    assert experts["size_bytes"] == 8 * 16 * 8 * 4
    assert main(_words("show", run / "checkpoints" / STEPS[0], "--tensors")) == 0
    text = capsys.readouterr().out
    assert "after step 2, 8 samples and 128 tokens" in text
    assert "model: layers 2, hidden_size 16, ffn.moe.num_experts 8, ffn.moe.top_k 2, vocab_size " in text
    assert "layers.1.ffn.experts.w_up" in text


def test_a_checkpoint_without_a_step_in_its_name_is_listed_and_verified(copy, capsys):
    """As `import` writes one."""
    imported = (copy / "checkpoints" / STEPS[0]).rename(copy / "imported")
    assert main(_words("list", imported)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["checkpoint", "imported"]
    assert main(_words("verify", imported)) == 0
    assert capsys.readouterr().out == f"{imported}: sound\n"
    _flip(imported)
    assert main(_words("verify", imported)) == 1


def _seal(checkpoint: Path) -> None:
    """Write the manifest of the folder as it is now, as a stranger who changed it would."""
    names = [file.name for file in checkpoint.iterdir() if file.is_file() and file.name != MANIFEST_FILE]
    write_manifest(checkpoint, {name: digest_file(checkpoint / name) for name in names})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda meta: meta.clear(), "has a broken moefold.json"),
        (lambda meta: meta.update(format=99), "has format 99"),
        (lambda meta: meta["states"]["position"].update(step="two"), "has a broken moefold.json: step is 'two'"),
        (lambda meta: meta["model"].update(hidden_size=2**50), "model.hidden_size=1125899906842624 must be"),
        (lambda meta: meta["model"].update(num_experts=2**40), "model.ffn.moe.num_experts=1099511627776 must be"),
        (
            lambda meta: meta["model"].update(vocab_size=4),
            "describes tensors that it does not have: embedding.weight of",
        ),
        (
            lambda meta: meta["model"].update(num_layers=9_000, layer_kinds="M" * 9_000, layer_pattern="M"),
            "describes 9000 layers, and it has",
        ),
        (lambda meta: meta["model"].update(layer_pattern="M999999999999"), "layer_pattern"),
        (lambda meta: meta["model"].update(nope=3), "has a model that this version does not know"),
        (lambda meta: meta["parallel"].update(world_size=0), "parallel.world_size is 0"),
        (lambda meta: meta["states"].update(lora={"rank": "x"}), "lora.rank is 'x'"),
    ],
)
def test_verify_names_a_description_that_cannot_be_loaded(copy, capsys, change, fault):
    """Its files are as the manifest says: it was written, or sealed again, with that description."""
    checkpoint = copy / "checkpoints" / STEPS[0]
    meta = json.loads((checkpoint / META_FILE).read_text())
    change(meta)
    (checkpoint / META_FILE).write_text(json.dumps(meta))
    assert main(_words("verify", checkpoint)) == 1
    assert "file moefold.json has" in capsys.readouterr().out
    _seal(checkpoint)
    assert main(_words("verify", checkpoint)) == 1
    out, error = capsys.readouterr()
    assert fault in out
    assert (out.count("\n"), error) == (1, "")


def test_verify_names_files_that_do_not_belong_to_a_sound_checkpoint(copy, capsys):
    checkpoint = copy / "checkpoints" / STEPS[0]
    for name in ("__9_9.distcp", "notes.txt"):
        (checkpoint / name).write_bytes(b"x")
    assert main(_words("verify", checkpoint)) == 0
    others = "not in its manifest.json, and not read: __9_9.distcp, notes.txt"
    assert capsys.readouterr().out == f"{checkpoint}: sound; {others}\n"


def test_verify_names_damaged_files(copy, capsys):
    assert main(_words("verify", copy)) == 0
    assert [line.rsplit(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["sound", "sound"]
    damaged = copy / "checkpoints" / STEPS[0]
    _flip(damaged)
    assert main(_words("verify", damaged)) == 1
    assert capsys.readouterr().out == f"{damaged}: file __1_0.distcp has other content than was written\n"
    assert main(_words("verify", copy)) == 1
    assert capsys.readouterr().out.splitlines()[1].endswith(f"{STEPS[1]}: sound")


def test_diff_of_equals_and_of_others(run, copy, capsys):
    assert main(_words("diff", run, copy)) == 0
    assert capsys.readouterr().out == "all tensors are equal\n"
    assert main(_words("diff", run / "checkpoints" / STEPS[0], run, "--json", "--weights")) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["description"]["position.step"] == [2, 4]
    names = [difference["name"] for difference in found["tensors"]]
    assert "model.layers.1.ffn.experts.w_up" in names
    assert not any(name.startswith("optimizer.") for name in names)
    assert all(0 < difference["max_abs"] < 0.1 for difference in found["tensors"])


def test_diff_shortens_long_values(run, capsys):
    assert main(_words("diff", run / "checkpoints" / STEPS[0], run)) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("guard.last: ")]
    assert len(line) < 250
    assert "characters; --json has all) | {" in line


def test_diff_of_other_sizes(pool, run, tmp_path, capsys):
    cfg = recipe(tmp_path, 2)
    pool.run(
        1, train_rank, replace(cfg, model=edit_model(cfg.model, {"layers": 1, "vocab_size": 64, "ffn.moe.top_k": 3}))
    )
    assert main(_words("diff", run / "checkpoints" / STEPS[0], tmp_path, "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["description"]["model.layers"], found["description"]["model.ffn.moe.top_k"]) == ([2, 1], [2, 3])
    what = {difference["name"]: difference["what"] for difference in found["tensors"]}
    assert what["model.layers.1.attention.wq"] == "only in the first"
    assert what["model.embedding.weight"].startswith("shape [32, 16] | [64, 16]")
    assert what["model.layers.0.attention.wq"] == "type torch.float32 | torch.float64"


def test_rm_leaves_the_last_one_unless_forced(copy, capsys):
    first, last = (copy / "checkpoints" / step for step in STEPS)
    assert main(_words("rm", first, last)) == 2
    assert "that would leave no sound checkpoint" in capsys.readouterr().err
    assert first.is_dir()
    assert main(_words("rm", first)) == 0
    assert sorted(path.name for path in first.parent.iterdir()) == [STEPS[1]]
    assert main(_words("rm", last, "--force")) == 0
    assert not list(first.parent.iterdir())


def test_a_renamed_checkpoint_is_named_and_does_not_count_as_sound(copy, capsys):
    first, last = (copy / "checkpoints" / step for step in STEPS)
    renamed = first.rename(first.with_name("step-000900"))
    fault = f"it is of step 2; rename it to {STEPS[0]!r}"
    assert main(_words("verify", copy)) == 1
    assert capsys.readouterr().out.splitlines() == [f"{last}: sound", f"{renamed}: {fault}"]
    assert main(_words("list", copy, "--json")) == 0
    assert [row["faults"] for row in json.loads(capsys.readouterr().out)] == [[], [fault]]
    assert main(_words("rm", last)) == 2
    assert "that would leave no sound checkpoint" in capsys.readouterr().err
    assert last.is_dir()


def test_a_broken_description_is_listed_and_can_be_removed(copy, capsys):
    broken = copy / "checkpoints" / STEPS[0] / "moefold.json"
    broken.write_text("[" * 100_000)
    assert main(_words("list", copy)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == [STEPS[0], "?", "?"]
    assert "moefold.json has" in " ".join(lines)
    assert main(_words("rm", copy / "checkpoints" / STEPS[1])) == 2
    assert "that would leave no sound checkpoint" in capsys.readouterr().err
    assert main(_words("rm", broken.parent)) == 0


def test_a_checkpoint_without_its_description_is_listed_and_is_damaged(copy, capsys):
    newest = copy / "checkpoints" / STEPS[1]
    (newest / "moefold.json").unlink()
    assert main(_words("list", copy, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["faults"] for row in found] == [[], ["file moefold.json is missing"]]
    for named in (copy, newest):
        assert main(_words("verify", named)) == 1
        assert capsys.readouterr().out.splitlines()[-1] == f"{newest}: file moefold.json is missing"
    (copy / "checkpoints" / STEPS[0] / "moefold.json").unlink()
    assert main(_words("verify", copy)) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_rm_does_not_leave_only_damaged_checkpoints(copy, capsys):
    first, last = (copy / "checkpoints" / step for step in STEPS)
    _flip(first)
    assert main(_words("rm", last)) == 2
    assert "that would leave no sound checkpoint" in capsys.readouterr().err
    assert last.is_dir()
    assert main(_words("rm", first)) == 0


def test_wrong_folders_are_one_message(run, tmp_path, capsys):
    for words, message in (
        (("list", tmp_path / "nope"), "does not exist; name a run, or a folder of checkpoints"),
        (("show", tmp_path), "is not a complete checkpoint and holds none"),
        (("verify", tmp_path), "holds no complete checkpoint"),
        (("rm", run), "is not named like a checkpoint, step-000100"),
    ):
        assert main(_words(*words)) == 2
        assert message in capsys.readouterr().err


def test_listing_needs_no_torch(run):
    done = run_calls_without_torch([_words("list", run)])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[0]"), done.stderr
