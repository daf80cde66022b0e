"""`moefold layout` prints the rank groups and stages of a mapping as text and JSON, in any width."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from moefold.cli.layout import parse_arguments, run
from moefold.cli.layout_table import MAX_LISTED_RANKS
from moefold.errors import ConfigError
from moefold.topology.layout import Layout, fold, fold_mapping

QUICKSTART = ["world_size=8", "tp=2", "cp=2", "pp=2", "ep=4", "etp=1"]
RECIPE = '[parallel]\nworld_size = 16\ntp = 2\npp = 2\nep = 4\nmoe_order = "pp-ep-edp-etp"\n'


def folded(words: list[str]) -> tuple[Layout, int]:
    """Return the layout and the ranks of a node that some arguments mean."""
    cfg, gpus_per_node, _ = parse_arguments(words)
    return fold_mapping(cfg.parallel), gpus_per_node


@pytest.fixture(autouse=True)
def _width_of_a_pipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


def test_json_is_exactly_the_rank_groups(capsys):
    assert run([*QUICKSTART, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == fold(world_size=8, tp=2, cp=2, pp=2, ep=4).as_dict


@pytest.mark.parametrize(
    ("words", "folding"),
    [
        (["world_size=8", "tp=2"], {"world_size": 8, "tp": 2}),
        (["parallel.world_size=8", "parallel.tp=2", "cp=4"], {"world_size": 8, "tp": 2, "cp": 4}),
        (
            ["world_size=8", "pp=2", "order=dp-pp-cp-tp", "moe_order=edp-pp-ep-etp"],
            {"world_size": 8, "pp": 2, "order": "dp-pp-cp-tp", "moe_order": "edp-pp-ep-etp"},
        ),
        (["world_size=6", "tp=2", "tp=3"], {"world_size": 6, "tp": 3}),
    ],
)
def test_arguments_name_the_degrees(words, folding):
    assert folded(words) == (fold(**folding), 8)


def test_recipe_comes_first_and_arguments_override_its_keys(recipe):
    degrees = {"world_size": 16, "tp": 2, "pp": 2, "ep": 4, "moe_order": "pp-ep-edp-etp"}
    assert folded([recipe]) == (fold(**degrees), 8)
    assert folded([recipe, "ep=2", "gpus_per_node=4"]) == (fold(**degrees | {"ep": 2}), 4)


def test_options_may_stand_between_arguments(capsys):
    assert run(["world_size=4", "--json", "tp=4"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"]["tp"] == [[0, 1, 2, 3]]


def test_table_gives_the_coordinates_of_each_rank(capsys):
    assert run(QUICKSTART) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["8", "ranks", "on", "1", "node"] in rows
    assert ["rank", "0", "1", "2", "3", "4", "5", "6", "7"] in rows
    assert ["cp", "0:0", "1:0", "0:1", "1:1", "2:0", "3:0", "2:1", "3:1"] in rows
    assert ["ep", "0:0", "0:1", "0:2", "0:3", "1:0", "1:1", "1:2", "1:3"] in rows
    assert ["dp", *8 * "-"] in rows
    assert ["cp", "4", "2", "1", "{0,2}", "{1,3}", "{4,6}", "{5,7}"] in rows
    assert ["ep", "2", "4", "1", "{0,1,2,3}", "{4,5,6,7}"] in rows


def test_table_is_ordered_by_node(capsys):
    assert run([*QUICKSTART, "gpus_per_node=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line.strip() for line in lines if line.startswith("node ")]
    assert titles == ["node 0, ranks 0-2", "node 1, ranks 3-5", "node 2, ranks 6-7"]
    assert ["ep", "2", "4", "2", "{0,1,2,3}", "{4,5,6,7}"] in [line.split() for line in lines]


@pytest.mark.parametrize(("world_size", "titles"), [(64, 8), (128, 16), (144, 5), (1024, 5)])
def test_large_tables_keep_to_the_width_and_leave_the_middle_out(capsys, world_size, titles):
    assert run([f"world_size={world_size}", "tp=2", "cp=2", "pp=2", "ep=4", "etp=2"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("node ") for line in lines) == titles
    assert lines[0] == f"{world_size} ranks on {world_size // 8} nodes"
    assert f"ranks {world_size - 8}-{world_size - 1}" in out
    assert ("nodes left out" in out) == (world_size > 128)
    assert "\x1b" not in out


@pytest.mark.parametrize("gpus_per_node", [1, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("words", [["tp=2", "cp=3", "pp=2", "ep=4"], ["tp=6", "ep=2", "etp=3", "order=pp-tp-cp-dp"]])
def test_the_nodes_of_an_axis_are_the_nodes_of_its_widest_group(capsys, words, gpus_per_node):
    assert run(["world_size=48", *words, f"gpus_per_node={gpus_per_node}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("groups", 1)[1].splitlines()]
    layout, _ = folded(["world_size=48", *words])
    for view, axes in ((layout.attention, "tp cp dp pp"), (layout.moe, "etp ep edp pp")):
        for axis in axes.split():
            groups = view.groups(axis)
            widest = max(len({rank // gpus_per_node for rank in group}) for group in groups)
            expected = [axis, str(len(groups)), str(len(groups[0])), str(widest)]
            assert any(expected == row[i : i + 4] for row in rows for i in (0, 1)), expected


def test_a_hundred_million_ranks_are_a_pattern(capsys):
    # Nothing is made for each rank: as fast as a thousand.
    assert run(["world_size=100000000", "tp=8", "ep=8"]) == 0
    out = capsys.readouterr().out
    assert "12499995 nodes left out ..." in out
    assert "12499999:7" in out
    with pytest.raises(
        ConfigError, match=f"world_size={MAX_LISTED_RANKS * 8} must be at most {MAX_LISTED_RANKS} for --json"
    ):
        run([f"world_size={MAX_LISTED_RANKS * 8}", "--json"])


def test_wide_nodes_are_printed_in_parts(capsys):
    assert run(["world_size=72", "tp=8", "gpus_per_node=72"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    ranks = [int(word) for line in lines if line.split()[:1] == ["rank"] for word in line.split()[1:]]
    assert ranks == list(range(72))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["world_size=8", "wrld_size=8"],
            "'wrld_size=8' is not a key of a layout; did you mean world_size?; the keys are world_size, tp, cp, pp, "
            "ep, etp, order, moe_order, schedule, schedule.path, virtual_stages, pipeline_layout, gpus_per_node",
        ),
        (["world_size=8", "parallel.tpp=2"], "did you mean tp?"),
        (["world_size=8", "model.layers=2"], "'model.layers=2' is not a key of a layout; the keys are world_size"),
        (["world_size=8", "parallel.zero=2"], "'parallel.zero=2' is not a key of a layout"),
        (["world_size=8", "tp"], "'tp' must be key=value, such as tp=2"),
        (["world_size=8", "dp=2"], "'dp=2': parallel.dp follows from world_size/(tp*cp*pp)"),
        (["world_size=8", "tp=two"], "parallel.tp='two' must be an integer"),
        (["world_size=8", "tp=2.0"], "parallel.tp=2.0 must be an integer"),
        (["world_size=8", "tp=3"], "parallel.tp=3 must divide world_size/pp=8; choose one of 1, 2, 4, 8"),
        (["world_size=8", "gpus_per_node=0"], "gpus_per_node=0 must be an integer of 1 to 1073741824"),
        (["world_size=8", "gpus_per_node=x"], "gpus_per_node=x must be an integer of 1 to 1073741824"),
        (["no-such-recipe.toml", "tp=2"], "recipe 'no-such-recipe.toml' does not exist"),
        (["world_size=8", "--picture", "layout.gif"], "--picture layout.gif must end in .png, .svg or .pdf"),
        (["world_size=8", "--picture", "no-such-folder/a.png"], "no-such-folder/a.png cannot be written: No such file"),
        (["world_size=512", "--picture", "layout.png"], "world_size=512 must be at most 256 for a picture"),
    ],
)
def test_invalid_arguments_are_refused_in_one_message(capsys, words, message):
    with pytest.raises(ConfigError) as refused:
        run(words)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


def test_no_arguments_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        run([])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("moefold layout: error: ")
    assert err.count("\n") == 1


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit) as stopped:
        run(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    keys = ("world_size", "tp", "cp", "pp", "ep", "etp", "order", "moe_order", "gpus_per_node", "--json", "--picture")
    for key in keys:
        assert key in out


def test_png_reports_the_file_with_json_output(tmp_path, capsys):
    path = tmp_path / "layout.png"
    assert run([*QUICKSTART, "--json", "--picture", str(path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["world_size"] == 8
    assert printed.err == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_recipe_has_its_stages(tmp_path):
    recipe, path = tmp_path / "recipe.toml", tmp_path / "layout.svg"
    recipe.write_text("[model]\nlayers = 6\n[parallel]\nworld_size = 2\npp = 2\n")
    heights = []
    for words in ([str(recipe)], ["world_size=2", "pp=2"], ["world_size=2", "pp=2", "pipeline_layout=Et*3|t*3L"]):
        assert run([*words, "--json", "--force", "--picture", str(path)]) == 0
        heights.append(ElementTree.parse(path).getroot().get("height"))
    assert heights[0] == heights[2] != heights[1]


def test_json_has_the_stages_of_a_recipe(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\nlayers = 3\n[parallel]\nworld_size = 2\npp = 2\nschedule = 'zbv'\nvirtual_stages = 2\n")
    assert run([str(recipe), "pipeline_layout=E|tt||tL", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["pipeline_layout"] == "E|tt||tL"
    assert [(stage["stage"], stage["pp_rank"], stage["layers"]) for stage in printed["stages"]] == [
        (0, 0, []),
        (1, 1, [0, 1]),
        (2, 1, []),
        (3, 0, [2]),
    ]
    assert [stage["embedding"] for stage in printed["stages"]] == [True, False, False, False]
    assert [stage["loss"] for stage in printed["stages"]] == [False, False, False, True]


def test_the_stages_are_printed_with_their_cost(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\nlayers = 6\n[parallel]\nworld_size = 2\npp = 2\n")
    assert run([str(recipe), "pipeline_layout=Et*4|ttL"]) == 0
    printed = capsys.readouterr().out
    assert "embedding, layers 0-3" in printed
    assert "layers 4-5, loss" in printed
    assert "100% " in printed


def test_a_layout_by_itself_shows_its_stages(capsys):
    assert run(["world_size=4", "pp=4", "pipeline_layout=Et*3|(t*4|)*2t*3mL"]) == 0
    printed = capsys.readouterr().out
    assert "layers 11-13, 1 MTP, loss" in printed
    assert "weights" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline_layout=Et|xL"], "pipeline_layout='Et|xL': unexpected 'x' at character 4"),
        (["pipeline_layout=Et|t|L"], "the first | too many is at character 5"),
        (["pipeline_layout=auto"], "pipeline_layout=auto balances a model: name a recipe first"),
        (["pipeline_layout=EtL", "schedule=zbv"], "parallel.schedule='zbv' needs parallel.virtual_stages of 2"),
    ],
)
def test_wrong_stages_are_refused(words, message):
    with pytest.raises(ConfigError) as refused:
        run(["world_size=2", "pp=2", *words])
    assert message in str(refused.value)
