"""`moefold plan --compare-folding` as a user types it."""

import json

import pytest

from moefold.cli.main import main
from moefold.errors import EXIT_USER_ERROR
from moefold.planner.mapping_families import STATED_ERROR

FIXED = "pp=1,mbs=1,zero=1,recompute=none,offload=none,overlap=off,dispatcher=alltoall"
SMALL = [
    *("plan", "tiny", "--gpu", "h100", "--num-gpus", "8", "--seq-len", "64", "--global-batch-size", "8"),
    *("--fix", FIXED, "--compare-folding"),
]


def test_the_table_fits_a_terminal_and_has_the_figures_of_the_json(capsys):
    assert main([*SMALL, "64", "128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["seq_len"], one["global_batch_size"]) for one in found["comparisons"]] == [(64, 8), (128, 4)]
    assert found["is_measured"] is False
    assert main([*SMALL, "64", "128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for one in found["comparisons"]:
        steps = [f"{one[method]['step_time_s']:.3f}" for method in ("folded", "coupled", "within_dp")]
        gains = [f"{100 * one[gain]:+.1f}" for gain in ("gain", "gain_within_dp")]
        cells = [str(one["seq_len"]), str(one["global_batch_size"]), steps[0], steps[1], gains[0], "%", steps[2]]
        assert [*cells, gains[1], "%"] in [line.split() for line in lines]
    assert f"none of it is measured on GPUs: {STATED_ERROR}" in " ".join(lines)


def test_without_lengths_the_length_of_the_question_is_compared(capsys):
    assert main([*SMALL, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert found["seq_len"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["64", "64"], "--compare-folding 64 is given twice"),
        (["0"], "--compare-folding 0 must divide the 512 tokens"),
        (["--method", "coupled"], "leave --method out"),
        (["--top", "3"], "--top needs one ranking"),
        (["--explain", "tp=2"], "--explain needs one ranking"),
        (["--timeline", "x.json"], "--timeline needs one ranking"),
    ],
)
def test_incompatible_options_are_refused(capsys, words, message):
    assert main([*SMALL, *words]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
