import json

import pytest

from moefold.cli.main import main
from tests.e2e.command import moefold

BELOW_A_FILE = f"{__file__}/x"
"""Path that not even root can create."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--shape", "large"], "--shape 'large' is unknown; the shapes are small, mixtral-8x7b-layer"),
        (["--tokens", "300"], "--tokens 300 must be a multiple of 256"),
        (["--experts", "1"], "--experts 1 must be at least 2"),
        (["dispatch", "--ranks", "0"], "--ranks 0 must be at least 1"),
        (["dispatch", "--hidden", "100"], "--hidden 100 must be a multiple of 64"),
        (["plot", "nowhere.json", "x.png"], "nowhere.json: No such file"),
        (["--tokens", "-5"], "--tokens -5 must be at least 1; leave it out for 2048"),
        (["--experts", "-1"], "--experts -1 must be at least"),
        (["--json", f"{BELOW_A_FILE}.json"], f"--json {BELOW_A_FILE}.json cannot be written: Not a directory"),
        (["--picture", f"{BELOW_A_FILE}.png"], f"--picture {BELOW_A_FILE}.png cannot be written: Not a directory"),
        (["ranks", "--json", f"{BELOW_A_FILE}.json"], f"--json {BELOW_A_FILE}.json cannot be written"),
        (["scaling", "--json", f"{BELOW_A_FILE}.json"], f"--json {BELOW_A_FILE}.json cannot be written"),
        (["dispatch", "--json", f"{BELOW_A_FILE}.json"], f"--json {BELOW_A_FILE}.json cannot be written"),
        (["--picture", "x.xyz"], "--picture x.xyz must end in .png, .svg or .pdf"),
        (["ranks", "--picture", "x.xyz"], "--picture x.xyz must end in .png, .svg or .pdf"),
        (["scaling", "--picture", "x.xyz"], "--picture x.xyz must end in .png, .svg or .pdf"),
        (
            ["ranks", "run.device=cuda"],
            "moefold bench ranks counts CPU time, and run.device='cuda'; set run.device=cpu",
        ),
        (["plot", "pyproject.toml", "x.png"], "pyproject.toml is no JSON"),
    ],
)
def test_invalid_arguments_are_refused(capsys, words, message):
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"moefold: error: {message}")


@pytest.mark.parametrize("words", [["dispatch"], ["ranks"], ["scaling"], ["plot"], ["leastloaded"]])
def test_every_command_is_listed_and_has_help(capsys, words):
    assert main(["bench", "--help"]) == 0
    assert f"moefold bench {words[0]}" in capsys.readouterr().out
    assert main(["bench", *words, "--help"]) == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.e2e
def test_the_small_shape(capfd, tmp_path):
    words = ["--tokens", "256", "--steps", "1", "--threads", "1", "--clock", "cpu", "--routing", "balanced"]
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    assert main(["bench", *words, "--json", str(report), "--picture", str(picture)]) == 0
    out = capfd.readouterr().out
    assert "part of our step, by itself" in out
    assert "ratio to" not in out
    found = json.loads(report.read_text())
    assert [row["name"] for row in found["rows"]] == ["moefold"]
    assert all(row["peak_gib"] > 0 and row["tokens_per_s"] > 0 for row in found["rows"])
    assert found["load"] < 1.3
    names = [piece["name"] for piece in found["pieces"]]
    assert names == [
        *("attention", "norms", "router", "permutation", "expert GEMMs", "combine", "loss", "embedding", "optimizer"),
    ]
    assert sum(piece["seconds"] for piece in found["pieces"]) < 3 * found["rows"][0]["median_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_a_large_shape_cut_down(capfd):
    words = ["--shape", "qwen3-30b-a3b-layer", "--tokens", "16", "--experts", "8", "--steps", "1", "--threads", "1"]
    assert main(["bench", *words, "--dtype", "float32", "--json", "-"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["shape"], found["num_experts"], found["tokens"]) == ("qwen3-30b-a3b-layer", 8, 16)
    assert [row["name"] for row in found["rows"]] == ["moefold"]
    assert "attention" not in [piece["name"] for piece in found["pieces"]]


@pytest.mark.e2e
def test_dispatch_on_two_ranks(capfd, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["--ranks", "2", "--tokens", "64", "--hidden", "64", "--steps", "1", "--json", str(report)]
    assert main(["bench", "dispatch", *words]) == 0
    assert "CP x EP, folded and coupled" in capfd.readouterr().out
    bars = json.loads(report.read_text())["bars"]
    assert {bar["name"] for bar in bars} == {"ETP1 EP2", "ETP2 EP1", "CP2 EP2 folded"}
    assert {bar["grain"] for bar in bars} == {"coarse", "fine"}
    assert all(seconds > 0 for bar in bars for seconds in bar["parts_s"].values())
    assert main(["bench", "plot", str(report), str(picture)]) == 0
    assert main(["bench", "plot", str(report), str(picture)]) == 2
    assert "add --force to replace it" in capfd.readouterr().err
    assert main(["bench", "plot", str(report), str(picture), "--force"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_ranks_of_a_small_recipe(tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["parallel.world_size=2", "parallel.tp=2", "parallel.ep=2", "parallel.cp=1", "parallel.pp=1"]
    sizes = ["train.seq_len=32", "train.micro_batch_size=2", "train.global_batch_size=2"]
    files = ["--json", str(report), "--picture", str(picture)]
    # Ranks are forked, and this process runs threads of the benchmarks before.
    done = moefold("bench", "ranks", *words, *sizes, "--steps", "1", *files)
    assert done.returncode == 0, done.stderr
    assert "communication and Python: " in done.stdout
    found = json.loads(report.read_text())
    assert len(found["per_rank"]) == 2
    assert all(seconds > 0 for rank in found["per_rank"] for seconds in rank.values())
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_scaling(capfd, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    words = ["--tokens", "256", "512", "--experts", "8", "16", "--steps", "1", "--threads", "1", "--clock", "cpu"]
    assert main(["bench", "scaling", *words, "--json", str(report), "--picture", str(picture)]) == 0
    assert "of the best" in capfd.readouterr().out
    found = json.loads(report.read_text())
    assert [point["tokens"] for point in found["by_tokens"]] == [256, 512]
    assert [point["experts"] for point in found["by_experts"]] == [8, 16]
    assert found["by_experts"][0]["ratio"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
