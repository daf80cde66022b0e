"""The Python interface: the programs of docs/api.md, ranks that are started, and refusals."""

import dataclasses
import json
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch

import moefold
from tests.cli.example_command import code_blocks
from tests.e2e.forked import run_program
from tests.slow import slow

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
SETTINGS = (
    "run.steps=3",
    "run.device=cpu",
    "model.preset=tiny",
    "data.kind=synthetic",
    "train.seq_len=32",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.warmup_steps=1",
)


class Recorder(moefold.Callback):
    """Write the hooks that were called to a file, and keep them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = []

    def _record(self, run, *words: object) -> None:
        self.calls.append(words)
        if run.is_first_rank:
            self.path.write_text(json.dumps(self.calls))

    def on_start(self, run) -> None:
        self._record(run, "start", run.position.step)

    def after_step(self, run, step) -> None:
        self._record(run, "step", step.number, run.position.tokens, step.is_last, step.result.loss)

    def on_end(self, run, status) -> None:
        self._record(run, "end", status)


def run_programs(programs: list[str], folder: Path) -> str:
    """Run programs one after the other in one process, and return their output."""
    files = [folder / f"program_{number}.py" for number in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    runner = f"import runpy\nfor file in {list(map(str, files))!r}:\n    runpy.run_path(file, run_name='__main__')\n"
    with chdir(folder):
        done = run_program(runner, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parity
def test_the_programs_of_the_page_run(tmp_path):
    programs = code_blocks(PAGE.read_text(), "python")
    assert len(programs) == 6
    printed = run_programs(programs, tmp_path)
    assert "step 6: validation loss" in printed
    assert "status 0, loss " in printed
    assert "model in runs/from-python" in printed
    assert " length" in printed


def test_the_page_describes_every_function():
    page = PAGE.read_text()
    functions = [name for name in moefold._MODULES if name.islower()]
    assert functions
    assert [name for name in functions if f"`{name}(" not in page] == []


@pytest.mark.parametrize("name", ["PlanOptions", "EvalOptions", "GenerateOptions", "SamplingParams"])
def test_the_page_lists_every_field_of_the_options(name):
    [listed] = re.findall(rf"`{name}\(([\w, ]+)\)`", " ".join(PAGE.read_text().split()))
    assert listed.split(", ") == [field.name for field in dataclasses.fields(getattr(moefold, name))]


def test_every_name_of_the_package_can_be_imported():
    assert [name for name in moefold._MODULES if getattr(moefold, name, None) is None] == []


def test_the_stub_and_the_listing_have_every_name_of_the_package():
    assert set(moefold._MODULES) <= set(dir(moefold))
    stub = (Path(moefold.__file__).with_suffix(".pyi")).read_text()
    lines = [f"from moefold.{module} import {name} as {name}" for name, module in moefold._MODULES.items()]
    assert sorted(line for line in stub.splitlines() if line.startswith("from ")) == sorted(lines)
    with pytest.raises(AttributeError, match="no attribute 'trian_model'"):
        moefold.trian_model  # noqa: B018


def test_the_import_is_fast_and_without_torch():
    program = (
        "import sys, moefold\n"
        "before = set(sys.modules)\n"
        "assert not {'torch', 'pydantic', 'numpy'} & before\n"
        "moefold.load_config, moefold.plan, moefold.train_model\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parity
@pytest.mark.parametrize("mapping", [*slow([((),)]), ("parallel.world_size=2", "parallel.ep=2")], ids=["one", "two"])
def test_a_run_can_be_evaluated_and_generate_on_one_rank_or_two(tmp_path, mapping):
    calls = tmp_path / "calls.json"
    recorder = Recorder(calls)
    cfg = moefold.load_config(None, [*SETTINGS, *mapping, f"run.dir={tmp_path / 'run'}"])
    outcome = moefold.train_model(cfg, callbacks=[recorder])
    assert (outcome.status, outcome.run_dir) == (0, tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [["step", n, n * 128, n == 3, loss] for n, loss in enumerate(losses, 1)]
    assert json.loads(calls.read_text()) == [["start", 0], *steps, ["end", 0]]
    assert len(recorder.calls) == (0 if mapping else 5)
    # A finished run has nothing to do.
    assert moefold.train_model(cfg) == outcome
    ids = np.arange(100) % 7
    whole = moefold.evaluate(tmp_path / "run", tokens=ids, options=moefold.EvalOptions(seq_len=20))
    found = moefold.evaluate(tmp_path / "run", tokens=ids, overrides=mapping, options=moefold.EvalOptions(seq_len=20))
    assert found.tokens == whole.tokens == 5 * 19
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)
    parallel = ("parallel.tp=2", *mapping[1:]) if mapping else ()
    texts = [
        moefold.generate(
            tmp_path / "run",
            ["1 2 3", "4"],
            max_tokens=5,
            sampling=moefold.SamplingParams(temperature=0),
            overrides=overrides,
        )
        for overrides in ((), parallel)
    ]
    assert texts[0] == texts[1]
    assert [len(one.tokens) for one in texts[0]] == [5, 5]
    assert texts[0][0].prompt == "1 2 3"


@pytest.mark.parity
def test_a_callback_that_fails_ends_the_run(tmp_path):
    class Failing(moefold.Callback):
        def after_step(self, run, step):
            raise LookupError(f"at step {step.number}")

    cfg = moefold.load_config(None, [*SETTINGS, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(LookupError, match="at step 1"):
        moefold.train_model(cfg, callbacks=[Failing()])


@pytest.mark.parity
def test_a_failure_of_a_rank_that_was_started_is_an_error(tmp_path, capfd):
    class Failing(moefold.Callback):
        def after_step(self, run, step):
            raise moefold.RunError(f"at step {step.number}")

    cfg = moefold.load_config(None, [*SETTINGS, "parallel.world_size=2", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(moefold.RunError, match="ended with status 1"):
        moefold.train_model(cfg, callbacks=[Failing()])
    assert "at step 1" in capfd.readouterr().err


def test_a_plan_equals_the_command(capsys):
    from moefold.cli.main import main

    words = "plan tiny --gpu h100 --num-gpus 8 --seq-len 64 --global-batch-size 16 --fix tp=2 --json --top 3"
    assert main(words.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    planner = moefold.plan("tiny", "h100", num_gpus=8, seq_len=64, global_batch_size=16, fix={"tp": 2})
    assert json.loads(json.dumps(moefold.result_as_dict(planner, 3))) == printed
    cfg = planner.config_for(planner.best())
    assert moefold.check_config(cfg).tp == 2


def test_a_model_equals_the_model_of_a_run():
    cfg = moefold.load_config(None, [*SETTINGS])
    model = moefold.build_model(cfg)
    logits = model(torch.zeros(1, 32, dtype=torch.int64))
    assert logits.shape == (32, 1, cfg.model.vocab_size)
    assert torch.equal(logits, moefold.build_model(cfg)(torch.zeros(1, 32, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: moefold.evaluate(f, tokens=[1]), r"MODEL=.* holds no model"),
        (lambda f: moefold.evaluate(f), "either tokens or text"),
        (lambda f: moefold.evaluate(f, tokens=[1], options=moefold.EvalOptions(seq_len=1)), "^seq_len=1 must be at"),
        (lambda f: moefold.generate(f, []), "at least one prompt"),
        (lambda f: moefold.generate(f, "a", max_tokens=0), "^max_tokens=0 must be at least 1"),
        (lambda f: moefold.generate(f, "a", sampling=moefold.SamplingParams(temperature=-1)), "^temperature=-1 must"),
        (lambda f: moefold.plan("tiny", "h100"), "^num_gpus is missing"),
        (
            lambda f: moefold.plan("tiny", "h100", num_gpus=64, options=moefold.PlanOptions(num_gpus=16)),
            r"^num_gpus=64 and options.num_gpus=16 differ",
        ),
        (lambda f: moefold.train_model(f / "none.toml"), "does not exist"),
        (lambda f: moefold.train_model(moefold.load_config(None), ["run.steps=1"]), "overrides apply to a recipe file"),
        (lambda f: moefold.train_model(moefold.load_config(None, ["parallel.mapping=auto"])), "result of load_recipe"),
        (
            lambda f: moefold.train_model(
                moefold.load_recipe(None, ["data.kind=task", "rl.group_size=4", "rl.objective=clip"]),
                loss=lambda *_: None,
            ),
            "^loss= replaces the loss of the recipe, which sets rl.objective",
        ),
        (
            lambda f: moefold.train_model(
                moefold.load_config(None, ["data.kind=task", "rl.group_size=4"]), loss=lambda *_: None
            ),
            "^loss=function has no attribute `columns`",
        ),
    ],
)
def test_a_refusal_is_one_message_in_terms_of_python(tmp_path, call, message):
    with pytest.raises(moefold.ConfigError, match=message):
        call(tmp_path)
