"""Checkpoints of a stranger's making, before every command that reads one: one message, nothing is run or written."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from moefold.checkpoint.checkpoint_meta import META_FILE
from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.checkpoint.manifest import MANIFEST_FILE, digest_file, write_manifest
from moefold.checkpoint.safe_metadata import read_metadata
from moefold.cli.main import main
from tests.convert.hf_models import make_model, save_model

pytestmark = pytest.mark.parity

SIZES = "train.seq_len=16 train.global_batch_size=1 data.kind=synthetic run.device=cpu run.dtype=float32"
TENSORS = "__0_0.distcp"


class Runs:
    """A pickle of it makes a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.command = f"touch {trace}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one step that any command can read: `run`, its recipe, and some ids."""
    folder = tmp_path_factory.mktemp("base")
    save_model(make_model("llama-tied"), folder / "hf")
    assert main(["import", str(folder / "hf"), str(folder / "imported"), "--no-tokenizer"]) == 0
    np.save(folder / "ids.npy", np.arange(32) % 60)
    words = f"run.dir={folder}/run run.steps=1 checkpoint.every=1 {SIZES}".split()
    assert main(["train", str(folder / "imported" / "recipe.toml"), *words]) == 0
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(base / "run", tmp_path / "run")
    return tmp_path


def seal(path: Path) -> None:
    """A manifest that agrees with the files: whoever can change them can do that too."""
    files = {file.name: file for file in path.iterdir() if file.name != MANIFEST_FILE and file.is_file()}
    write_manifest(path, {name: digest_file(file) for name, file in files.items()})


def edit_index(path: Path, change: Callable[[Any], object]) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    seal(path)


def edit_meta(path: Path, section: str, **values: object) -> None:
    meta = json.loads((path / META_FILE).read_text())
    meta[section] |= values
    (path / META_FILE).write_text(json.dumps(meta))
    seal(path)


def index_runs(path: Path, trace: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Runs(trace)))
    seal(path)


def index_builds_a_class(path: Path, trace: Path) -> None:
    """GLOBAL of a known class, then BUILD on it: sets attributes of the class, if it is the real one."""
    head = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x07version\x8c\x04evil"
    (path / ".metadata").write_bytes(head + b"s\x86b.")
    seal(path)


def tensors_run(path: Path, trace: Path) -> None:
    size = (path / TENSORS).stat().st_size
    (path / TENSORS).write_bytes(pickle.dumps(Runs(trace)).ljust(size, b"\0"))
    seal(path)


def to_others(name: str) -> Callable[[Path, Path], None]:
    def inflict(path: Path, trace: Path) -> None:
        shutil.copy(path / TENSORS, trace.parent / TENSORS)

        def change(index: Any) -> None:
            for info in index.storage_data.values():
                info.relative_path = name.format(outside=trace.parent)

        edit_index(path, change)

    return inflict


def linked(path: Path, trace: Path) -> None:
    (path / TENSORS).rename(trace.parent / TENSORS)
    (path / TENSORS).symlink_to(trace.parent / TENSORS)
    seal(path)


def many_rows(path: Path, trace: Path) -> None:
    def change(index: Any) -> None:
        import torch

        for stored in index.state_dict_metadata.values():
            stored.size = torch.Size([2**60, *stored.size[1:]])
            stored.chunks[0].sizes = stored.size
        for info in index.storage_data.values():
            info.length = 2**60

    edit_index(path, change)


def many_bytes(path: Path, trace: Path) -> None:
    def change(index: Any) -> None:
        for info in index.storage_data.values():
            info.length = 2**60

    edit_index(path, change)


def swapped(path: Path, trace: Path) -> None:
    """Each tensor lies where another of other dims belongs."""

    def change(index: Any) -> None:
        places = sorted(index.storage_data, key=lambda key: (len(key.offset), key.fqn))
        values = [index.storage_data[key] for key in places]
        index.storage_data = dict(zip(places, values[::-1], strict=True))

    edit_index(path, change)


def of_parts(path: Path, trace: Path) -> None:
    def change(index: Any) -> None:
        for stored in index.state_dict_metadata.values():
            stored.chunks = stored.chunks * 2

    edit_index(path, change)


def endless(name: str) -> Callable[[Path, Path], None]:
    def inflict(path: Path, trace: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return inflict


def endless_link(path: Path, trace: Path) -> None:
    (path / MANIFEST_FILE).unlink()
    (path / MANIFEST_FILE).symlink_to("/dev/zero")


def deep_model(path: Path, trace: Path) -> None:
    edit_meta(path, "model", layers=2**60)


def long_pattern(path: Path, trace: Path) -> None:
    edit_meta(path, "model", layers="9" * 5 + " x (99999 window)")


def other_types(path: Path, trace: Path) -> None:
    edit_meta(path, "model", hidden_size="24", head_dim=[])


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "index runs": index_runs,
    "index builds a class": index_builds_a_class,
    "tensors run": tensors_run,
    "file above": to_others("../" + TENSORS),
    "absolute file": to_others("{outside}/" + TENSORS),
    "linked file": linked,
    "2**60 rows": many_rows,
    "2**60 bytes": many_bytes,
    "swapped": swapped,
    "parts twice": of_parts,
    "endless index": endless(".metadata"),
    "endless description": endless(META_FILE),
    "endless manifest": endless_link,
    "deep model": deep_model,
    "long pattern": long_pattern,
    "other types": other_types,
}
COMMANDS = {
    "resume": "train {b}/imported/recipe.toml checkpoint.resume={c} checkpoint.init_from= run.dir={f}/out run.steps=2 "
    + SIZES,
    "init_from": "train {b}/imported/recipe.toml checkpoint.init_from={c} run.dir={f}/out run.steps=1 " + SIZES,
    "upcycle": "upcycle {c} {f}/out model.ffn.moe.num_experts=4 model.ffn.moe.top_k=2",
    "show": "checkpoint show {c}",
    "diff": "checkpoint diff {c} {b}/run",
    "export": "export {c} {f}/out",
    "eval": "eval {c} --tokens {b}/ids.npy --seq-len 16",
    "generate": "generate {c} 7 --max-tokens 1",
}
READS_NO_TENSOR = {"show"}
READS_NO_SIZES = {"show", "diff"}


def words_of(command: str, base: Path, folder: Path, checkpoint: Path) -> list[str]:
    return COMMANDS[command].format(b=base, f=folder, c=checkpoint).split()


def _left_alone(command: str, attack: str) -> bool:
    """Return whether a command does not read the attacked field, so that it may as well go on."""
    return (command in READS_NO_TENSOR and attack in ("tensors run", "swapped", "linked file", "endless manifest")) or (
        command in READS_NO_SIZES and attack in ("endless manifest", "long pattern")
    )


@pytest.fixture
def watched() -> Iterator[None]:
    """Metadata is unchanged, whatever a pickle tries to change in it."""
    from torch.distributed.checkpoint.metadata import Metadata

    assert Metadata.version is None
    yield
    assert Metadata.version is None


def test_members_of_enumerations_that_are_written_by_name_stay_undone(base, folder):
    """As some releases of Python 3.11 write them."""
    path = folder / "run" / "checkpoints" / "step-000001"
    index = pickle.loads((path / ".metadata").read_bytes())
    before = read_metadata(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        content = pickle.dumps(index)
    assert b"getattr" in content
    (path / ".metadata").write_bytes(content)
    assert read_metadata(path).state_dict_metadata == before.state_dict_metadata


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_strangers_checkpoint_is_refused_by_all_that_read_one(base, folder, capsys, watched, attack):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    trace = folder / "it-ran"
    ATTACKS[attack](checkpoint, trace)
    wrong = []
    for command in COMMANDS:
        if _left_alone(command, attack):
            continue
        status = main(words_of(command, base, folder, checkpoint))
        err = capsys.readouterr().err
        lines = err.strip().splitlines()
        if status != 2 or len(lines) != 1 or not lines[0].startswith("moefold: error: "):
            wrong.append((command, status, err[-500:]))
        elif trace.exists() or (folder / "out").exists():
            wrong.append((command, "ran or wrote", err))
    assert not wrong


def test_the_commands_take_a_sound_checkpoint(base, folder, capsys):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    for command in COMMANDS:
        assert main(words_of(command, base, folder, checkpoint)) == 0, (command, capsys.readouterr().err)
        shutil.rmtree(folder / "out", ignore_errors=True)


@pytest.mark.parametrize("command", ["resume", "init_from", "upcycle", "export", "eval", "generate"])
def test_a_flipped_byte_is_named_before_anything_is_written(base, folder, capsys, command):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    content = bytearray((checkpoint / TENSORS).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / TENSORS).write_bytes(content)
    assert main(words_of(command, base, folder, checkpoint)) == 2
    err = capsys.readouterr().err
    assert f"is damaged: file {TENSORS} has other content than was written" in err
    assert err.count("\n") == 1
    assert not (folder / "out").exists()


def test_an_export_may_do_without_the_hashes(base, folder, capsys):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    content = bytearray((checkpoint / TENSORS).read_bytes())
    content[-1] ^= 1
    (checkpoint / TENSORS).write_bytes(content[:-1])
    assert main([*words_of("export", base, folder, checkpoint), "--no-verify"]) == 2
    assert f"file {TENSORS} has {len(content) - 1} of {len(content)} bytes" in capsys.readouterr().err


def blank_tensors(path: Path) -> None:
    (path / TENSORS).write_bytes(bytes((path / TENSORS).stat().st_size))
    seal(path)


@pytest.mark.parametrize("what", ["index", "tensors"])
def test_verify_opens_the_files_that_it_calls_sound(folder, capsys, what):
    """The hashes agree, as whoever can write the files can write the manifest, and nothing can be read from them."""
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    capsys.readouterr()
    if what == "index":
        (checkpoint / ".metadata").write_bytes(b"junk")
        seal(checkpoint)
    else:
        blank_tensors(checkpoint)
    assert main(["checkpoint", "verify", str(checkpoint)]) == 1
    words = "is not an index of a checkpoint" if what == "index" else "holds something else where"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_list_and_the_removal_of_strange_checkpoints_go_on(folder, capsys, attack):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    outside = folder / "kept"
    outside.mkdir()
    ATTACKS[attack](checkpoint, outside / "it-ran")
    before = sorted(outside.iterdir())
    assert main(["checkpoint", "list", str(folder / "run")]) == 0
    assert main(["checkpoint", "verify", str(checkpoint.parent)]) in (0, 1, 2)
    assert main(["checkpoint", "rm", str(checkpoint), "--force"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert not checkpoint.exists()
    assert sorted(outside.iterdir()) == before


def test_a_link_to_a_checkpoint_is_not_followed_to_remove_it(folder, capsys):
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    (folder / "step-000009").symlink_to(checkpoint)
    assert main(["checkpoint", "rm", str(folder / "step-000009"), "--force"]) == 2
    assert "is a link" in capsys.readouterr().err
    assert complete_checkpoints(checkpoint.parent) == [checkpoint]
