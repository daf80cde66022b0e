"""`moefold recipe`: files in place, and words."""

from moefold.cli.main import main
from moefold.recipe import load_config

OLD = "# Mine.\n\n[train]\nmin_lr = 1e-5\n"


def test_files_are_upgraded_in_place(tmp_path, capsys):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(OLD)
    second.write_text('[train]\nlr_schedule = "constant"\nmin_lr = 1e-5\n')
    assert main(["recipe", "upgrade", str(first), str(second)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"upgraded {first}",
        f"upgraded {second}",
        "  left out, as no part of the recipe reads it: train.min_lr",
    ]
    assert load_config(first).train.lr_schedule.min_lr == 1e-5
    assert load_config(second).train.lr_schedule.kind == "constant"
    assert main(["recipe", "upgrade", str(first)]) == 0
    assert capsys.readouterr().out == f"{first}: nothing to change\n"


def test_a_file_of_windows_keeps_its_line_ends(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf# Mine.\r\n\r\n[train]\r\nmin_lr = 1e-5\r\n")
    assert main(["recipe", "upgrade", str(file)]) == 0
    lines = ["# Mine.", "", "format = 2", "", "[train]", 'lr_schedule = { kind = "cosine", min_lr = 1e-5 }', ""]
    assert file.read_bytes().decode() == "\r\n".join(lines)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_config(file).train.lr_schedule.min_lr == 1e-5


def test_no_file_changes_if_one_cannot_be_read(tmp_path, capsys):
    (tmp_path / "a.toml").write_text(OLD)
    (tmp_path / "b.toml").write_text("no TOML")
    assert main(["recipe", "upgrade", str(tmp_path / "a.toml"), str(tmp_path / "b.toml")]) == 2
    assert "b.toml' is not valid TOML" in capsys.readouterr().err
    assert (tmp_path / "a.toml").read_text() == OLD


def test_a_word_is_printed_in_its_new_form(tmp_path, capsys):
    (tmp_path / "a.toml").write_text(OLD)
    assert main(["recipe", "upgrade", "--word", "train.min_lr=1e-4", str(tmp_path / "a.toml")]) == 0
    assert capsys.readouterr().out == "train.lr_schedule.min_lr=1e-4\n"
    for words, message in (
        (["--word", "train.decay_steps=4", str(tmp_path / "a.toml")], "a key of 'wsd', and not of 'cosine'"),
        (["--word", "nonsense"], "'nonsense' is not a setting"),
        (["--word", "train.lr=1", "a.toml", "b.toml"], "--word takes one recipe"),
        ([], "needs a FILE, or --word KEY=VALUE"),
    ):
        assert main(["recipe", "upgrade", *words]) == 2
        assert message in capsys.readouterr().err
