"""Pictures of a layout: coordinates, colours of groups, and bars of expert loads."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import matplotlib as mpl
import pytest
from matplotlib.image import imread

from moefold.cli.layout_picture import save_picture
from moefold.cli.layout_table import DrawnView, compact_count, describe_changes, unfolded_experts
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.cost.stage_balance import plan_stages, stage_cost
from moefold.errors import ConfigError
from moefold.topology.layout import View, fold
from tests.models import model_of
from tests.slow import slow

SVG = "{http://www.w3.org/2000/svg}"
FOLDINGS = [
    (8, {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    (2, {"world_size": 12, "tp": 3, "pp": 2, "ep": 2, "etp": 3, "order": "pp-tp-cp-dp"}),
    (8, {"world_size": 32, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 2}),
]


def draw(tmp_path, layout, gpus_per_node, plan=None, cfg: Config | None = None) -> ElementTree.ElementTree:
    path = tmp_path / "layout.svg"
    model = None if cfg is None else cfg.model
    costs = None if cfg is None or plan is None else [stage_cost(cfg, stage.parts) for stage in plan.stages]
    with mpl.rc_context({"svg.fonttype": "none"}):
        save_picture(layout, gpus_per_node, path, plan, model, costs)
    return ElementTree.parse(path)


def cards_of(tree, layout) -> list[tuple[int, dict[str, int], dict[str, str]]]:
    """(rank, place by axis, colour by axis) of every card, the attention view first."""
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    fills = [re.search(r"fill: (#\w+)", element.get("style", "")) for element in tree.iter(f"{SVG}path")]
    card_starts = [i for i, text in enumerate(texts) if text == "rank"]
    colours = iter([fill[1] for fill in fills if fill and fill[1] not in ("#ffffff", "#eef1f5")])
    cards = []
    for start in card_starts:
        place, i = {}, start + 2
        while i + 1 < len(texts) and texts[i] in layout.attention.axes + layout.moe.axes:
            place[texts[i]] = int(texts[i + 1])
            i += 2
        cards.append((int(texts[start + 1]), place, {axis: next(colours) for axis in place}))
    assert next(colours, None) is None
    return cards


def assert_view(view: View, cards) -> None:
    cut = [axis for axis in view.axes if view.degree(axis) > 1]
    assert [rank for rank, _, _ in cards] == list(range(view.world_size))
    for rank, place, _ in cards:
        assert place == {axis: view.coordinate(rank, axis) for axis in cut}
    for axis in cut:
        for (a, _, colour_a), (b, _, colour_b) in combinations(cards, 2):
            # Each stage has its colour; so has each other group.
            alike = view.coordinate(a, axis) == view.coordinate(b, axis) if axis == "pp" else b in view.group(a, axis)
            assert (colour_a[axis] == colour_b[axis]) == alike


@pytest.mark.parametrize(("gpus_per_node", "degrees"), FOLDINGS)
def test_cards_show_coordinates_and_colours_show_groups(tmp_path, gpus_per_node, degrees):
    layout = fold(**degrees)
    tree = draw(tmp_path, layout, gpus_per_node)
    cards = cards_of(tree, layout)
    assert_view(layout.attention, cards[: layout.world_size])
    assert_view(layout.moe, cards[layout.world_size : 2 * layout.world_size])
    unfolded = unfolded_experts(layout)
    assert (unfolded is None) == (layout.attention.axes[0] != "pp" or "order" in degrees)
    if unfolded is not None:
        assert_unfolded(unfolded, cards[2 * layout.world_size :])
    nodes = [element.text for element in tree.iter(f"{SVG}text") if (element.text or "").startswith("node ")]
    assert nodes == (2 + (unfolded is not None)) * [f"node {i}" for i in range(-(-layout.world_size // gpus_per_node))]


def assert_unfolded(view: DrawnView, cards) -> None:
    for axis in view.parts_of_axis:
        groups = view.group_indices(axis)
        for (a, place, colour_a), (b, _, colour_b) in combinations(cards, 2):
            if view.degree(axis) > 1 and axis != "pp":
                assert place[axis] == view.coordinate(a, axis)
                assert (colour_a[axis] == colour_b[axis]) == (groups[a] == groups[b])


def test_without_folding_ep_lies_within_dp_and_etp_is_tp():
    layout = fold(world_size=64, tp=2, cp=2, pp=2, ep=8)
    view = unfolded_experts(layout)
    assert {axis: view.degree(axis) for axis in view.parts_of_axis} == {"pp": 2, "edp": 2, "ep": 8, "etp": 2}
    # Neighbours of ep are tp*cp ranks apart, as dp neighbours are.
    group = view.group_indices("ep")
    assert [rank for rank in range(64) if group[rank] == group[0]] == list(range(0, 32, 4))
    assert describe_changes(layout, view, 8) == [
        "experts whole (in 2 pieces with etp = tp)",
        "an ep group on 1 node (4 without)",
        "1/8 of a layer's expert weights on a rank (1/16 without)",
    ]
    small = fold(world_size=8, tp=2, cp=2, pp=2, ep=4)
    assert describe_changes(small, unfolded_experts(small), 8) == [
        "ep is 4 (dp 1 allows only 1)",
        "experts whole (in 2 pieces with etp = tp)",
        "an ep group on 1 node",
        "1/4 of a layer's expert weights on a rank (1/2 without)",
    ]


@pytest.mark.parametrize(
    "degrees",
    [
        {"world_size": 8},
        {"world_size": 8, "tp": 2, "ep": 4, "etp": 2},
        {"world_size": 12, "tp": 3, "pp": 2, "ep": 2, "etp": 3, "order": "pp-tp-cp-dp"},
    ],
)
def test_where_folding_changes_nothing_there_are_two_views(degrees):
    assert unfolded_experts(fold(**degrees)) is None


def test_title_and_change_stand_above_the_views(tmp_path):
    cfg = Config(model=ModelConfig(preset="tiny"), parallel=ParallelConfig(world_size=8, tp=2, cp=2, pp=2, ep=4))
    tree = draw(tmp_path, fold(world_size=8, tp=2, cp=2, pp=2, ep=4), 8, None, cfg)
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    assert texts[0] == "tiny on 8 ranks, 1 node"
    first = texts.index("attention")
    assert " ".join(texts[1:first]).startswith("What folding changes: ep is 4 (dp 1 allows only 1); experts whole")
    assert {"experts, folded", "experts without folding"} <= set(texts)


def test_one_rank_has_nothing_to_colour(tmp_path):
    layout = fold(world_size=1)
    assert cards_of(draw(tmp_path, layout, 8), layout) == [(0, {}, {}), (0, {}, {})]


@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 8), (12, 1), (72, 72), *slow([(64, 8), (256, 8)])])
def test_pictures_keep_a_readable_shape(tmp_path, world_size, gpus_per_node):
    path = tmp_path / "layout.svg"
    save_picture(fold(world_size=world_size), gpus_per_node, path)
    _, _, width, height = map(float, ElementTree.parse(path).getroot().get("viewBox").split())
    assert 0.3 < width / height < 4


def test_png_has_ink_in_both_views(tmp_path):
    path = tmp_path / "layout.png"
    save_picture(fold(world_size=8, tp=2, ep=4), 8, path)
    pixels = imread(path)[..., :3]
    half = pixels.shape[0] // 2
    assert pixels.shape[1] > 1000
    for view in (pixels[:half], pixels[half:]):
        assert 0.02 < (view.max(axis=-1) < 0.5).mean() + (view.min(axis=-1) < 0.8).mean() < 0.5


@pytest.mark.parametrize("name", ["layout", "layout.gif", "layout.json"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg or \.pdf"):
        save_picture(fold(world_size=2), 8, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_file_is_refused(tmp_path):
    (tmp_path / "layout.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        save_picture(fold(world_size=2), 8, tmp_path / "layout.png")


def staged(layout: str, **parallel) -> Config:
    return Config(
        model=model_of({"layers": 6, "layers.ffn": "dense, 2 moe", "mtp_layers": 1}),
        parallel=ParallelConfig(world_size=4, pp=4, pipeline_layout=layout, **parallel),
    )


def stage_texts(tree) -> list[list[str]]:
    """Return the texts after "stage 0", after "stage 1", and so on, each up to the next."""
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    starts = [i for i, text in enumerate(texts) if re.fullmatch(r"stage \d+", text or "")]
    assert [texts[i] for i in starts] == [f"stage {i}" for i in range(len(starts))]
    return [texts[i + 1 : stop] for i, stop in zip(starts, [*starts[1:], len(texts)], strict=True)]


def test_every_stage_shows_its_rank_its_layers_and_their_cost(tmp_path):
    cfg = staged("E|t|||t*3|t||tmL", virtual_stages=2, schedule="zbv")
    plan = plan_stages(cfg)
    tree = draw(tmp_path, fold(world_size=4, pp=4), 8, plan, cfg)
    loads = [stage_cost(cfg, stage.parts) for stage in plan.stages]
    most = max(load.flops for load in loads)
    costs = [[f"{load.flops / most:.0%}", compact_count(load.num_parameters)] for load in loads]
    units = [["E"], ["0"], ["nothing"], ["nothing"], ["1", "2", "3"], ["4"], ["nothing"], ["5", "m", "L"]]
    ranks = [0, 1, 2, 3, 3, 2, 1, 0]
    expected = [[f"pp rank {ranks[i]}", *units[i], *costs[i]] for i in range(8)]
    assert stage_texts(tree) == expected


def test_bars_are_as_long_as_the_loads(tmp_path):
    cfg = staged("Et|tt|tt|tmL")
    plan = plan_stages(cfg)
    tree = draw(tmp_path, fold(world_size=4, pp=4), 8, plan, cfg)
    widths = {"#5b7fb5": [], "#8a9a5b": []}
    for element in tree.iter(f"{SVG}path"):
        fill = re.search(r"fill: (#\w+)", element.get("style", ""))
        if fill and fill[1] in widths:
            xs = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", element.get("d"))]
            widths[fill[1]].append(max(xs) - min(xs))
    loads = [stage_cost(cfg, stage.parts) for stage in plan.stages]
    for drawn, costs in zip(widths.values(), (("flops",), ("num_parameters",)), strict=True):
        of_stage = [getattr(load, *costs) for load in loads]
        assert drawn == pytest.approx([max(drawn) * cost / max(of_stage) for cost in of_stage], rel=1e-3)


def test_without_a_recipe_the_stages_show_only_their_layers(tmp_path):
    plan = plan_stages(staged("Et|tt|tt|tmL"))
    rows = stage_texts(draw(tmp_path, fold(world_size=4, pp=4), 8, plan))
    assert rows == [
        ["pp rank 0", "E", "0"],
        ["pp rank 1", "1", "2"],
        ["pp rank 2", "3", "4"],
        ["pp rank 3", "5", "m", "L"],
    ]


@pytest.mark.parametrize(("pp", "chunks"), [(16, 2), *slow([(2, 1), (32, 4)])])
def test_stages_of_any_number_stay_in_the_picture(tmp_path, pp, chunks):
    schedule = "interleaved" if chunks > 1 else "1f1b"
    cfg = Config(
        model=model_of({"layers": 160}),
        parallel=ParallelConfig(world_size=pp, pp=pp, virtual_stages=chunks, schedule=schedule),
    )
    tree = draw(tmp_path, fold(world_size=pp, pp=pp), 8, plan_stages(cfg), cfg)
    assert len(stage_texts(tree)) == pp * chunks
    _, _, width, height = map(float, tree.getroot().get("viewBox").split())
    assert 0.3 < width / height < 4
    for element in tree.iter(f"{SVG}text"):
        x, y = (float(element.get(key) or 0) for key in ("x", "y"))
        found = re.search(r"translate\(([\d.-]+) ([\d.-]+)\)", element.get("transform", ""))
        x, y = map(float, found.groups()) if found else (x, y)
        assert 0 <= x < width
        assert 0 <= y < height
