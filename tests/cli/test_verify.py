"""Test the verdict, the output and the exit status of `moefold verify`, with real ranks and injected faults."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.cli.verify import RunDistributed, verify
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.progress import ProgressCallback
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.toml")
Change = Callable[[DistributedRecord], DistributedRecord]


@pytest.fixture
def runner(pool):
    """Ranks that compute the right thing, and then something happens to the record of the first."""

    def make(change: Change) -> RunDistributed:
        def run(cfg: Config, steps: int, say: ProgressCallback) -> Sequence[DistributedRecord]:
            first, *others = pool.run(cfg.parallel.world_size, run_distributed, cfg, steps)
            return [change(first), *others]

        return run

    return make


def off_by(factor: float, kind: str, name: str) -> Change:
    """Scale one element of one tensor."""

    def change(record: DistributedRecord) -> DistributedRecord:
        tensors = dict(getattr(record, kind))
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[tensors[name].abs().argmax()] *= factor
        return replace(record, **{kind: tensors})

    return change


def test_an_equal_mapping_exits_0(runner, capsys):
    assert verify(tiny(world_size=2, ep=2), 2, runner(lambda record: record)) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "mapping      2 ranks, zero 1, dispatcher alltoall"
    assert "  attention  tp=1 cp=1 dp=2 pp=1, order pp-dp-cp-tp\n" in out
    assert "  experts    etp=1 ep=2 edp=1 pp=1, order pp-edp-ep-etp\n" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("step")] == [["step", "1"], ["step", "2"]]
    assert "\nworst gradient              " in out
    assert "\nworst weight after step 2   " in out
    assert out.splitlines()[-1].startswith("equal: all ")
    assert max(map(len, out.splitlines())) <= 100


def test_a_loss_that_depends_on_dp_is_noted(runner, capsys):
    for kind in ("global_batch", "last_global_batch"):
        assert verify(tiny(moe={"aux_kind": kind}), 1, runner(lambda record: record)) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert notes == ["note         moe.aux_kind='global_batch' depends on dp: the oracle takes the recipe's, dp=1"]


@pytest.mark.parametrize("options", [[], ["--shrink"]])
def test_rounds_of_sites_are_noted_as_not_covered(monkeypatch, capsys, options):
    """Their ranks train as one site: without the note, "equal" would seem to speak of the rounds."""

    def stop(*args: object) -> None:
        raise ConfigError("the header is printed")

    monkeypatch.setattr("moefold.verify.compare.run_oracle", stop)
    for words, notes in ((["sites.count=2"], 1), ([], 0)):
        assert main(["verify", QUICKSTART, *options, *words]) == 2
        assert capsys.readouterr().out.count("note         NOT covered: the rounds of [sites]; ") == notes


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gradients", "layers.0.ffn.experts.w_gate"), ("weights", "head.norm.weight"), ("initial", "embedding.weight")],
)
def test_one_wrong_element_exits_1_and_is_named(runner, capsys, kind, name):
    assert verify(tiny(), 1, runner(off_by(1 + 1e-7, kind, name))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("NOT equal: 1 of ")
    assert lines[-1].split() == ["1.0e-07", kind, name]


def test_a_difference_below_the_tolerance_is_none(runner):
    assert verify(tiny(), 1, runner(off_by(1 + 1e-11, "weights", "head.norm.weight"))) == 0


def test_a_wrong_gradient_norm_exits_1(runner, capsys):
    def change(record: DistributedRecord) -> DistributedRecord:
        step = replace(record.steps[0], grad_norm=record.steps[0].grad_norm * (1 + 1e-6))
        return replace(record, steps=(step,))

    assert verify(tiny(), 1, runner(change)) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["1.0e-06", "step", "1", "grad_norm", "(rank", "0)"]


def test_many_differences_are_counted_and_weights_come_before_numbers(runner, capsys):
    def change(record: DistributedRecord) -> DistributedRecord:
        step = replace(record.steps[0], grad_norm=float("nan"))
        return replace(record, steps=(step,), weights={name: w * 1.01 for name, w in record.weights.items()})

    assert verify(tiny(), 1, runner(change)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("  and ")
    assert all(" weights " in line for line in lines[-11:-1])
    assert sum(line.startswith("   1.0e-02  weights ") for line in lines) == 10


def test_a_shrunk_recipe_of_the_project_is_verified(capsys):
    assert main(["verify", QUICKSTART, "--shrink", "--steps", "1", "parallel.world_size=4", "parallel.pp=1"]) == 0
    assert "equal: all " in capsys.readouterr().out


def test_cuda_graphs_are_left_out(capsys):
    graphs = ["run.cuda_graphs=full", "run.dtype=bfloat16"]
    assert main(["verify", str(Path(QUICKSTART).with_name("single.toml")), "--shrink", "--steps", "1", *graphs]) == 0
    assert "equal: all " in capsys.readouterr().out


def test_a_schedule_file_is_checked_before_ranks_start(capsys, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("0F0,0B0\n")
    words = ["parallel.pp=2", "parallel.schedule=csv", f"parallel.schedule.path={path}"]
    assert main(["verify", QUICKSTART, *words]) == 2
    captured = capsys.readouterr()
    assert "has 1 rows, and parallel.pp=2" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["model.preset=mixtral-8x7b"], "parameters in float64, on both sides"),
        (["parallel.world_size=4096", "train.global_batch_size=16384"], "parallel.world_size=4096 ranks take"),
    ],
)
def test_a_recipe_that_cannot_be_verified_here_is_refused(capsys, words, message):
    assert main(["verify", QUICKSTART, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moefold: error: ")
    assert message in err
    assert err.count("\n") == 1
