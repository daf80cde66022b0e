import json

import pytest

from moefold.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "--tokens 0 must be at least 1"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--skew", "0.5", "1.5"], "--skew 1.5 must lie in [0, 1]: it is a fraction of the tokens"),
    ],
)
def test_invalid_arguments_are_refused(capsys, words, message):
    assert main(["bench", "leastloaded", *words]) == 2
    assert capsys.readouterr().err == f"moefold: error: {message}\n"


def test_help_names_the_subcommand(capsys):
    assert main(["bench", "--help"]) == 0
    assert "moefold bench leastloaded" in capsys.readouterr().out
    assert main(["bench", "leastloaded", "--help"]) == 0
    assert "--ranks" in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.parametrize("as_json", [False, True])
def test_the_report(capfd, as_json):
    words = ["--ranks", "2", "--tokens", "128", "--skew", "0.9", "--steps", "1"]
    assert main(["bench", "leastloaded", *words, *(["--json"] if as_json else [])]) == 0
    out = capfd.readouterr().out
    if as_json:
        report = json.loads(out)
        assert (report["ranks"], report["tokens_per_rank"]) == (2, 128)
        plain, ours = report["measurements"]
        assert (plain["dispatcher"], ours["dispatcher"]) == ("alltoall", "leastloaded")
        assert plain["rows"] > 1.8 * 128
        assert ours["rows"] <= 1.1 * 128 + 1
    else:
        assert "hot expert  dispatcher" in out
        assert out.count("90%") == 3
