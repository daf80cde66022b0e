import json

import pytest

from moefold.cli.main import main


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
        (["plot", "pyproject.toml", "x.png"], "pyproject.toml is no JSON"),
    ],
)
def test_bad_words_are_refused(capsys, words, message):
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"moefold: error: {message}")


@pytest.mark.parametrize("words", [["dispatch"], ["ranks"], ["scaling"], ["plot"], ["leastloaded"]])
def test_every_command_is_told_and_helps(capsys, words):
    assert main(["bench", "--help"]) == 0
    assert f"moefold bench {words[0]}" in capsys.readouterr().out
    assert main(["bench", *words, "--help"]) == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.e2e
def test_the_small_shape(capfd, tmp_path):
    words = ["--tokens", "256", "--steps", "1", "--threads", "1", "--clock", "cpu", "--routing", "balanced"]
    report, picture = tmp_path / "report.json", tmp_path / "bars.png"
    assert main(["bench", *words, "--json", str(report), "--plot", str(picture)]) == 0
    out = capfd.readouterr().out
    assert "ratio to transformers: " in out
    assert "ratio to plain torch: " in out
    found = json.loads(report.read_text())
    assert [row["name"].split(",")[0] for row in found["rows"]] == ["moefold", "plain torch", "transformers"]
    assert all(row["peak_gib"] > 0 and row["tokens_per_s"] > 0 for row in found["rows"])
    assert found["load"] < 1.3
    names = [piece["name"] for piece in found["pieces"]]
    assert names == [
        *("attention", "norms", "router", "permutation", "expert GEMMs", "combine", "loss", "embedding", "optimizer"),
    ]
    assert sum(piece["seconds"] for piece in found["pieces"]) < 3 * found["rows"][0]["median_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b-stack", "deepseek-v3-layer"])
def test_a_large_shape_cut_down(capfd, shape):
    words = ["--tokens", "16", "--experts", "16", "--steps", "1", "--threads", "1", "--dtype", "bfloat16"]
    assert main(["bench", "--shape", shape, *words, "--json", "-"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["shape"], found["num_experts"], found["tokens"]) == (shape, 16, 16)
    has_plain = any(row["name"].startswith("plain") for row in found["rows"])
    assert has_plain == (shape == "qwen3-30b-a3b-stack")
    assert has_plain or any("plain torch: its router" in words for words in found["absent"])


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
    assert picture.read_bytes().startswith(b"\x89PNG")
