"""Recipes and overrides are read into a config; each fault is named by key, value and type."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.config.keys.paths import part_keys, tables
from moefold.config.load import config_from_dict
from moefold.config.schema import Config, config_to_dict, write_config_json
from moefold.errors import ConfigError
from moefold.recipe import load_config, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_no_recipe_and_no_override_is_all_defaults():
    assert load_config(None) == Config()


def test_recipe_sets_keys_and_leaves_the_others_at_their_defaults(tmp_path):
    cfg = load_config(write_recipe(tmp_path, "[run]\nsteps = 7\n[train]\nlr = 1\n"))
    assert cfg.run.steps == 7
    assert cfg.train.lr == 1.0
    assert isinstance(cfg.train.lr, float)
    assert cfg.model == Config().model


def test_overrides_win_over_the_recipe_and_later_ones_over_earlier_ones(tmp_path):
    path = write_recipe(tmp_path, "[run]\nsteps = 7\nseed = 1\n")
    loaded = load_recipe(path, ["run.steps=8", "run.steps=9", "train.lr=1e-4", "train.lr=1e-4"])
    assert (loaded.cfg.run.steps, loaded.cfg.run.seed, loaded.cfg.train.lr) == (9, 1, 1e-4)
    assert loaded.messages == ("run.steps=9 replaces 8, given before it",)


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("run.dir=runs/new", "run", "dir", "runs/new"),
        ("run.dir='runs/new'", "run", "dir", "runs/new"),
        ("run.dir=2024-01-01", "run", "dir", "2024-01-01"),
        ("run.dir=17", "run", "dir", "17"),
        ("run.dir=a=b", "run", "dir", "a=b"),
        ("run.dir=3\nseed = 4", "run", "dir", "3\nseed = 4"),
        ("run.dtype=float32", "run", "dtype", "float32"),
        ("run.deterministic=true", "run", "deterministic", True),
        ("run.steps=1_000", "run", "steps", 1000),
        (" run.steps = 12 ", "run", "steps", 12),
        ("parallel.zero=3", "parallel", "zero", 3),
        ("train.lr=3", "train", "lr", 3.0),
    ],
)
def test_override_values_are_toml_and_text_needs_no_quotes(word, section, key, value):
    found = getattr(getattr(load_config(None, [word]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_a_list_of_paths_is_a_list_on_the_command_line_too():
    cfg = load_config(None, ["data.kind=text", 'data.path=["a", "b"]'])
    assert cfg.data.path == ("a", "b")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('run.steps="2"', "run.steps='2' must be an integer"),
        ("run.steps=2.0", "run.steps=2.0 must be an integer"),
        ("run.steps=true", "run.steps=true must be an integer"),
        ("train.lr=true", "train.lr=true must be a number"),
        ("train.lr=fast", "train.lr='fast' must be a number"),
        ("train.lr=nan", "train.lr=nan must be a finite number"),
        ("train.lr=inf", "train.lr=inf must be a finite number"),
        ("train.lr=2024-01-01", "train.lr=2024-01-01 must be a number"),
        ("run.deterministic=1", "run.deterministic=1 must be true or false"),
        ("run.deterministic=True", "run.deterministic='True' must be true or false"),
        ("parallel.zero=true", "parallel.zero=true must be one of 0, 1, 2, 3"),
        ("parallel.zero=1.0", "parallel.zero=1.0 must be one of 0, 1, 2, 3"),
        ("parallel.zero=4", "parallel.zero=4 must be one of 0, 1, 2, 3"),
        (
            "parallel.context=rings",
            "parallel.context='rings' must be one of 'allgather', 'planned', 'ring', 'ulysses'; did",
        ),
        ("data.path=[1]", "data.path=[1] must be a string or a list of strings"),
        (
            "data.path=[a,b]",
            "data.path='[a,b]' must be a string or a list of strings; write data.path='[\"a\", \"b\"]'",
        ),
        ("lora.targets=[wq]", "lora.targets='[wq]' must be a list of strings; write lora.targets='[\"wq\"]'"),
        (
            "train.recompute=layer",
            "train.recompute='layer' must be a list of strings; write train.recompute='[\"layer\"]'",
        ),
    ],
)
def test_wrong_types_name_key_value_and_expected_type(word, message):
    assert refused(word).startswith(message)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.layer=3", "unknown key model.layer; did you mean model.layers?"),
        ("model.seq_len=3", "unknown key model.seq_len; did you mean train.seq_len?"),
        ("metrics.zzz=3", "unknown key metrics.zzz; the keys of [metrics] are tensorboard, wandb, wandb_project"),
        ("parallel.dp=2", "parallel.dp follows from world_size/(tp*cp*pp)"),
        ("parallel.edp=2", "parallel.edp follows from world_size/(ep*etp*pp)"),
        ("paralel.tp=2", "override 'paralel.tp=2': unknown section [paralel]; did you mean [parallel]?"),
        ("zzz.tp=2", "unknown section [zzz]; the sections are run, model, parallel, moe, train, data"),
        ("tp=2", "override 'tp=2' names no section; did you mean parallel.tp=2 or rollout.tp=2?"),
        ("zzz=2", "override 'zzz=2' names no section; overrides are section.key=value"),
        ("run.=2", "names no section"),
        (f"run.{'x' * 90_000}=2", "xxx... names no key; overrides are section.key=value"),
        ("--steps", "'--steps' is not an override; overrides are section.key=value"),
        ("model.preset=mixtral-8x7", "model.preset='mixtral-8x7' is unknown; did you mean 'mixtral-8x7b'? The"),
        (
            "model.preset=zzz",
            "model.preset='zzz' is unknown; the presets are bench-small, deepseek-v2, deepseek-v2-lite",
        ),
    ],
)
def test_unknown_names_come_with_the_nearest_known_one(word, message):
    assert message in refused(word)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 3", "lr stands outside any section; did you mean train.lr or sites.lr?"),
        ("[modle]\nnum_layers = 2", "unknown section [modle]; did you mean [model]?"),
        ("run = 3", "run=3 must be a section: write [run] and its keys below"),
        ("[[run]]\nsteps = 3", "must be a section: write [run]"),
        ("[run.steps]\na = 3", "run.steps={'a': 3} must be an integer"),
        ("[run]\nsteps = 12:30:00", "run.steps=12:30:00 must be an integer"),
        ("[model]\npreset = 3", "model.preset=3 must be a string"),
        ('"train.lr" = 1e-3', 'unknown section "train.lr": in quotes it is one name; write [train], and below it lr'),
        ("[train]\nlr = 1e-3\nlr = 2e-3", "Cannot overwrite a value (at end of document): lr is set twice; remove one"),
        ("[train]\nlr = 1e-3\nlr = 2e-3\n", "(at line 3, column 10): lr is set twice; remove one"),
        ('[data]\npath = ["a"]\npath = [\n  "b",\n]\n', ": path is set twice; remove one"),
        ('[model]\nattention = "mla"\nattention.q = 3\n', '; the kind of a table stands in the table: kind = "mla"'),
        ('[model]\nattention.q = 3\nattention = "mla"\n', '; the kind of a table stands in the table: kind = "mla"'),
        (
            '[train.optimizer]\nkind = "muon"\ngroups = "router"',
            "train.optimizer.groups='router' must be a list; write train.optimizer.groups='[\"router\"]'",
        ),
    ],
)
def test_a_recipe_of_the_wrong_form_is_explained(tmp_path, text, message):
    assert message in refused(path=write_recipe(tmp_path, text))


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ("model.attention.indexer", "top_k=8"),
        ("model.rope.scaling", "factor=2.0"),
        ("model.ffn.moe.shared", "gate=true"),
        ("rl.correction", "low=0.5"),
    ],
)
@pytest.mark.parametrize("preset", ["", 'preset = "deepseek-v3"\n'])
def test_a_setting_of_a_table_that_is_none_is_refused(tmp_path, table, setting, preset):
    off, word = f"{table}=none", f"{table}.{setting}"
    message = f"{off} has no keys; leave it or {word.partition('=')[0]} out"
    given = [f"model.preset={preset.split()[-1]}"] if preset else []
    assert refused(*given, off, word) == refused(*given, word, off) == message
    section, _, key = table.partition(".")
    text = f"[model]\n{preset}" + ("" if section == "model" else f"[{section}]\n") + f"{key} = 'none'\n"
    assert refused(word, path=write_recipe(tmp_path, text)) == message


def test_a_later_word_gives_a_table_that_was_none_another_kind():
    words = ["model.rope.scaling=none", "model.rope.scaling.factor=2.0", "model.rope.scaling=linear"]
    assert load_config(None, words) == load_config(None, words[1:])


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        ("model.attention={num_heads=8}", ("model.attention.num_heads=8",)),
        ("model.ffn.moe.router={top_groups=2}", ("model.ffn.moe.router.top_groups=2",)),
        ("model.rope={}", ()),
        ("train.optimizer={weight_decay=0.2}", ("train.optimizer.weight_decay=0.2",)),
    ],
)
def test_a_table_without_a_kind_keeps_the_kind_of_the_recipe(tmp_path, table, settings):
    text = """
[model]
attention = { kind = "mla", num_heads = 4, q_lora_rank = 8 }
rope = { theta = 5e4, scaling = { kind = "yarn", factor = 4.0 } }
[model.ffn.moe]
num_experts = 16
router = { kind = "sigmoid", num_groups = 4 }
[train]
optimizer = { kind = "muon", momentum = 0.9 }
"""
    path = write_recipe(tmp_path, text)
    assert load_config(path, [table]) == load_config(path, settings)


def test_faults_of_a_table_stand_beside_the_others(tmp_path):
    text = "[model]\nlayers = true\nattention = { num_heads = 'x', head_dim = 'y' }\n"
    lines = refused(path=write_recipe(tmp_path, text)).splitlines()
    assert [line.split()[0].split("=")[0] for line in lines] == [
        "3", "model.attention.num_heads", "model.attention.head_dim", "model.layers",
    ]  # fmt: skip


def test_a_kind_beside_its_table_is_told_where_it_stands(tmp_path):
    text = "[model]\nattention = 'mla'\n[model.attention]\nnum_heads = 4\n"
    assert refused(path=write_recipe(tmp_path, text)).endswith('the kind of a table stands in the table: kind = "mla"')


@pytest.mark.parametrize("name", [name for name in tables() if name not in part_keys()])
def test_a_word_for_a_table_without_kinds_is_refused(tmp_path, name):
    path = tmp_path / "recipe.toml"
    path.write_text(f"format = 2\n[{name}]\n")
    message = refused(f"{name}=word", path=path)
    assert message == refused(f"{name}=word")
    assert f"{name}='word' must be a table" in message
    assert ("did you mean checkpoint.upcycle.dense=word?" in message) == (name == "checkpoint.upcycle")
    assert f"{name}=word has no keys" in refused(f"{name}=word", f"{name}.key=3", path=path)


def test_an_override_cannot_repair_a_section_that_is_not_a_table(tmp_path):
    assert "run=3 must be a section" in refused("run.steps=4", path=write_recipe(tmp_path, "run = 3"))


def test_all_faults_are_listed_one_a_line(tmp_path):
    text = "[run]\nsteps = '2'\nstep = 3\n[nodel]\n[train]\nlr = true\n[model]\npreset = 'none'\n"
    lines = refused(path=write_recipe(tmp_path, text)).splitlines()
    assert lines[0] == "5 settings cannot work:"
    found = sorted(line.strip().split(";")[0] for line in lines[1:])
    assert found == [
        "model.preset='none' is unknown",
        "run.steps='2' must be an integer",
        "train.lr=true must be a number",
        "unknown key run.step",
        "unknown section [nodel]",
    ]


def test_long_values_are_cut():
    assert len(refused(f"run.steps={'x' * 5000}")) < 150


def test_malformed_toml_names_line_and_column(tmp_path):
    message = refused(path=write_recipe(tmp_path, "[run]\nsteps = \n"))
    assert "recipe.toml' is not valid TOML" in message
    assert "line 2, column 9" in message


def test_a_missing_recipe_names_the_nearest_one():
    assert refused(path=RECIPES / "quickstrat.toml").endswith(f"did you mean {str(RECIPES / 'quickstart.toml')!r}?")
    assert refused(path=RECIPES / "quickstart").endswith(f"did you mean {str(RECIPES / 'quickstart.toml')!r}?")


def test_a_missing_recipe_with_no_near_name_lists_the_recipes(tmp_path):
    recipe = write_recipe(tmp_path, "")
    assert refused(path=tmp_path / "zzz.toml").endswith(f"recipes near it: {recipe}")


def test_a_missing_recipe_in_an_empty_folder_is_just_missing(tmp_path):
    assert refused(path=tmp_path / "a.toml") == f"recipe {str(tmp_path / 'a.toml')!r} does not exist"


def test_a_recipe_below_a_missing_folder_is_looked_for_here(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path / "recipes", "")
    monkeypatch.chdir(tmp_path)
    assert refused(path=Path("nowhere/recipe.toml")).endswith("did you mean 'recipes/recipe.toml'?")


def test_a_folder_and_a_binary_file_are_no_recipes(tmp_path):
    assert "is a folder" in refused(path=tmp_path)
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not text in UTF-8" in refused(path=tmp_path / "a.toml")


def test_a_path_through_a_file_cannot_be_read(tmp_path):
    recipe = write_recipe(tmp_path, "")
    assert "cannot be read: Not a directory" in refused(path=recipe / "inner.toml")


def test_keys_beside_a_preset_win_over_it():
    cfg = load_config(None, ["model.preset=mixtral-8x7b", "model.layers=2"])
    assert cfg.model.num_layers == 2
    assert cfg.model.hidden_size == 4096
    assert cfg.model.preset == "mixtral-8x7b"


@pytest.mark.parametrize("path", [None, *sorted(RECIPES.glob("*.toml"))], ids=lambda path: path and path.stem)
def test_a_config_survives_its_json(tmp_path, path):
    cfg = load_config(path, ["run.seed=3"])
    write_config_json(cfg, tmp_path / "config.json")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert config_from_dict(json.loads((tmp_path / "config.json").read_text())) == cfg


def test_paths_survive_their_json():
    cfg = load_config(None, ["data.kind=text", 'data.path=["a", "b"]'])
    tree = config_to_dict(cfg)
    assert tree["data"]["path"] == ["a", "b"]
    assert config_from_dict(tree) == cfg


def test_a_dict_is_judged_as_strictly_as_a_recipe():
    with pytest.raises(ConfigError, match="unknown key run.stepz; did you mean run.steps"):
        config_from_dict({"run": {"stepz": 3}})
    with pytest.raises(ConfigError, match="run.steps='3' must be an integer"):
        config_from_dict({"run": {"steps": "3"}})


def test_loading_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from pathlib import Path; from moefold.recipe import load_config;"
        "from moefold.validate.config import check_config; check_config(load_config(Path(sys.argv[1])));"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(RECIPES / "quickstart.toml")], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_an_automatic_mapping_is_asked_for_in_one_word_on_the_command_line(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[parallel]\ntp = 2\n")
    cfg = load_config(path, ["parallel=auto"])
    assert (cfg.parallel.mapping, cfg.parallel.tp) == ("auto", 2)


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("run.steps=abc", ("run.steps", "abc", "must be an integer", "")),
        ("run.steps=99999999999", ("run.steps", 99999999999, "must be at most 1000000000", "")),
        ("train.recompute=moe", ("train.recompute", "moe", "must be a list of strings", "write {}='[\"moe\"]'")),
        ("run.device=cpuu", ("run.device", "cpuu", "must be one of 'auto', 'cpu', 'cuda'", "did you mean 'cpu'?")),
        (
            f"run.dtype={'x' * 99}",
            ("run.dtype", f"'{'x' * 56}...", "must be one of 'bfloat16', 'float32', 'float64'", ""),
        ),
    ],
)
def test_a_refused_value_has_fields(word, fields):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [word])
    [found] = refused.value.problems
    key, value, rule, way_out = fields
    assert (found.key, found.value, found.rule, found.way_out) == (key, value, rule, way_out.format(key))


@pytest.mark.parametrize("text", ["", "format = 1\n", "format = 2\n[model]\n"])
def test_a_recipe_that_sets_no_key_is_noticed(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    [notice] = load_recipe(path).messages
    assert notice == f"recipe {str(path)!r} sets no key, so the defaults apply; `moefold init` writes a recipe"
    path.write_text(f"{text}[run]\nsteps = 2\n")
    assert load_recipe(path).messages == ()
