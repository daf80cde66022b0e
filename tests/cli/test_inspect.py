"""`moefold inspect` as a user sees it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from moefold.cli.inspect import print_balance
from moefold.cli.inspect_picture import save_picture
from moefold.cli.main import main
from moefold.metrics.definitions import MISREAD, definitions_text
from moefold.metrics.expert_balance import read_balance
from moefold.metrics.expert_counts import ExpertCountsWriter
from tests.cli.unbalanced_run import write_unbalanced_run
from tests.metrics.undefined import undefined
from tests.slow import slow


def _text(run_dir, layer: int | None = None, *, encoding: str = "utf-8", width: int = 100) -> str:
    class Stream:
        def __init__(self) -> None:
            self.encoding, self.parts = encoding, []

        def write(self, text: str) -> None:
            self.parts.append(text.encode(encoding).decode(encoding))

        def flush(self) -> None: ...

    stream = Stream()
    print_balance(Console(file=stream, width=width, highlight=False), read_balance(run_dir), layer)
    return "".join(stream.parts)


def test_numbers_and_maps_of_a_run(tmp_path):
    lines = _text(write_unbalanced_run(tmp_path)).splitlines()
    assert lines[0] == f"{tmp_path}: 2 MoE layers of 4 experts"
    assert lines[1] == "steps 1 to 30, 30 recorded in expert_counts.bin"
    assert [line.split()[:4] for line in lines[5:7]] == [["0", "1.00", "1.33", "1.33"], ["1", "1.60", "2.00", "2.00"]]
    assert [line.split()[6:8] for line in lines[5:7]] == [["1", "12.5%"], ["1", "12.5%"]]
    maps = {line[:12].strip(): line[14:] for line in lines if line[:12].strip() and line[12:14] == "  "}
    assert maps["layer 1"] == "▃" * 15 + "▅" * 15
    assert "experts of layer 1 over time" in lines
    assert maps["expert 0"] == "▇" * 15 + "█" * 15
    assert maps["expert 3"] == "▄" * 15 + "x" * 15


def test_another_layer_can_be_shown(tmp_path):
    text = _text(write_unbalanced_run(tmp_path), 0)
    assert "experts of layer 0 over time" in text


def test_without_unicode_and_colour(tmp_path):
    text = _text(write_unbalanced_run(tmp_path), encoding="ascii")
    assert "\x1b" not in text
    assert f"    expert 3  {'=' * 15}{'x' * 15}\n" in text


def test_a_narrow_terminal_shortens_the_output(tmp_path):
    assert max(map(len, _text(write_unbalanced_run(tmp_path), width=40).splitlines())) <= 80


def test_of_many_experts_the_fullest_and_the_emptiest(tmp_path):
    text = _text(write_unbalanced_run(tmp_path, experts=128, layers=1))
    rows = [line.split()[1] for line in text.splitlines() if line.startswith(("    expert", "  expert", "   expert"))]
    assert len(rows) == 48
    assert {"0", "127"} <= set(rows)
    assert rows == sorted(rows, key=int)
    assert "80 experts between the busiest and the idlest left out" in text


def test_without_expert_counts_no_expert_is_named(tmp_path):
    (write_unbalanced_run(tmp_path) / "expert_counts.bin").unlink()
    text = _text(tmp_path)
    assert "recorded in metrics.jsonl" in text
    assert "which experts: not recorded; set metrics.expert_counts_every=1" in text


def test_a_run_of_one_step_is_shown(tmp_path):
    assert "steps 1 to 1, 1 recorded" in _text(write_unbalanced_run(tmp_path, steps=1))
    save_picture(read_balance(tmp_path), tmp_path / "one.png")


def test_json(tmp_path, capsys):
    assert main(["inspect", str(write_unbalanced_run(tmp_path)), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert undefined(record, "inspect") == []
    assert (record["first_step"], record["last_step"], record["recorded_steps"]) == (1, 30, 30)
    assert (record["num_experts"], record["source"]) == (4, "expert_counts.bin")
    assert [layer["dead_experts"] for layer in record["layers"]] == [[3], [3]]
    assert record["layers"][1]["load_end"] == pytest.approx(2.0)


@pytest.mark.parametrize("ending", ["png", *slow((ending,) for ending in ("svg", "pdf"))])
def test_a_picture(tmp_path, capsys, ending):
    path = tmp_path / f"balance.{ending}"
    assert main(["inspect", str(write_unbalanced_run(tmp_path)), "--picture", str(path)]) == 0
    assert path.stat().st_size > 5000
    assert capsys.readouterr().err == f"wrote {path}\n"


@pytest.mark.parametrize("layers", [1, *slow(((5,), (40,))), 13])
def test_pictures_of_few_and_many_layers(tmp_path, monkeypatch, layers):
    monkeypatch.setattr("moefold.cli.inspect_picture.DPI", 50)
    save_picture(read_balance(write_unbalanced_run(tmp_path, layers=layers)), tmp_path / "balance.png")
    (tmp_path / "expert_counts.bin").unlink()
    save_picture(read_balance(tmp_path), tmp_path / "loads.png")
    assert (tmp_path / "loads.png").read_bytes() != (tmp_path / "balance.png").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "run 'absent' does not exist"),
        ([__file__], f"run {__file__!r} is not a folder"),
        (["RUN", "--layer", "7"], "--layer 7 is not an MoE layer of"),
        (["RUN", "--picture", "balance.jpg"], "--picture balance.jpg must end in .png, .svg or .pdf"),
        (["RUN", "--picture", f"{__file__}/balance.png"], f"--picture {__file__}/balance.png cannot be written"),
    ],
)
def test_invalid_arguments_are_one_message(tmp_path, capsys, words, message):
    run_dir = str(write_unbalanced_run(tmp_path))
    assert main(["inspect", *(run_dir if word == "RUN" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"moefold: error: {message}")


def test_a_pipe_gets_plain_text(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "moefold", "inspect", str(write_unbalanced_run(tmp_path))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "experts of layer 1 over time" in done.stdout


HEADER = '{"format": "moefold-expert-counts-1", "layers": %s, "num_experts": %s}\n'


@pytest.mark.parametrize(
    ("layers", "experts", "records"),
    [
        ("[0]", "0", b""),
        ("[0]", "-4", bytes(64)),
        ("[-1]", "4", bytes(64)),
        ("[]", "4", bytes(64)),
        ("[0]", "1099511627776", bytes(64)),
        ("[0]", "2", bytes(32)),
        ("[0]", "2", b"\xff" * 16),
    ],
)
def test_crafted_counts_are_one_message(tmp_path, capsys, layers, experts, records):
    (tmp_path / "expert_counts.bin").write_bytes((HEADER % (layers, experts)).encode() + records)
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "lines",
    [
        ['{"step": 1, "expert_load": 3}'],
        ['{"step": 1, "expert_load": [1]}', '{"step": 2, "expert_load": [1, 2]}'],
        ['{"step": 1e400, "expert_load": [1]}'],
        ['{"step": 99999999999999999999, "expert_load": [1]}'],
        ["[" * 10_000],
    ],
)
def test_crafted_metrics_are_one_message(tmp_path, capsys, lines):
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_values_of_other_types_count_as_unknown(tmp_path, capsys):
    odd = '{"step": 1, "expert_load": [1.5, "x", 1%s], "moe_layers": [3], "dropped_fraction": {}}' % ("0" * 400)
    (tmp_path / "metrics.jsonl").write_text(odd + "\n")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "3 MoE layers" in " ".join(capsys.readouterr().out.split())


def test_steps_without_any_copy_have_even_shares_of_nothing(tmp_path, capsys, recwarn):
    with ExpertCountsWriter(tmp_path, [0], 2) as writer:
        writer.write(1, np.zeros((1, 2)))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["load_cv"], layer["share"]) == (0.0, [0.0, 0.0])
    assert not recwarn.list


def test_the_definitions_need_no_run_and_the_help_names_them(capsys):
    assert main(["inspect", "--definitions"]) == 0
    assert capsys.readouterr().out == definitions_text()
    assert main(["inspect"]) == 2
    assert "the following arguments are required: RUN" in capsys.readouterr().err
    assert main(["inspect", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "defined in docs/metrics.md" in text
    assert all(" ".join(line.split()) in text for line in MISREAD)
