"""`moefold lm-eval`: its refusals before lm-eval is imported; tasks run in tests/inference/test_lm_eval.py."""

import importlib.util

import pytest

from moefold.cli.main import main
from moefold.errors import ConfigError
from moefold.inference.lm_eval_settings import LmSettings, model_arguments
from tests.inference.checkpoint_folder import described_run


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--model_args", "path=a,tp=2", "--tasks", "x"], {"path": "a", "tp": "2"}),
        (["-a", "path=a", "tp=2", "--tasks", "x"], {"path": "a", "tp": "2"}),
        (["--model_args=path=a", "-b", "4", "--device", "cpu"], {"path": "a", "batch_size": "4", "device": "cpu"}),
        (["--device=cpu", "--tasks", "x=1"], {"device": "cpu"}),
        (["-apath=a", "-b4", "--tasks", "x"], {"path": "a", "batch_size": "4"}),
        (["--batch_size=4", "--model_args", "path=a,batch_size=2"], {"path": "a", "batch_size": "2"}),
        (["-a", '{"path": "a", "tp": 2}', "--max_batch_size", "3"], {"path": "a", "tp": "2", "max_batch_size": "3"}),
    ],
)
def test_the_arguments_of_the_model_are_read_off_the_command_line(words, found):
    assert model_arguments(words) == found


def test_lm_eval_arguments_without_meaning_are_left_out():
    given = {"path": "a", "tp": "2", "batch_size": None, "max_batch_size": None, "device": "cuda:0"}
    assert LmSettings.from_arguments(given) == LmSettings(path="a", tp=2)
    assert LmSettings.from_arguments({"path": "a", "ep": 4, "device": "cpu"}).ep == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs path=MODEL"),
        ({"path": "a", "cp": 2}, "--model_args cp= is unknown; the arguments are path, tp"),
        ({"path": "a", "tp": "two"}, "tp=two must be a number, at least 1"),
        ({"path": "a", "batch_size": 0}, "batch_size=0 must be a number, at least 1"),
        ({"path": "a", "batch_size": "auto:4"}, "--batch_size auto .* is not supported: .* give a number"),
        ({"path": "a", "max_batch_size": 4}, "and its --max_batch_size"),
    ],
)
def test_arguments_that_are_wrong(given, message):
    with pytest.raises(ConfigError, match=message):
        LmSettings.from_arguments(given)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install -e '.[eval]' installs lm-eval")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks x", "--model_args needs path=MODEL"),
        ("--model hf --tasks x", "--model is moefold here"),
        ("--config a.yaml", "--config is read by lm_eval alone"),
        ("--model_args path={run},ep=3 --tasks x", "parallel.ep=3 must divide"),
        ("--model_args path={run}/none --tasks x", "does not exist"),
        ("--model_args path={run} --tasks x -b auto", "--batch_size auto"),
        (
            "--model_args path={run} --apply_chat_template tool_use --tasks x",
            "chat_template tool_use names one",
        ),
        ("--model_args path={run},chat_template=no.jinja --apply_chat_template --tasks x", "chat_template='no.jinja'"),
    ],
)
def test_invalid_argument_is_one_message(tmp_path, capsys, words, message):
    described_run(tmp_path)
    assert main(["lm-eval", *words.format(run=tmp_path).split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
