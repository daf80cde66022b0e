"""The golden sheet notices a change of each kind of fact, and says which one it was."""

import shutil

import pytest

from moefold.errors import ConfigError
from tools import golden

RECIPE = "recipes/snippet.toml"
TEXT = """
[model]
preset = "quickstart"
rope.theta = {theta}
attention.num_heads = {heads}
[train]
seq_len = {seq_len}
global_batch_size = {batch}
micro_batch_size = 1
[run]
device = "cpu"
seed = {seed}
"""
VALUES = {"theta": 10000.0, "heads": 8, "seq_len": 128, "batch": 32, "seed": 0}
NOTICES = [
    ("parameters", {"heads": 16}),
    ("shards", {"heads": 16}),
    ("flops", {"seq_len": 256}),
    ("cache", {"heads": 4}),
    ("memory", {"seq_len": 256}),
    ("legal mappings", {"batch": 64}),
    ("prices", {"batch": 64}),
    ("shrunk", {"theta": 20000.0}),
    ("hugging face config", {"theta": 20000.0}),
    ("boxes", {"heads": 16}),
    ("seeds", {"seed": 1}),
    ("hugging face tensors", {"heads": 4}),
    ("more prices", {"seq_len": 256}),
]


@pytest.fixture
def texts(tmp_path):
    """Writes a recipe with some values, and returns the full text of its subjects."""

    def compute(subjects, **values):
        path = tmp_path / RECIPE
        path.parent.mkdir(exist_ok=True)
        path.write_text(TEXT.format(**VALUES | values))
        return golden.texts_of(tmp_path, RECIPE, subjects)

    return compute


def sheet_of(texts):
    return {RECIPE: {subject: golden.digest(lines) for subject, lines in texts.items()}}


@pytest.mark.parametrize(("subject", "change"), NOTICES)
def test_the_golden_sheet_names_a_changed_value(texts, subject, change):
    before = texts([subject])
    assert list(golden.differences(sheet_of(before), sheet_of(texts([subject])), [RECIPE])) == []
    after = texts([subject], **change)
    (line,) = golden.differences(sheet_of(before), sheet_of(after), [RECIPE])
    assert line.startswith(f"{RECIPE}: {subject} was ")
    assert next(golden.diff_texts(before, after, 1)).startswith(f"  {subject}: ")


def test_every_subject_of_the_sheet_has_a_change_that_it_notices():
    in_sheet = {name for name in golden.BY_NAME if name != golden.BITS}
    assert {subject for subject, _ in NOTICES} == in_sheet - {"losses"}
    rows = golden.read_sheet(golden.SHEET)
    assert list(rows) == golden.names_of(golden.ROOT)
    assert all(set(row) == in_sheet for row in rows.values())


def test_losses_equal_the_sheet_and_another_seed_is_noticed():
    name = "recipes/quickstart.toml"
    recipe = golden.Recipe(golden.ROOT, name)
    stored = golden.read_sheet(golden.SHEET)[name]["losses"]
    assert golden.digest(list(golden.loss_lines(recipe))) == stored
    recipe.small = golden.replace(recipe.small, run=golden.replace(recipe.small.run, seed=1))
    assert golden.digest(list(golden.loss_lines(recipe))) != stored


def test_numbers_are_rounded_to_nine_digits():
    assert list(golden.flat({"a": {"b": 1 / 3, "c": [1, 2.0]}, "d": (0.1 + 0.2,)})) == [
        "a.b 0.333333333",
        "a.c [1, 2]",
        "d [0.3]",
    ]
    assert golden.rounded(1.0000000001) == golden.rounded(1.0)
    assert golden.rounded(1.00000001) != golden.rounded(1.0)


def test_recipes_without_a_row_and_rows_without_a_recipe_are_named():
    sheet = {"old": {"flops": "1 a"}, "same": {"flops": "1 a"}}
    assert list(golden.differences(sheet, {}, ["new", "same"])) == [
        "new: is not in the sheet",
        "old: is in the sheet, and no preset or recipe",
    ]
    assert list(golden.differences(sheet, {"same": {"flops": "1 a", "cache": "1 b"}}, ["old", "same"])) == [
        "same: cache was not there, is 1 b"
    ]


def test_a_refused_fact_is_an_error_unless_the_recipe_may_have_none(texts, monkeypatch):
    def refuse(recipe):
        raise ConfigError(f"{recipe.root} has no mapping")
        yield

    monkeypatch.setitem(golden.BY_NAME, "prices", golden.Subject("prices", refuse, may_refuse=True))
    assert texts(["prices"]) == {"prices": ["refused: . has no mapping"]}
    monkeypatch.setitem(golden.BY_NAME, "flops", golden.Subject("flops", refuse))
    with pytest.raises(RuntimeError, match="golden: recipes/snippet.toml: flops"):
        texts(["flops"])


def test_an_unknown_recipe_is_refused():
    with pytest.raises(SystemExit, match="'qwen' is not a preset"):
        golden.main(["qwen"])


@pytest.mark.parametrize("words", [["--bits"], ["--subject", "bits", "--write"]])
def test_bits_are_not_part_of_the_sheet(words):
    with pytest.raises(SystemExit) as stopped:
        golden.main(words)
    assert stopped.value.code == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_fact_equals_the_sheet(capsys):
    assert golden.main(["--full"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_checkouts_are_compared_bit_by_bit(tmp_path):
    copy = tmp_path / "copy"
    for folder in ("src", "recipes"):
        shutil.copytree(golden.ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    names = ["recipes/quickstart.toml"]
    flags = ["--subject", "bits", "--subject", "parameters"]
    assert golden.compare_checkouts(copy, golden.ROOT, names, flags) == []
    init = copy / "src/moefold/model/weight_init.py"
    text = init.read_text()
    # The last bit of each weight is another one.
    init.write_text(text.replace("normal_(0.0, std, generator", "normal_(0.0, std * (1 + 2**-23), generator"))
    assert init.read_text() != text
    found = golden.compare_checkouts(copy, golden.ROOT, names, flags)
    assert found[0] == names[0]
    assert [line.split(":")[0] for line in found if line.startswith("  bits")] == ["  bits"]
    assert not any(line.startswith("  parameters") for line in found)
